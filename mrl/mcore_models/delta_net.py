"""Computes gated delta net attention (Yang et al., arXiv 2412.06464) as Qwen3.5 has it, for both layer specs.

Dimensions: `T` tokens on this rank, `N` hidden size, `G` key heads on this tensor-parallel rank, `R` value heads that
share a key head. `K` and `V` are the channels of a key and of a value head.

megatron's GatedDeltaNet is not used, for these reasons (0.16.1 and 0.19.2):

    sequences       0.16.1 (ssm/gated_delta_net.py) refuses packed ones; 0.19.2 needs the package fla for them, and
                    refuses them if operations are deterministic
    projections     rows of `in_proj` are blocks of the whole model, so a checkpoint's key depends on the layout;
                    here they are interleaved for each key head, like those of `linear_qkv`

Context parallelism: ranks exchange tokens for heads before the convolution, and heads for tokens after the rule.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from mrl.mcore_models.attention import CacheLayout, PackedLayout
from mrl.mcore_models.config import Config
from mrl.ops import devices
from mrl.ops.delta_heads import DeltaHeads
from mrl.ops.delta_rule import reorder
from mrl.ops.kv_cache import CachedStep

SPLIT = ("conv_weight", "A_log", "dt_bias")
"""Parameters of which each tensor-parallel rank has the rows of its heads."""


@dataclasses.dataclass
class DeltaSubmodules:
    """Holds the classes of the two linear layers."""

    in_proj: type  # with the norm before it under transformer-engine
    out_proj: type


class GatedDeltaNet(MegatronModule):
    """Replaces megatron's self-attention: hidden states [T, 1, N] in and out ([T / tp, 1, N] with sequence
    parallelism)."""

    def __init__(
        self, config: Config, submodules: DeltaSubmodules, layer_number: int, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.tp, self.cp = layer_number, pg_collection.tp, pg_collection.cp
        heads, values = config.linear_num_key_heads, config.linear_num_value_heads
        self.key, self.value = config.linear_key_head_dim, config.linear_value_head_dim
        self.sharing = values // heads
        self.heads = heads // self.tp.size()
        self.mixed = 2 * self.key + self.sharing * self.value  # channels of the convolution for each key head
        wide = {"config": config, "init_method": config.init_method, "bias": False, "is_expert": False}
        wide |= {"skip_bias_add": False, "tp_group": self.tp}
        rows = self.mixed + self.sharing * (self.value + 2)
        self.in_proj = submodules.in_proj(
            config.hidden_size, heads * rows, gather_output=False, tp_comm_buffer_name="qkv", **wide
        )
        options = {"dtype": config.params_dtype, "device": devices.device()}
        # filled from files or RandomWeights
        convolution = torch.zeros(self.heads * self.mixed, 1, config.linear_conv_kernel_dim, **options)
        self.conv_weight = torch.nn.Parameter(convolution)
        self.A_log, self.dt_bias = (
            torch.nn.Parameter(torch.zeros(self.heads * self.sharing, **options)) for _ in range(2)
        )
        for name in SPLIT:
            # else clip_grads.get_grad_norm_fp32 counts those of the first rank alone
            set_tensor_model_parallel_attributes(getattr(self, name), True, 0, 1)
        self.out_norm = GatedNorm(self.value, config.layernorm_epsilon, self.tp, options)
        self.out_proj = submodules.out_proj(
            values * self.value, config.hidden_size, input_is_parallel=True, tp_comm_buffer_name="proj",
            **wide | {"init_method": config.output_layer_init_method, "skip_bias_add": True},
        )  # fmt: skip

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Returns (hidden states, None: no bias)."""
        projected, _bias = self.in_proj(hidden_states)
        if isinstance(packed_seq_params, CacheLayout):
            assert packed_seq_params.step is not None
            return self.out_proj(self.cached(projected.squeeze(1), packed_seq_params.step).unsqueeze(1))
        inputs, gate = self._parts(projected.squeeze(1))
        again = self.config.recompute_granularity == "selective" and "core_attn" in self.config.recompute_modules
        if again and self.training and torch.is_grad_enabled():
            out = tensor_parallel.checkpoint(lambda x: self._attend(x, packed_seq_params), False, inputs)
        else:
            out = self._attend(inputs, packed_seq_params)
        return self.out_proj(self.out_norm(out, gate).flatten(1).unsqueeze(1))

    def cached(self, projected: Tensor, step: CachedStep) -> Tensor:
        """Returns the input [>=T, G * R * V] of `out_proj` for new tokens of a step, and keeps the states after them.

        projected: [>=T, ...] of `in_proj`.
        """
        inputs, gate = self._parts(projected)
        return self.out_norm(self.parameters_of_heads.cached(self.layer_number, inputs, step), gate).flatten(1)

    def _parts(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the inputs of `DeltaHeads` [T, G, 2K + R*V + 2R] and the gate [T, G, R, V], from [T, G * ...]."""
        sizes = [self.mixed, self.sharing * self.value, 2 * self.sharing]
        mixed, gate, rates = projected.unflatten(-1, (self.heads, -1)).split(sizes, dim=-1)
        return torch.cat([mixed, rates], dim=-1), gate.unflatten(-1, (self.sharing, self.value))

    @property
    def parameters_of_heads(self) -> DeltaHeads:
        weight = self.conv_weight.squeeze(1).unflatten(0, (self.heads, self.mixed))
        a_log, dt_bias = (rate.unflatten(0, (self.heads, self.sharing)) for rate in (self.A_log, self.dt_bias))
        return DeltaHeads(weight, a_log, dt_bias, self.key, self.config.deterministic_mode)

    def _attend(self, inputs: Tensor, layout: PackedLayout) -> Tensor:
        """Returns the outputs [T, G, R, V] of this rank's tokens."""
        ranks = self.cp.size()
        if ranks == 1:
            return self.parameters_of_heads(inputs, layout.chunks)
        heads = self.parameters_of_heads.part(self.cp.rank(), ranks)
        order, back = layout.order, layout.inverse
        whole = reorder(self._heads_for_tokens(inputs), order, back)
        return self._tokens_for_heads(reorder(heads(whole, layout.chunks), back, order))

    def _heads_for_tokens(self, x: Tensor) -> Tensor:
        """Returns [cp * T, G / cp, ...] in the order of ranks, from [T, G, ...] of each rank."""
        parts = x.unflatten(1, (self.cp.size(), -1)).transpose(0, 1).contiguous()
        return all_to_all(self.cp, parts.flatten(0, 1))

    def _tokens_for_heads(self, x: Tensor) -> Tensor:
        """Returns [T, G, ...] of this rank's tokens, from [cp * T, G / cp, ...] in the order of ranks."""
        by_rank = all_to_all(self.cp, x)
        return by_rank.unflatten(0, (self.cp.size(), -1)).transpose(0, 1).flatten(1, 2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Splits the parameters of heads over tensor-parallel ranks."""
        assert metadata is not None
        own = make_sharded_tensors_for_checkpoint(
            {name: getattr(self, name) for name in SPLIT}, prefix, dict.fromkeys(SPLIT, 0), sharded_offsets,
            tp_group=self.tp, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | own


class GatedNorm(torch.nn.Module):
    """Computes x / rms(x) * weight * silu(gate) for each head, in fp32 inside. All tensor-parallel ranks have the
    weight."""

    def __init__(self, size: int, eps: float, tp: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.eps, self.tp = eps, tp
        self.weight = torch.nn.Parameter(torch.ones(size, **options))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        # each rank has the part of the gradient that its heads give; megatron sums those of q_layernorm by name
        # (finalize_model_grads._allreduce_non_tensor_model_parallel_grads)
        weight = self.weight if self.tp.size() == 1 else copy_to_tensor_model_parallel_region(self.weight, self.tp)
        normed = weight * F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype)
        return (normed * F.silu(gate.float())).to(x.dtype)
