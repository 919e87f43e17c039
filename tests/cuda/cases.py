"""What is run on fake CUDA tensors, and what comes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

LENGTHS = (700, 229, 95)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model in a layout, seen from one rank."""

    model: str
    world: int = 1
    rank: int = 0
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool | str = "auto"
    layers: int | None = 4
    dtype: str = "bfloat16"
    recompute: str = "none"
    head: str = "lm"
    lora: bool = False
    offload: tuple[str, ...] = ()
    micro_batches: int = 4
    lengths: tuple[int, ...] = LENGTHS
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        layout = [f"{name}{getattr(self, name)}" for name in ("tp", "pp", "vpp", "cp", "ep", "etp")
                  if getattr(self, name) not in (1, None)]  # fmt: skip
        options = [self.recompute] * (self.recompute != "none") + ["lora"] * self.lora + ["value"] * (self.head != "lm")
        return " ".join(
            [self.model.split("/")[1], *layout, *options, *map("offload {}".format, self.offload),
             f"rank {self.rank} of {self.world}"]
        )  # fmt: skip


@dataclasses.dataclass
class Result:
    parameters: int  # bytes of this rank's parameters
    after_init: int  # bytes alive: parameters, gradients, masters
    peak: int  # the most alive at once, of init and step
    after_step: int
    syncs: dict[str, float]  # waits of the host in a micro-batch's forward and backward, by line
    step_syncs: dict[str, int]  # in the optimizer step
    tensors: dict[str, list[str]]  # where parameters, masters, gradients and moments are, and of which dtype
