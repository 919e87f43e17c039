"""Has the output heads of the last pipeline stage: next-token logits, which need never be whole, or one value per
token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

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
