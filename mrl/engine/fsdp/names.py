"""Parameters of a transformers model and the tensors of its files: the same, but for experts, held fused in memory.

In memory an MoE layer has `experts.gate_up_proj` [E, 2F, H] (gate above up) and `experts.down_proj` [E, H, F]; its
file has three matrices for each expert. One function tells which tensors a parameter is made of, for both directions.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.converters.table import Family

STATE = "state.pt"
"""The file of a checkpoint that has what is no sharded tensor."""

_FUSED = re.compile(r"model\.layers\.(\d+)\.mlp\.(experts\.gate_up_proj|experts\.down_proj|gate\.weight)")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor of the files: `parameter[expert][start:stop]`, or the whole parameter where expert is None."""

    name: str
    expert: int | None = None
    start: int = 0
    stop: int | None = None

    def of(self, parameter: Tensor) -> Tensor:
        return parameter if self.expert is None else parameter[self.expert][self.start : self.stop]


def pieces(name: str, shape: Sequence[int], *, family: Family, head: str) -> list[Piece]:
    """The file tensors that parameter `name` of `shape` holds, in order. head: "lm", or "value" for a score."""
    if head == "value" and name == "lm_head.weight":
        return [Piece("score.weight")]
    found = _FUSED.fullmatch(name)
    if found is None or not family.sparse:
        return [Piece(name)]
    layer = int(found[1])
    if found[2] == "gate.weight":
        (router,) = (entry for entry in family.sparse if entry.mcore.endswith("router.weight"))
        return [Piece(router.hf[0][0].format(l=layer))]
    fc = "linear_fc1.weight" if found[2] == "experts.gate_up_proj" else "linear_fc2.weight"
    (matrices,) = (entry.hf for entry in family.sparse if entry.of_expert and entry.mcore.endswith(fc))
    rows = shape[1] // len(matrices)
    return [
        Piece(hf.format(l=layer, e=expert), expert, i * rows, (i + 1) * rows)
        for expert in range(shape[0])
        for i, (hf, _) in enumerate(matrices)
    ]


def read_rows(of: Sequence[Piece], read: Callable[[str], Any], start: int, stop: int) -> Tensor:
    """Rows `start` to `stop` of dimension 0 of a parameter, reading no more than they need. start < stop.

    read: gives a tensor, or a lazy slice of a file's, by name.
    """
    if of[0].expert is None:
        return read(of[0].name)[start:stop]
    mine = [p for p in of if start <= p.expert < stop]
    matrices: dict[int, list[Tensor]] = {}
    for piece in mine:
        matrices.setdefault(piece.expert, []).append(read(piece.name)[:])
    return torch.stack([torch.cat(parts) for parts in matrices.values()])
