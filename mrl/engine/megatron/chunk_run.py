"""Runs one micro-batch through single chunks of a model, without the pipeline around them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.batch import Batch, make_batch
from mrl.config.schema import RoleConfig
from mrl.engine.base import Ctx, Predictions
from mrl.engine.megatron.meta_ids import DistillIds
from mrl.engine.megatron.scaling import megatron_scale
from mrl.ops import devices


class ChunkRun:
    """Holds a micro-batch whose tokens all train. Use it inside `state.installed()` (groups.py)."""

    def __init__(
        self, config: RoleConfig, model: Any, lengths: Sequence[int], entropy: str, ids: DistillIds | None = None
    ) -> None:
        from mrl.engine.megatron import pipeline

        self.dims, self.model, self.trains = model.dims, model, config.optimizer is not None
        self.setup = pipeline.PipelineConfig.of(model, config)
        # the last token is only a label; equal ones would all add to one row of the embedding's gradient
        draw = random.Random(0)
        tokens = [draw.choices(range(model.hf["vocab_size"]), k=n + 1) for n in lengths]
        self.batch = make_batch(tokens, [[1.0] * len(t) for t in tokens])
        self.ctx: dict[str, Any] = {"temperature": 1.0, "entropy": entropy}
        self.ids = ids
        self.ctx |= {} if ids is None else ids.ctx

    def micro_batch(self) -> Any:
        from mrl.engine.megatron import pipeline

        return pipeline.make_micro_batch(self.batch, self.ctx, None, self.setup, trains=self.trains)

    def hidden(self, micro_batch: Any, inner: Any) -> Tensor | None:
        """Returns hidden states as another chunk would send them; None for the chunk with the embedding."""
        if inner.pre_process:
            return None
        rows = micro_batch.inputs.tokens.numel() // (self.dims.tp if self.dims.sp else 1)
        shape, dtype = (rows, 1, self.model.hf["hidden_size"]), self.model.dtype
        return torch.randn(shape, dtype=dtype, device=devices.device(), requires_grad=self.trains)

    def forward(self, micro_batch: Any, chunk: Any, inner: Any, hidden: Tensor | None) -> Tensor:
        """Returns the chunk's hidden states, or the loss of the last one. inner: the chunk without DDP."""
        from mrl.engine.megatron import pipeline

        self.model.transformer.grad_scale_func = megatron_scale(1.0)
        if hidden is not None:
            inner.set_input_tensor(hidden)
        call = pipeline.StepConfig(self._loss if self.trains else None, 1.0, 1.0, not self.trains, None)
        output, loss = pipeline._forward_step(iter([micro_batch]), chunk, setup=self.setup, call=call, count=1)
        return loss(output)[0] if inner.post_process else output

    def _loss(self, data: Batch, predictions: Predictions, ctx: Ctx) -> tuple[Tensor, Ctx]:
        if self.ids is not None and self.ids.loss is not None:
            loss, _ = self.ids.loss(data, predictions, ctx)
        else:
            name = "values" if "values" in predictions else "log_probs"
            loss = (predictions[name] * data.loss_mask).sum()
        if self.ctx["entropy"] == "differentiable":
            loss = loss + predictions["entropy"].sum()
        return loss, ctx
