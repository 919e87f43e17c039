"""Fits adapters of any rank into an engine whose adapters have one rank.

A model's A and B are the first rows and columns of the engine's, and zeros follow. A padded row of A and its column of
B are both zero, and each has the other as a factor of its gradient. So gradients, AdamW's moments and weight decay are
zero, and padding stays zero for ever. Modules that a model does not adapt are zeros alone, for the same reason.

Dimensions: `r` the rank of the model's adapters, `R` that of the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.engine.lora.shapes import AdapterShape, initial_a, join_experts

Shapes = Mapping[str, AdapterShape]


def initial_adapters(shapes: Shapes, rank: int, seed: int, *, attention: bool, mlp: bool) -> dict[str, Tensor]:
    """Returns the adapters that a model starts from, by the names of peft's files, in the engine's shapes.

    shapes: of the model's own rank `r`. rank: `R`. attention, mlp: whether these modules are adapted.
    """
    tensors_by_name: dict[str, Tensor] = {}
    for shape in shapes.values():
        wanted = attention if is_attention(shape) else mlp
        a = initial_a(shape, seed) if wanted else torch.zeros(shape.a_shape)
        tensors_by_name |= {shape.a_name: a, shape.b_name: torch.zeros(shape.b_shape)}
    return pad_rank(tensors_by_name, shapes, rank)


def is_attention(shape: AdapterShape) -> bool:
    """Returns whether the adapter is of a module of attention; else it is of an MLP, an expert or a router."""
    return ".self_attn." in f".{shape.name}." or ".attn." in f".{shape.name}."


def pad_rank(tensors: Mapping[str, Tensor], shapes: Shapes, rank: int) -> dict[str, Tensor]:
    """Returns tensors of rank `r` with zeros up to rank `R`. shapes: of `r`."""
    padded = {}
    for shape in shapes.values():
        lacking = rank - shape.rank
        a, b = shape.split(tensors[shape.a_name], "A"), shape.split(tensors[shape.b_name], "B")
        padded[shape.a_name] = join_experts(F.pad(a, (0, 0, 0, lacking)), "A")
        padded[shape.b_name] = join_experts(F.pad(b, (0, lacking)), "B")
    return padded


def unpad_rank(tensors: Mapping[str, Tensor], shapes: Shapes) -> dict[str, Tensor]:
    """Undoes `pad_rank`. shapes: of `r`."""
    unpadded = {}
    for shape in shapes.values():
        a = shape.split(tensors[shape.a_name], "A")[:, : shape.rank]
        b = shape.split(tensors[shape.b_name], "B")[..., : shape.rank]
        unpadded[shape.a_name] = join_experts(a, "A").contiguous()
        unpadded[shape.b_name] = join_experts(b, "B").contiguous()
    return unpadded
