"""`hf_to_mcore` and `mcore_to_hf`: the shards that an engine would load, from a stream in any order, and the way back.

Every family in layouts that are drawn: test_properties.py.
"""

from __future__ import annotations

import random

import pytest
import torch

from mrl.errors import ModelError
from mrl.parallel import ParallelDims
from mrl.weights import family_for, hf_to_mcore, mcore_to_hf, read_hf_config
from tests.weights.models import LAYOUTS
from tests.weights.test_round_trip import load_all

CASES = [
    ("llama", "tp4", False),
    ("llama", "pp3_uneven", True),
    ("qwen2", "pp2xvpp2", True),
    ("qwen3_moe", "tp2xpp2xep2", True),
    ("mixtral", "ep2xetp2", False),
    ("deepseek_v3", "tp2xep2_etp1", False),
    ("gpt_oss", "tp2xpp2xvpp2xep4", False),
]


@pytest.fixture
def model(saved):
    """(config, family, weights) by name."""

    def get(name, tied=False):
        hf = saved(name, tied=tied)
        config = read_hf_config(hf.path)
        return config, family_for(config), hf.weights

    return get


def shuffled(items, seed=0):
    items = list(items)
    random.Random(seed).shuffle(items)
    return items


@pytest.mark.parametrize(("name", "layout", "tied"), CASES)
def test_shards_are_those_of_the_rules_and_merge_again(model, name, layout, tied):
    config, family, weights = model(name, tied)
    layout = LAYOUTS[layout]
    shards = [
        (rank, *found)
        for rank in range(layout.world_size)
        for found in hf_to_mcore(shuffled(weights.items(), rank), family, layout, rank, hf_config=config)
    ]
    expected, _ = load_all(weights.__getitem__, family, config, layout)
    for rank, chunk, mcore, shard in shards:
        assert torch.equal(shard, expected.pop((rank, chunk, mcore))), (rank, mcore)
    assert not expected
    back = dict(mcore_to_hf(shuffled(shards), family, layout, hf_config=config))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[n], weights[n]) for n in weights)


def test_memory_is_this_ranks_own(model):
    """What is kept does not alias the stream's tensors, which a sender may reuse."""
    config, family, weights = model("llama")
    expected = {n: s.clone() for _, n, s in hf_to_mcore(weights.items(), family, ParallelDims(), 0, hf_config=config)}

    def reused():
        for name, tensor in weights.items():
            buffer = tensor.clone()
            yield name, buffer
            buffer.fill_(torch.nan)

    got = {name: shard for _, name, shard in hf_to_mcore(reused(), family, ParallelDims(), 0, hf_config=config)}
    assert got.keys() == expected.keys() and all(torch.equal(got[n], expected[n]) for n in got)


def test_streams_that_are_not_the_model_are_refused(model):
    config, family, weights = model("llama")
    name = "model.layers.1.mlp.up_proj.weight"

    def run(items):
        return list(hf_to_mcore(items, family, ParallelDims(), 0, hf_config=config))

    with pytest.raises(ModelError, match=f"1 tensors missing .*{name}"):
        run((n, t) for n, t in weights.items() if n != name)
    with pytest.raises(ModelError, match="extra.weight: the model has no such tensor"):
        run([*weights.items(), ("extra.weight", torch.zeros(1))])
    with pytest.raises(ModelError, match=f"{name}: came twice"):
        run([*weights.items(), (name, weights[name])])
    with pytest.raises(ModelError, match=rf"{name}: is \[3\], not \[48, 32\]"):
        run([*((n, t) for n, t in weights.items() if n != name), (name, torch.zeros(3))])
    layout = LAYOUTS["tp2"]
    shards = [
        (rank, *found)
        for rank in range(2)
        for found in hf_to_mcore(weights.items(), family, layout, rank, hf_config=config)
    ]
    with pytest.raises(ModelError, match="tensors missing"):
        list(mcore_to_hf(shards[: len(shards) // 2], family, layout, hf_config=config))
    with pytest.raises(ModelError, match="rank 0 of tp2 has no such parameter"):
        list(mcore_to_hf([(0, 0, "nothing", torch.zeros(1))], family, layout, hf_config=config))
