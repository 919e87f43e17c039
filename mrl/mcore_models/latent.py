"""Computes multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), for both layer specs.

Dimensions: `T` tokens on this rank, `N` hidden size, `H` heads on this tensor-parallel rank. `Q` is the rank of the
latents of queries, `C` of those of keys and values. A head has `D` channels without rotation and `R` with it; a value
has `V`.

megatron's MLASelfAttention has the same parameters, names and meaning. It is not used, for these reasons:

    down-projections    without transformer-engine it splits them over tensor-parallel ranks, and loses the other
                        ranks' part of the rotary key's gradient; here they are whole on every rank
    rotary embedding    it knows no positions
    norms               they take the model's epsilon, and transformers has 1e-6

Keys and values are cached per head, not as latents.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mrl.kernels import layers as kernels
from mrl.kernels import operators
from mrl.mcore_models.config import LatentConfig
from mrl.mcore_models.elementwise import RotaryFunction
from mrl.ops import devices

LATENT_EPS = 1e-6


@dataclasses.dataclass
class LatentSubmodules:
    """Holds the classes of the parts of latent attention."""

    up: type  # from a latent to heads, with the norm before it where `norm` is None
    heads: type  # from hidden states to heads
    norm: type | None
    core_attention: type
    linear_proj: type


class WholeLinear(torch.nn.Module):
    """Computes y = x W^T with the whole W on every tensor-parallel rank."""

    def __init__(self, config: LatentConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(outputs, inputs, dtype=config.params_dtype, device=devices.device())
        )
        config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LatentAttention(MegatronModule):
    """Replaces megatron's self-attention: hidden states [T, 1, N] in and out ([T / tp, 1, N] with sequence
    parallelism)."""

    def __init__(self, config: LatentConfig, submodules: LatentSubmodules, layer_number: int, pg_collection: Any = None,
                 cp_comm_type: str | None = None, **_: Any) -> None:  # fmt: skip
        super().__init__(config=config)
        self.layer_number, self.tp = layer_number, pg_collection.tp
        self.softmax_scale = config.latent_scale
        self.turning = torch.empty(0)  # [R / 2] frequencies, and the factor on cosines and sines: set by build
        self.rotary_scale = 1.0
        heads = config.num_attention_heads
        wide = {"config": config, "init_method": config.init_method, "bias": False, "is_expert": False}
        wide |= {"skip_bias_add": False, "tp_group": self.tp}
        # transformer-engine's linear takes the epsilon of the norm in it from the config
        # (TELayerNormColumnParallelLinear, extensions/transformer_engine.py)
        of_latents = copy.copy(config)
        of_latents.layernorm_epsilon = LATENT_EPS
        latents = wide | {"config": of_latents}
        query, latent = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim), config.kv_lora_rank
        if config.q_lora_rank is None:
            self.linear_q_proj = submodules.heads(config.hidden_size, query, gather_output=False, **wide)
        else:
            self.linear_q_down_proj = WholeLinear(config, config.hidden_size, config.q_lora_rank)
            self.q_layernorm = _norm(submodules, config, config.q_lora_rank)
            self.linear_q_up_proj = submodules.up(config.q_lora_rank, query, gather_output=False, **latents)
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, latent + config.qk_pos_emb_head_dim)
        self.kv_layernorm = _norm(submodules, config, latent)
        self.linear_kv_up_proj = submodules.up(
            latent, heads * (config.qk_head_dim + config.v_head_dim), gather_output=False, **latents
        )
        self.core_attention = submodules.core_attention(
            config=config, layer_number=layer_number, attn_mask_type=AttnMaskType.causal, attention_type="self",
            softmax_scale=self.softmax_scale, k_channels=config.qk_head_dim + config.qk_pos_emb_head_dim,
            v_channels=config.v_head_dim, cp_comm_type=cp_comm_type, pg_collection=pg_collection,
        )  # fmt: skip
        self.linear_proj = submodules.linear_proj(
            heads * config.v_head_dim, config.hidden_size, input_is_parallel=True,
            **wide | {"init_method": config.output_layer_init_method, "skip_bias_add": True},
        )  # fmt: skip

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Returns (hidden states, None: no bias)."""
        latents, positions = self._latents(hidden_states), packed_seq_params.positions
        dropped = None
        if self._recomputes("mla_up_proj"):
            dropped = tensor_parallel.CheckpointWithoutOutput(self.config.fp8)
            query, key, value = dropped.checkpoint(self._heads, *latents, positions)
        else:
            query, key, value = self._heads(*latents, positions)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.core_attention(
                query, key, value, attention_mask, attn_mask_type=AttnMaskType.causal,
                packed_seq_params=packed_seq_params,
            )  # fmt: skip

        if self._recomputes("core_attn"):
            out = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            out = attend(query, key, value)
        if dropped is not None:
            dropped.discard_output_and_register_recompute(out)
        return self.linear_proj(out.reshape(out.shape[0], 1, -1))

    def set_for_recompute_input_layernorm(self) -> None:
        """Makes the linear of queries keep its input, as megatron asks under FP8.

        It is called if the norm before attention is computed again and its output dropped. The linear of
        transformer-engine would keep 8 bits of that output and never ask for it. The down-projections are torch's and
        keep it as it is.
        """
        if self.config.q_lora_rank is None:
            from megatron.core.extensions.transformer_engine import set_save_original_input

            set_save_original_input(self.linear_q_proj)

    def _recomputes(self, module: str) -> bool:
        """Returns whether a forward keeps no activations of a part, by megatron's name for it."""
        selective = self.config.recompute_granularity == "selective" and module in self.config.recompute_modules
        return selective and self.training and torch.is_grad_enabled()

    def _latents(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the latents of queries and of keys and values, and the rotary key before it turns.

        Without latents of queries, the hidden states stand for them.
        """
        config = self.config
        query = hidden if config.q_lora_rank is None else self.linear_q_down_proj(hidden)
        latent, key_turned = self.linear_kv_down_proj(hidden).split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1
        )
        return query, latent, key_turned

    def _heads(
        self, query: Tensor, latent: Tensor, key_turned: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query and key [T, H, D + R] and value [T, H, V] of all T tokens, from what `_latents` gives."""
        config = self.config
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(query)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(query))
        both, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        # every rank's heads use the one rotary key, so its gradient is the sum over them
        if config.sequence_parallel:
            key_turned = gather_from_sequence_parallel_region(key_turned, group=self.tp)
        elif self.tp.size() > 1:
            key_turned = copy_to_tensor_model_parallel_region(key_turned, group=self.tp)
        return self.turned_heads(query, both, key_turned, self._cos_sin(positions, query.dtype))

    def turned_heads(
        self, query: Tensor, both: Tensor, key_turned: Tensor, cos_sin: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query and key [T, H, D + R] and value [T, H, V] from the linears' outputs.

        query: [T, ..., H * (D + R)]. both: keys and values, [T, ..., H * (D + V)]. key_turned: the rotary key before it
        turns, [T, 1, R]. cos_sin: [T, 1, R] each.
        """
        config = self.config
        query = query.view(query.shape[0], -1, config.qk_head_dim + config.qk_pos_emb_head_dim)
        both = both.view(both.shape[0], -1, config.qk_head_dim + config.v_head_dim)
        still, turned = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        key_still, value = both.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        turned, key_turned = self._turned(turned, key_turned, *cos_sin)
        key = torch.cat([key_still, key_turned.expand(-1, key_still.shape[1], -1)], dim=-1)
        return torch.cat([still, turned], dim=-1), key, value

    def _cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines [T, 1, R] each."""
        angles = torch.outer(positions.to(self.turning.dtype), self.turning)
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        return (angles.cos() * self.rotary_scale).to(dtype), (angles.sin() * self.rotary_scale).to(dtype)

    def _turned(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both [T, heads, R], turned. Pairs are neighbours if `rope_interleave` is set, else halves apart."""
        if self.config.rope_interleave:
            query, key = (torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1) for x in (query, key))
        if operators.supports(query):
            return kernels.rotary(query, key, cos.squeeze(1), sin.squeeze(1))
        return RotaryFunction.apply(query, cos, sin), RotaryFunction.apply(key, cos, sin)


def _norm(submodules: LatentSubmodules, config: LatentConfig, size: int) -> torch.nn.Module:
    return torch.nn.Identity() if submodules.norm is None else submodules.norm(config, size, eps=LATENT_EPS)
