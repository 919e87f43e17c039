"""Has the output heads of the last pipeline stage: next-token logits, which need never be whole, or one value per
token. MTP layers predict more tokens (DeepSeek-V3, arXiv 2412.19437, section 2.2).

MTP layers are megatron's block, with layers of our own. megatron's layer shifts tokens and labels itself, at every
layer and across context-parallel ranks. It divides their loss by counts of its micro-batch and rank, so the loss
depends on both (transformer/multi_token_prediction.py). Ours gets shifted tokens (`mrl/engine/megatron/inputs.py`) and
returns hidden states. Their loss is made together with the main one (docs/loss.md). Layers and parameters have the
names of a checkpoint under every megatron; 0.19 calls `transformer_layer` otherwise in the module.

Dimensions: `T` tokens of this rank's part of the micro-batch, `H` hidden size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from mrl.mcore_models.attention import PackedLayout
from mrl.mcore_models.config import Config, LatentConfig
from mrl.ops import devices

Project = Callable[[Tensor, Tensor], Tensor]
"""`project(hidden [T, H], weight [V/tp, H]) -> [T, K]`: what the head gives for each token. hidden is whole on every
tensor-parallel rank; its gradient is reduced by `project` unless the model is sequence-parallel."""


class LanguageHead(ColumnParallelLinear):
    """Passes hidden states and its local weight to `project`, in place of the output layer.

    So the caller decides what becomes of them: log-probs of labels chunk by chunk, or logits. The logits need not exist
    at once.
    """

    project: Project

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Returns ([T, 1, K], None) of input_ [T (/tp under sequence parallelism), 1, H]."""
        hidden = gather_from_sequence_parallel_region(input_, group=self.tp_group) if self.sequence_parallel else input_
        return self.project(hidden.squeeze(1), self.weight if weight is None else weight).unsqueeze(1), None

    @classmethod
    def replacing(cls, layer: ColumnParallelLinear, config: TransformerConfig) -> "LanguageHead":
        """Returns a head that takes over the weight and parallel attributes of GPTModel's own output layer."""
        head = cls(
            layer.input_size, layer.output_size, config=config, init_method=config.init_method, bias=False,
            skip_weight_param_allocation=True, tp_group=layer.tp_group,
        )  # fmt: skip
        if layer.weight is not None:
            head.weight = layer.weight
        return head


class ValueHead(torch.nn.Module):
    """Computes value_t = w . h_t, with w on every tensor-parallel rank. It is not tied to anything (a tied model
    unties)."""

    def __init__(self, config: TransformerConfig, tp_group: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=devices.device())
        )
        # a rank sees a part of the sequence, so finalize_model_grads has to sum the gradient over the ranks
        self.weight.sequence_parallel = self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Returns ([T, 1, 1] fp32, None) of input_ [T (/tp), 1, H]."""
        values = torch.nn.functional.linear(input_, self.weight).float()
        if self.sequence_parallel:
            # every rank computes the same loss from the values: each takes its part of the gradient, without a sum
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None


@dataclasses.dataclass(frozen=True)
class MTPLayerInputs:
    """Holds the inputs of one MTP layer."""

    tokens: Tensor  # [T], the token that is so many places ahead
    padding: Tensor  # [T] bool, True if there is no token, or none to predict
    project: Project  # makes the head's output of the hidden states


@dataclasses.dataclass(frozen=True)
class MTPSubmodules:
    """Holds classes and specs of a layer's parts."""

    norm: type
    eh_proj: type
    transformer_layer: ModuleSpec


def mtp_block_spec(parts: MTPSubmodules, count: int) -> ModuleSpec:
    """Returns megatron's block of so many MTP layers of these parts."""
    layers = [ModuleSpec(module=MTPLayer, submodules=parts)] * count
    submodules = MultiTokenPredictionBlockSubmodules(layer_specs=layers)
    return ModuleSpec(module=MultiTokenPredictionBlock, submodules=submodules)


class MTPLayer(MegatronModule):
    """Has norms of a hidden state and of a later token's embedding, the matrix that joins the two, a layer, a norm."""

    def __init__(
        self,
        config: Config | LatentConfig,
        submodules: MTPSubmodules,
        layer_number: int = 1,
        vp_stage: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number  # from 1 among MTP layers, for MultiTokenPredictionBlock
        norm = functools.partial(
            submodules.norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )
        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = submodules.eh_proj(
            2 * config.hidden_size, config.hidden_size, config=config, init_method=config.init_method,
            gather_output=False, bias=False, skip_bias_add=False, is_expert=False,
        )  # fmt: skip
        past_the_last = config.num_layers - get_transformer_layer_offset(config, vp_stage)
        self.transformer_layer = build_module(
            submodules.transformer_layer, config=config, vp_stage=vp_stage, layer_number=layer_number + past_the_last
        )
        self.final_layernorm = norm()

    @property
    def mtp_model_layer(self) -> torch.nn.Module:
        """Returns the layer under the name that 0.19's schedules look for
        (transformer/cuda_graphs.set_current_microbatch)."""
        return self.transformer_layer

    def forward(
        self, hidden: Tensor, embedded: Tensor, rotary: Tensor, layout: PackedLayout, padding: Tensor
    ) -> Tensor:
        """Returns hidden states, normed.

        hidden, embedded: [T (/tp under sequence parallelism), 1, H], of the layer before and of the tokens ahead.

        rotary: that of the model's layers. padding: [1, T (/tp)] bool.
        """
        run = functools.partial(self._run, rotary=rotary, layout=layout, padding=padding)
        if self.config.recompute_granularity == "full" and self.training and torch.is_grad_enabled():
            return tensor_parallel.checkpoint(run, False, hidden, embedded)
        return run(hidden, embedded)

    def _run(
        self, hidden: Tensor, embedded: Tensor, *, rotary: Tensor, layout: PackedLayout, padding: Tensor
    ) -> Tensor:
        joined, _ = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        joined = gather_from_tensor_model_parallel_region(joined)
        if self.config.sequence_parallel:
            joined = scatter_to_sequence_parallel_region(joined)
        output, _ = self.transformer_layer(
            hidden_states=joined, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=layout,
            padding_mask=padding,
        )  # fmt: skip
        return self.final_layernorm(output)
