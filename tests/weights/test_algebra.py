"""Property tests of the tensor algebra: split then merge is the identity, and shards lie as megatron-core reads them.

The oracles below build the whole mcore weight with views and chunk it, as megatron-core's modules imply;
`algebra` lists slices instead, and the two must agree.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.errors import ConfigError
from mrl.parallel import ParallelDims
from mrl.weights.algebra import padded_vocab
from mrl.weights.families import family_for
from mrl.weights.hf_config import read_hf_config
from mrl.weights.rules import ChunkPlan, Rule, chunk_plans, param_map

DEGREES = st.sampled_from([1, 2, 3, 4, 8])
SMALL = st.integers(1, 5)


def rule_for(kind: str, shapes: list[tuple[int, ...]], degree: int, **sizes: int) -> Rule:
    names = tuple(f"hf.{i}" for i in range(len(shapes)))
    axis = None if kind == "replicated" else "tp"
    return Rule("mcore", names, tuple(shapes), kind, axis, 1 if axis is None else degree, 0, sizes)


def numbered(shapes: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Tensors whose every entry is different, so that equal means in the right place."""
    out, at = {}, 1
    for i, shape in enumerate(shapes):
        n = torch.Size(shape).numel()
        out[f"hf.{i}"] = torch.arange(at, at + n).reshape(shape)
        at += n
    return out


def split_and_merge(rule: Rule, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The shards, after checking that they have their shapes and merge to `tensors`."""
    shards = [rule.assemble(tensors.__getitem__, rank) for rank in range(rule.degree)]
    assert [tuple(shard.shape) for shard in shards] == [rule.shape(rank) for rank in range(rule.degree)]
    merged = rule.merge(shards)
    assert merged.keys() == tensors.keys()
    assert all(torch.equal(merged[name], tensors[name]) for name in tensors)
    return shards


@settings(max_examples=150, deadline=None)
@given(tp=DEGREES, groups=SMALL, queries=SMALL, head_dim=SMALL, columns=st.sampled_from([None, 1, 3]), factor=SMALL)
def test_qkv(tp, groups, queries, head_dim, columns, factor):
    """Any groups, more or fewer than tp, weight or bias (columns None)."""
    if groups % tp and tp % groups:
        groups = groups * tp
    if (groups * queries) % tp:
        queries = queries * (tp // groups)
    head_dim = head_dim * (factor if (queries + 2) * groups * head_dim * factor % tp == 0 else tp)
    tail = () if columns is None else (columns,)
    shapes = [(groups * queries * head_dim, *tail), (groups * head_dim, *tail), (groups * head_dim, *tail)]
    tensors = numbered(shapes)
    rule = rule_for("qkv", shapes, tp, groups=groups, heads=groups * queries)
    shards = split_and_merge(rule, tensors)
    per_group = [t.reshape(groups, -1, *tail) for t in tensors.values()]
    whole = torch.cat(per_group, dim=1).reshape(-1, *tail)
    assert all(torch.equal(a, b) for a, b in zip(shards, whole.chunk(tp), strict=True))


@settings(max_examples=100, deadline=None)
@given(tp=DEGREES, rows=SMALL, columns=SMALL)
def test_column_row_and_replicated(tp, rows, columns):
    for kind, dim in (("column", 0), ("row", 1)):
        shape = (rows * tp, columns) if dim == 0 else (rows, columns * tp)
        tensors = numbered([shape])
        shards = split_and_merge(rule_for(kind, [shape], tp), tensors)
        assert torch.equal(torch.cat(shards, dim=dim), tensors["hf.0"])
    for shape in ((rows,), (rows, columns)):
        split_and_merge(rule_for("replicated", [shape], tp), numbered([shape]))


@pytest.mark.parametrize("count", [1, 3])
def test_shards_are_as_many_as_the_axis_has_ranks(count):
    with pytest.raises(AssertionError, match="shards .*tp of 2"):
        rule_for("column", [(4, 2)], 2).merge([torch.zeros(2, 2)] * count)


@settings(max_examples=200, deadline=None)
@given(tp=DEGREES, vocab=st.integers(1, 300), multiple=st.sampled_from([1, 2, 16, 128]))
def test_trap_13_vocab_of_any_size(tp, vocab, multiple):
    padded = padded_vocab(vocab, tp, multiple)
    assert padded % (tp * multiple) == 0 and vocab <= padded < vocab + tp * multiple
    tensors = numbered([(vocab, 2)])
    shards = split_and_merge(rule_for("vocab", [(vocab, 2)], tp, padded_vocab=padded), tensors)
    whole = torch.cat(shards)
    assert len(whole) == padded and torch.equal(whole[:vocab], tensors["hf.0"]) and not whole[vocab:].any()


@settings(max_examples=100, deadline=None)
@given(pp=st.integers(2, 4), vpp=st.integers(1, 3), extra=st.integers(0, 7))
def test_chunk_plans_hold_every_layer_once(pp, vpp, extra):
    n = pp * vpp + extra
    plans = chunk_plans(n, pp, vpp)
    assert sorted(plans) == [(p, v) for p in range(pp) for v in range(vpp)]
    in_order = [plans[s % pp, s // pp] for s in range(pp * vpp)]
    assert [layer for plan in in_order for layer in plan.layers] == list(range(n))
    assert [plan.has_embedding for plan in in_order] == [True] + [False] * (pp * vpp - 1)
    assert [plan.has_output for plan in in_order] == [False] * (pp * vpp - 1) + [True]
    assert chunk_plans(n, 1) == {(0, 0): ChunkPlan(tuple(range(n)), True, True)}


@pytest.mark.parametrize(
    ("kind", "shapes", "sizes", "message"),
    [
        ("column", [(6, 2)], {}, "engine.parallel.tp: value 4 does not divide the size 6 of dimension 0 of hf.0"),
        ("qkv", [(12, 2), (6, 2), (6, 2)], {"heads": 6, "groups": 3}, "4 does not fit the model's 6 attention heads"),
        ("qkv", [(24, 2), (6, 2), (6, 2)], {"heads": 12, "groups": 3}, "12 attention heads and 3 KV heads"),
    ],
)
def test_a_degree_that_does_not_fit_is_the_users_mistake(kind, shapes, sizes, message):
    with pytest.raises(ConfigError, match=message):
        rule_for(kind, shapes, 4, **sizes).shape()


def test_experts_that_ep_does_not_divide(saved):
    config = read_hf_config(saved("mixtral").path)
    layout = ParallelDims(world_size=3, ep=3)
    with pytest.raises(ConfigError, match="engine.parallel.ep: value 3 does not divide the model's 4 experts"):
        param_map(
            family_for(config), config, layout=layout, coords=layout.coordinates(0), chunk=chunk_plans(4, 1)[0, 0]
        )
