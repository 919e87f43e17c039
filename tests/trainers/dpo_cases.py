"""What the ranks of a test world run of `mrl dpo`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from mrl.config.dpo import DPOConfig
from mrl.config.load import from_dict
from mrl.trainers import dpo
from tests.trainers.cases import HAPPENINGS, outcome


def train(config: Mapping[str, Any], *, happening: str | None = None, **details: Any) -> tuple[str, str, str]:
    """As `tests.trainers.cases.train`."""
    around = HAPPENINGS[happening](**details) if happening else contextlib.nullcontext()
    with around:
        return outcome(lambda: dpo.run(from_dict(config, DPOConfig), "mrl dpo config.yaml"))
