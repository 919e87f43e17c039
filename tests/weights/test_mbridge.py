"""An independent oracle: the package mbridge maps the same names to the same shards, tensor by tensor, in both directions.

Not covered here: which parameters megatron's modules have, and how large they are (tests/engine, tests/mcore_models).
"""

from __future__ import annotations

import pytest
import torch
from mbridge.core.bridge import _MODEL_REGISTRY

from mrl.parallel import ParallelDims
from mrl.weights import family_for, hf_to_mcore, mcore_to_hf, read_hf_config
from tests.weights.mbridge_oracle import bridge_for, merged, shards_of
from tests.weights.models import LAYOUTS

ORACLE = {  # every model's names and sizes, and all layouts of one model of each kind
    "llama": ("tp1", "tp2", "tp4", "pp2xvpp2"),
    "qwen2": ("tp2",),
    "qwen3": ("tp4",),
    "mixtral": ("tp1", "tp2", "ep2", "tp2xep2_etp2", "tp2xep2_etp1", "tp2xpp2xep2"),
    "qwen3_moe": ("tp2xep2_etp2",),
    "qwen2_moe": ("tp2xep2_etp1",),
    "deepseek_v3": ("tp2", "tp2xpp2xep2"),
    "deepseek_v3_q": ("tp2xep2_etp2",),
    "glm4_moe": ("tp2xep2_etp2",),
}
# mbridge lacks dense layers among sparse ones
ALL_SPARSE = {"qwen3_moe": {"mlp_only_layers": []}, "qwen2_moe": {"mlp_only_layers": []}}
CASES = [(model, layout) for model, layouts in ORACLE.items() for layout in layouts]


@pytest.fixture(autouse=True)
def fresh_tables(monkeypatch):
    """mbridge writes into tables of its classes for a tied model, and leaves it there for the next."""
    for bridge in set(_MODEL_REGISTRY.values()):
        monkeypatch.setattr(bridge, "_DIRECT_MAPPING", dict(bridge._DIRECT_MAPPING))


def shards_by_rank(hf, config, layout: ParallelDims):
    family = family_for(config)
    return [
        {
            (chunk, name): shard
            for chunk, name, shard in hf_to_mcore(hf.weights.items(), family, layout, rank, hf_config=config, spec="te")
        }
        for rank in range(layout.world_size)
    ]


def same(ours, theirs) -> list[str]:
    wrong = [str(name) for name in ours.keys() ^ theirs.keys()]
    both = ours.keys() & theirs.keys()
    return wrong + [str(n) for n in both if ours[n].dtype != theirs[n].dtype or not torch.equal(ours[n], theirs[n])]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_every_shard_is_mbridges(saved, model, layout):
    hf, layout = saved(model, **ALL_SPARSE.get(model, {})), LAYOUTS[layout]
    config = read_hf_config(hf.path)
    ranks = shards_by_rank(hf, config, layout)
    for rank, ours in enumerate(ranks):
        assert same(ours, shards_of(bridge_for(hf.path, layout, rank), hf.weights, layout, rank, ours)) == []
    if layout.pp == 1:
        assert same(hf.weights, merged(bridge_for(hf.path, layout, 0), hf.weights, ranks, layout)) == []
    shards = [(rank, *key, shard) for rank, held in enumerate(ranks) for key, shard in held.items()]
    back = dict(mcore_to_hf(shards, family_for(config), layout, hf_config=config, spec="te"))
    assert same(hf.weights, back) == []


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_tied_models(saved, layout):
    """With a second copy of the embedding on the last of several stages."""
    hf, layout = saved("qwen2", tied=True), LAYOUTS[layout]
    config = read_hf_config(hf.path)
    for rank, ours in enumerate(shards_by_rank(hf, config, layout)):
        assert same(ours, shards_of(bridge_for(hf.path, layout, rank), hf.weights, layout, rank, ours)) == []
