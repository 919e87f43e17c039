"""What the workers of TRL's trainers on rows share, in the peer's own venv."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from measure import Meter
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback


class Clock(TrainerCallback):
    """Times the steps."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_train_begin(self, args, state, control, **kwargs):
        self.meter.mark()

    def on_step_end(self, args, state, control, **kwargs):
        self.meter.step()


class InOrder:
    """A base before a trainer's class: it takes the rows in the file's order, so that all trainers see the same batches."""

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


def arguments_of(spec: Mapping[str, Any], *, batch_size: int, **own: Any) -> dict[str, Any]:
    """What a trainer's config is given: that of all, a worker's `own`, and over them `spec["arguments"]`."""
    return {
        "output_dir": str(pathlib.Path(spec["folder"]) / "trl"), "use_cpu": True, "max_steps": spec["steps"],
        "learning_rate": spec["lr"], "per_device_train_batch_size": batch_size, "report_to": [], "save_strategy": "no",
        "logging_steps": 1, "lr_scheduler_type": "constant", "adam_beta2": 0.95, "dataloader_pin_memory": False,
        "disable_tqdm": True, **own, **spec["arguments"],
    }  # fmt: skip
