"""The parameters of a model as this engine would shard them, by shape alone: no process joins and nothing is read."""

from __future__ import annotations

import dataclasses
import math

from mrl.config.schema import RoleConfig
from mrl.engine.fsdp import precision
from mrl.engine.fsdp.adapters import Adapters
from mrl.engine.fsdp.build import build, with_value_head
from mrl.weights.families import FAMILIES
from mrl.weights.hf_config import read_hf_config


@dataclasses.dataclass(frozen=True)
class Shape:
    """A parameter, which FSDP2 shards along its first dimension."""

    rows: int
    row: int  # elements of a row
    itemsize: int  # bytes of an element, as it is held between passes
    trains: bool
    gathered: int = 4  # bytes of an element, as modules compute with it

    def held(self, ranks: int) -> int:
        """Returns the elements of a rank's shard, padding included: each has memory for as many rows."""
        return -(-self.rows // ranks) * self.row

    def updated(self, ranks: int, rank: int) -> int:
        """Returns the elements of a rank's shard that are no padding."""
        each = -(-self.rows // ranks)
        return max(0, min(self.rows, (rank + 1) * each) - rank * each) * self.row


def shapes_of(config: RoleConfig) -> tuple[list[Shape], int]:
    """Returns the parameters, tied ones once, and the bytes of the buffers, which are whole on every rank."""
    raw = read_hf_config(config.model.path)
    hf = build(config, raw)
    if config.head == "value":
        with_value_head(hf, checked=raw["model_type"] not in FAMILIES)
    kept = precision.fp32_parameters(hf, config.model.dtype)
    trained = {id(p) for p in hf.parameters() if p.requires_grad}
    if config.model.lora is not None:
        adapters = Adapters(hf, config, kept.values())
        trained = {id(p) for p in adapters.trained().values()}
    if config.optimizer is None:
        trained = set()
    in_fp32 = precision.modules_of(hf, kept, compiled=config.engine.fsdp.compile)
    gathered = precision.gathered_itemsizes(hf, config.model.dtype, in_fp32)
    shapes = [
        Shape(p.shape[0] if p.dim() else 1, math.prod(p.shape[1:]), p.element_size(), id(p) in trained, size)
        for p, size in zip(hf.parameters(), gathered, strict=True)
    ]
    return shapes, sum(b.numel() * b.element_size() for b in hf.buffers())
