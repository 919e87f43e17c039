"""Adds distillation to a micro-batch, as shapes: ids at each token, and log-probs of them.

Dimensions: `T` tokens of a micro-batch, `K` ids for the comparison of teacher and student.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mrl.engine.base import LossFn
from mrl.ops import devices


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
