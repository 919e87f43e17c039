"""What the ranks of a test world run of `mrl dpo`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any
from unittest import mock

from mrl.batch import Batch
from mrl.config.dpo import DPOConfig
from mrl.config.load import from_dict
from mrl.engine.fsdp.engine import FSDPEngine
from mrl.trainers import dpo
from tests.trainers.cases import HAPPENINGS, outcome


def train(config: Mapping[str, Any], *, happening: str | None = None, **details: Any) -> tuple[str, str, str]:
    """As `tests.trainers.cases.train`."""
    around = HAPPENINGS[happening](**details) if happening else contextlib.nullcontext()
    with around:
        return outcome(lambda: dpo.run(from_dict(config, DPOConfig), "mrl dpo config.yaml"))


def passes(config: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """(role, what kind of pass, sequences) of each pass of a run of `mrl dpo` through a whole batch, alone, in order."""
    found, step = [], FSDPEngine.forward_backward_step

    def noting(self: FSDPEngine, batch: Batch, ctx: Any = None, forward_only: bool = False, **options: Any) -> Any:
        role = "" if self.config.optimizer is not None else "reference"
        found.append((role, "forward" if forward_only else "train", batch.num_sequences))
        return step(self, batch, ctx, forward_only, **options)

    with mock.patch.object(FSDPEngine, "forward_backward_step", noting):
        assert train(config)[0] == "done"
    return found
