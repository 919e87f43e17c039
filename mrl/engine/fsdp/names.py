"""Parameters of a transformers model and the tensors of its files: the same, but for experts, held fused in memory.

In memory an MoE layer has `experts.gate_up_proj` [E, 2F, H] (gate above up) and `experts.down_proj` [E, H, F]; its
file has three matrices for each expert. One function tells which tensors a parameter is made of, for both directions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# model_type -> (name of the sparse block in files, and of its gate, up and down matrices)
SPARSE = {
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor of the files: `parameter[expert][start:stop]`, or the whole parameter where expert is None."""

    name: str
    expert: int | None = None
    start: int = 0
    stop: int | None = None

    def of(self, parameter: Tensor) -> Tensor:
        return parameter if self.expert is None else parameter[self.expert][self.start : self.stop]


def pieces(name: str, shape: Sequence[int], *, model_type: str, head: str) -> list[Piece]:
    """The file tensors that parameter `name` of `shape` holds, in order. head: "lm", or "value" for a score."""
    if head == "value" and name == "lm_head.weight":
        return [Piece("score.weight")]
    if model_type not in SPARSE:
        return [Piece(name)]
    block, gate, up, down = SPARSE[model_type]
    layer, found, rest = name.partition(".mlp.")
    if not found:
        return [Piece(name)]
    of_expert = f"{layer}.{block}.experts."
    if rest == "experts.gate_up_proj":
        half = shape[1] // 2
        return [
            Piece(f"{of_expert}{e}.{matrix}.weight", e, start, start + half)
            for e in range(shape[0])
            for matrix, start in ((gate, 0), (up, half))
        ]
    if rest == "experts.down_proj":
        return [Piece(f"{of_expert}{e}.{down}.weight", e) for e in range(shape[0])]
    if rest == "gate.weight":
        return [Piece(f"{layer}.{block}.gate.weight")]
    return [Piece(name)]


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
