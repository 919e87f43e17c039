"""Latent attention with a core attention that is called as megatron's wrapper of transformer-engine's has to be.

Not covered here: what it computes (tests/engine/test_parity_megatron.py), and transformer-engine itself, which needs a GPU.
"""

import types

import torch

from mrl.mcore_models import cpu_stand_in

cpu_stand_in.prepare()

from megatron.core.transformer.enums import AttnMaskType  # noqa: E402

from mrl.mcore_models.attention import PackedLayout, SdpaAttention  # noqa: E402
from mrl.mcore_models.config import LatentConfig  # noqa: E402
from mrl.mcore_models.latent import LatentAttention, LatentSubmodules  # noqa: E402
from mrl.mcore_models.layers import RMSNorm  # noqa: E402

ALONE = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
GROUPS = types.SimpleNamespace(tp=ALONE, cp=ALONE)


class Linear(torch.nn.Linear):
    """A parallel linear on one rank."""

    def __init__(self, inputs: int, outputs: int, **_) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x):
        return super().forward(x), None


class Strict(SdpaAttention):
    """Takes what `TEDotProductAttention` of megatron/core/extensions/transformer_engine.py takes, of which nothing is optional
    that is not optional there."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None,
                 k_channels=None, v_channels=None, num_splits=None, cp_comm_type="p2p", pg_collection=None):  # fmt: skip
        assert isinstance(attn_mask_type, AttnMaskType) and attention_type == "self"
        assert (k_channels, v_channels) == (12, 6)
        super().__init__(config, layer_number, softmax_scale=softmax_scale, pg_collection=pg_collection)

    def forward(self, query, key, value, attention_mask, attn_mask_type, attention_bias=None, packed_seq_params=None,
                num_splits=None):  # fmt: skip
        assert attn_mask_type is AttnMaskType.causal
        return super().forward(query, key, value, attention_mask, packed_seq_params=packed_seq_params)


def attention(core):
    config = LatentConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, q_lora_rank=10, kv_lora_rank=14, qk_head_dim=8,
        qk_pos_emb_head_dim=4, v_head_dim=6, kv_channels=4, latent_scale=0.3, attention_dropout=0.0,
    )  # fmt: skip
    parts = LatentSubmodules(up=Linear, heads=Linear, norm=RMSNorm, core_attention=core, linear_proj=Linear)
    made = LatentAttention(config, parts, 1, pg_collection=GROUPS)
    made.turning = torch.tensor([1.0, 0.1])
    return made


def test_a_core_attention_as_strict_as_transformer_engines():
    torch.manual_seed(0)
    ours, theirs = attention(SdpaAttention), attention(Strict)
    theirs.load_state_dict(ours.state_dict())
    lengths = [3, 5]
    positions = torch.cat([torch.arange(n) for n in lengths])
    layout = PackedLayout.for_sequences(lengths, positions=positions)
    hidden = torch.randn(8, 1, 16)
    assert torch.equal(theirs(hidden, packed_seq_params=layout)[0], ours(hidden, packed_seq_params=layout)[0])
