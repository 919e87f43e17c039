"""Defines LoRA adapters for every engine: names and shapes of A and B in peft's files, and the initial A.

Dimensions: `I` inputs and `O` outputs of a weight, `R` the rank of its adapter, `E` experts held as one parameter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PREFIX = "base_model.model."
ADAPTER = "default"
"""peft's name of an adapter: in the names of parameters, and not in files."""
SCORE = PREFIX + "score.weight"
"""The head of a value model in an adapter folder. It trains whole (peft's `modules_to_save`)."""


@dataclasses.dataclass(frozen=True)
class AdapterShape:
    """Describes one adapter, of the weight `name.weight`, or of a stack of experts, the parameter `name`."""

    name: str
    peft_name: str  # the module under which peft keeps A and B (of two parameters of one module, one wraps the other)
    in_features: int
    out_features: int
    rank: int  # with experts, of each expert's adapter
    scale: float  # of B A
    experts: int = 0  # E, or 0 for a plain matrix
    transposed: bool = False  # the weight is held [I, O], not [O, I] (gpt2's), or the experts [E, I, O]
    parameter: str | None = None  # its full name if peft adapts a parameter, not a module

    @property
    def a_name(self) -> str:
        """Returns the name of A in the adapter's file."""
        return f"{PREFIX}{self.peft_name}.lora_A.weight"

    @property
    def b_name(self) -> str:
        """Returns the name of B in the adapter's file."""
        return f"{PREFIX}{self.peft_name}.lora_B.weight"

    @property
    def a_shape(self) -> tuple[int, int]:
        """Returns [R, I]; [E * R, I] for experts, with the rows of expert 0 first, then those of expert 1."""
        return (self.rank * max(self.experts, 1), self.in_features)

    @property
    def b_shape(self) -> tuple[int, int]:
        """Returns [O, R]; [O, R * E] for experts, with column `r` of expert `e` at `r * E + e`."""
        return (self.out_features, self.rank * max(self.experts, 1))

    def split(self, tensor: Tensor, which: str) -> Tensor:
        """Returns a view [E, R, I] of A in the file, or [E, O, R] of B; E is 1 for a plain matrix.

        which: "A" or "B". R is the file's, and may be another than the shape's.
        """
        experts = max(self.experts, 1)
        if which == "A":
            return tensor.unflatten(0, (experts, -1))
        return tensor.unflatten(1, (-1, experts)).permute(2, 0, 1)

    def delta(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns the adapter's change of its weight, in the weight's shape: [O, I], [I, O] or a stack. In the dtype of
        A and B."""
        if not self.experts:
            delta = self.scale * (b @ a)
            return delta.mT if self.transposed else delta
        return torch.stack([self.delta_of_expert(a, b, expert) for expert in range(self.experts)])

    def delta_of_expert(self, a: Tensor, b: Tensor, expert: int) -> Tensor:
        """Returns `delta` of one expert: [O, I], or [I, O] if the weight is held so."""
        a_ri, b_or = self.split(a, "A")[expert], self.split(b, "B")[expert]
        delta = self.scale * (b_or @ a_ri)
        return delta.mT if self.transposed else delta


def join_experts(tensor: Tensor, which: str) -> Tensor:
    """Returns A or B as the file has it, from [E, R, I] or [E, O, R]. It undoes `AdapterShape.split`."""
    return tensor.flatten(0, 1) if which == "A" else tensor.permute(1, 2, 0).flatten(1)


def interleave(rows: Tensor, parts: int) -> Tensor:
    """Returns B [..., O, R] with the rows of `parts` equal parts in turn, as in a file. rows: part after part."""
    return rows.unflatten(-2, (parts, -1)).transpose(-3, -2).flatten(-3, -2)


def deinterleave(rows: Tensor, parts: int) -> Tensor:
    """Undoes `interleave`."""
    return rows.unflatten(-2, (-1, parts)).transpose(-3, -2).flatten(-3, -2)


def name_in_file(parameter: str) -> str | None:
    """Returns the name in an adapter's file of a parameter that peft made; None for one of the model's own."""
    return PREFIX + parameter.replace(f".{ADAPTER}.", ".") if ".lora_" in parameter else None


def name_in_base(name: str) -> str:
    """Returns the name without adapters of a module, parameter or buffer that peft may have wrapped."""
    return name.replace(".base_layer", "")


def by_tensor(shapes: Mapping[str, AdapterShape]) -> dict[str, AdapterShape]:
    """Returns the adapter of each A and B, by the tensor's name in a file."""
    return {name: shape for shape in shapes.values() for name in (shape.a_name, shape.b_name)}


def first_difference(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]
) -> tuple[str, Any, Any, int] | None:
    """Returns the first tensor that is not as expected, its shape, the expected one, and how many differ; None if none.

    A shape is "absent" if there is none.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    differ = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
    if not differ:
        return None
    return differ[0], shapes.get(differ[0], "absent"), expected.get(differ[0], "absent"), len(differ)


def initial_a(shape: AdapterShape, seed: int) -> Tensor:
    """Returns A at the start, fp32: uniform as peft draws it (kaiming, a = sqrt 5), by seed and name alone. B is 0."""
    digest = hashlib.sha256(f"{seed}:{shape.a_name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (torch.rand(shape.a_shape, generator=generator) * 2 - 1) / math.sqrt(shape.in_features)


def adapter_shapes(shapes: Mapping[str, AdapterShape], head: str, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Returns every tensor of an adapter's file, with its shape: A and B of each adapter, and the score of a value
    head."""
    files: dict[str, tuple[int, ...]] = {shape.a_name: shape.a_shape for shape in shapes.values()}
    files |= {shape.b_name: shape.b_shape for shape in shapes.values()}
    return files | ({SCORE: (1, hidden_size)} if head == "value" else {})
