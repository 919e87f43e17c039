"""`hf_to_mcore` and `mcore_to_hf`: whose memory shards are, and streams that are not the model.

Their numbers: test_properties.py, and test_mbridge.py with an independent oracle.
"""

from __future__ import annotations

import pytest
import torch

from mrl.errors import ModelError
from mrl.parallel import ParallelDims
from mrl.weights import family_for, hf_to_mcore, mcore_to_hf, read_hf_config
from tests.weights.models import LAYOUTS


@pytest.fixture
def model(saved):
    """(config, family, weights) by name."""

    def get(name, tied=False):
        hf = saved(name, tied=tied)
        config = read_hf_config(hf.path)
        return config, family_for(config), hf.weights

    return get


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
