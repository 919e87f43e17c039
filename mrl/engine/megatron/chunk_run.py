"""Runs one micro-batch through single chunks of a model, without the pipeline around them.

It may be one of distillation, as shapes: ids at each token, and log-probs of them.

Dimensions: `T` tokens of the micro-batch, `K` ids for the comparison of teacher and student.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.batch import Batch, make_batch
from mrl.config.schema import RoleConfig
from mrl.engine.base import Ctx, LossFn, Predictions
from mrl.engine.megatron.scaling import megatron_scale
from mrl.ops import devices


class ChunkRun:
    """Holds a micro-batch whose tokens all train. Use it inside `state.installed()` (groups.py)."""

    def __init__(
        self, config: RoleConfig, model: Any, lengths: Sequence[int], entropy: str, ids: DistillIds | None = None
    ) -> None:
        from mrl.engine.megatron import pipeline

        self._pipeline = pipeline
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
        return self._pipeline.make_micro_batch(self.batch, self.ctx, None, self.setup, trains=self.trains)

    def hidden(self, micro_batch: Any, inner: Any) -> Tensor | None:
        """Returns hidden states as another chunk would send them; None for the chunk with the embedding."""
        if inner.pre_process:
            return None
        rows = micro_batch.inputs.tokens.numel() // (self.dims.tp if self.dims.sp else 1)
        shape, dtype = (rows, 1, self.model.hf["hidden_size"]), self.model.dtype
        return torch.randn(shape, dtype=dtype, device=devices.device(), requires_grad=self.trains)

    def forward(self, micro_batch: Any, chunk: Any, inner: Any, hidden: Tensor | None) -> Tensor:
        """Returns the chunk's hidden states, or the loss of the last one. inner: the chunk without DDP."""
        self.model.transformer.grad_scale_func = megatron_scale(1.0)
        if hidden is not None:
            inner.set_input_tensor(hidden)
        call = self._pipeline.StepConfig(self._loss if self.trains else None, 1.0, 1.0, not self.trains, None)
        output, loss = self._pipeline._forward_step(iter([micro_batch]), chunk, setup=self.setup, call=call, count=1)
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


@dataclasses.dataclass(frozen=True)
class DistillIds:
    """Describes the token ids at which distillation compares distributions, beside the label of each token."""

    count: int  # K
    loss: LossFn | None  # the student's; None: the passes are the teacher's, and give its likeliest ids
    teacher: str = ""  # the token field [T, K] fp32 of the teacher's log-probs, for `loss`
    temperature: float = 1.0
    first_temperature: float | None = None  # for the label

    @property
    def ctx(self) -> dict[str, Any]:
        """Returns the ctx of the engine's forward."""
        asked = {"top": self.count} if self.loss is None else {"first_temperature": self.first_temperature}
        return {"temperature": self.temperature, **asked}

    def add_to_inputs(self, micro_batch: Any) -> int:
        """Gives a micro-batch of the student's the ids and the teacher's log-probs. Returns their bytes."""
        if self.loss is None:
            return 0
        data, ins = micro_batch.data, micro_batch.inputs
        labels = _empty(data.num_tokens, 1 + self.count, torch.int64)
        teacher = _empty(data.num_tokens, self.count, torch.float32)
        of_model = _empty(ins.tokens.numel(), 1 + self.count, torch.int64)
        micro_batch.data = dataclasses.replace(data, labels=labels, token_fields={self.teacher: teacher})
        micro_batch.inputs = dataclasses.replace(ins, labels=of_model)
        return labels.nbytes + teacher.nbytes + of_model.nbytes

    def kept(self, micro_batch: Any) -> tuple[int, int]:
        """Returns bytes of a micro-batch's predictions once it is done, and of what then joins those of all.

        The second is the whole by name, and beside the last one its parts end to end (mrl.engine.collective,
        to_batch_order). Stages before the last have no predictions, and receive the whole.
        """
        tokens, each = micro_batch.data.num_tokens, 4 * self.count
        sizes = [4, each, 2 * each] if self.loss is None else [4 + each]  # the teacher's ids are int64
        if not micro_batch.predictions:
            return 0, tokens * sum(sizes)
        whole = [tensor.untyped_storage() for tensor in micro_batch.predictions.values()]
        storage_bytes = sum({storage._cdata: storage.nbytes() for storage in whole}.values())
        return storage_bytes, tokens * max(sum(sizes[: i + 1]) + size for i, size in enumerate(sizes))


def _empty(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype, device=devices.META)
