"""Adapters of a rank in an engine of a higher one: they act alike, and come back as they were."""

import dataclasses

import pytest
import torch

from mrl.engine.lora.shapes import AdapterShape
from mrl.serve import padded

RANK = 8
SHAPES = {
    name: AdapterShape(name, name, 6, 5, 3, 1.0, experts)
    for name, experts in (("layers.0.self_attn.q_proj", 0), ("layers.0.mlp.experts.up", 4), ("layers.0.mlp.gate", 0))
}


def products(tensors, shapes, rank):
    """B A of each adapter, [E, O, I]."""
    found = {}
    for name, shape in shapes.items():
        experts = max(shape.experts, 1)
        a, b = tensors[shape.a_name], tensors[shape.b_name]
        found[name] = torch.stack([b[:, e::experts] @ a[e * rank : (e + 1) * rank] for e in range(experts)])
    return found


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator)
        for each in SHAPES.values()
        for name, shape in ((each.a_name, each.a_shape), (each.b_name, each.b_shape))
    }


def test_a_wider_adapter_acts_as_the_narrow_one(tensors):
    wide = padded.pad_rank(tensors, SHAPES, RANK)
    shapes = {name: dataclasses.replace(shape, rank=RANK) for name, shape in SHAPES.items()}
    for shape in shapes.values():
        assert wide[shape.a_name].shape == shape.a_shape and wide[shape.b_name].shape == shape.b_shape
    for name, expected in products(tensors, SHAPES, 3).items():
        torch.testing.assert_close(products(wide, shapes, RANK)[name], expected)
    back = padded.unpad_rank(wide, SHAPES)
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(("attention", "mlp"), [(True, True), (True, False), (False, True)])
def test_what_is_not_adapted_is_zero(attention, mlp):
    found = padded.initial_adapters(SHAPES, RANK, seed=1, attention=attention, mlp=mlp)
    again = padded.initial_adapters(SHAPES, RANK, seed=2, attention=attention, mlp=mlp)
    for name, shape in SHAPES.items():
        wanted = attention if "self_attn" in name else mlp
        a = found[shape.a_name].view(max(shape.experts, 1), RANK, -1)
        assert not found[shape.b_name].any() and not a[:, shape.rank :].any()
        assert bool(a[:, : shape.rank].all()) == wanted and torch.equal(again[shape.a_name], a.flatten(0, 1)) != wanted
