"""What te_attention.py is asked and what it answers, for the tests, which run where torch is as it is."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Layout:
    model: str
    tp: int = 1
    cp: int = 1
    dtype: str = "bfloat16"
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        degrees = "".join(f" {name}{n}" for name, n in (("tp", self.tp), ("cp", self.cp)) if n > 1)
        dtype = f" {self.dtype}" if self.dtype != "bfloat16" else ""
        return self.model.split("/")[1] + degrees + dtype + "".join(f" {k}={v}" for k, v in self.changes.items())


@dataclasses.dataclass
class Found:
    reached: set[str]  # by its layers: "flash", "fused", "unfused", or what transformer-engine says
    told: str | None  # te_limits.te_refusal
    kernels: tuple[str, ...]  # te_limits.kernels
