"""An independent oracle: the package mbridge maps the same names to the same shards, tensor by tensor, in both directions.

Where mbridge is known to be wrong, a test names it: such a test fails when mbridge changes, and then goes.
Not covered here: which parameters megatron's modules have, and how large they are (tests/engine, tests/mcore_models).
"""

from __future__ import annotations

import pytest
import torch
from mbridge.core.bridge import _MODEL_REGISTRY

from mrl.parallel import ParallelDims
from mrl.weights import family_for, hf_to_mcore, mcore_to_hf, read_hf_config
from mrl.weights.families import fields_of
from tests.weights.mbridge_oracle import bridge_for, merged, shards_of
from tests.weights.models import LAYOUTS

DENSE, EXPERTS = ("tp1", "tp2", "tp4", "pp2xvpp2"), ("tp1", "tp2", "ep2", "tp2xep2_etp2", "tp2xep2_etp1", "tp2xpp2xep2")
ORACLE = {
    "llama": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS,
    "deepseek_v3_moe": EXPERTS,
    "deepseek_v3_moe_q": EXPERTS,
    "glm4_moe": EXPERTS,
}
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


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2"])
@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_tied_models(saved, model, layout):
    """With a second copy of the embedding on the last of several stages."""
    hf, layout = saved(model, tied=True), LAYOUTS[layout]
    config = read_hf_config(hf.path)
    for rank, ours in enumerate(shards_by_rank(hf, config, layout)):
        assert same(ours, shards_of(bridge_for(hf.path, layout, rank), hf.weights, layout, rank, ours)) == []


def test_mbridge_is_wrong_about_an_untied_model_after_a_tied_one(saved):
    tied, untied = saved("qwen2", tied=True), saved("qwen2")
    bridge_for(tied.path, ParallelDims(), 0)
    config, layout = read_hf_config(untied.path), ParallelDims()
    (ours,) = shards_by_rank(untied, config, layout)
    theirs = shards_of(bridge_for(untied.path, layout, 0), untied.weights, layout, 0, ours)
    assert same(ours, theirs) == ["(0, 'output_layer.weight')"]
    assert torch.equal(ours[0, "output_layer.weight"], untied.weights["lm_head.weight"])


def test_mbridge_lacks_dense_layers_among_sparse_ones(saved):
    hf, layout = saved("qwen3_moe"), ParallelDims()
    (ours,) = shards_by_rank(hf, read_hf_config(hf.path), layout)
    with pytest.raises(NotImplementedError, match=r"decoder\.layers\.1\.mlp\.linear_fc"):
        shards_of(bridge_for(hf.path, layout, 0), hf.weights, layout, 0, ours)


def test_mbridge_is_wrong_about_routing(saved):
    """Mixtral normalises the chosen experts' weights; DeepSeek-V3 chooses among groups of experts."""
    (mixtral, theirs), (deepseek, theirs_of_groups) = (
        (fields_of(dict(read_hf_config(path))), bridge_for(path, ParallelDims(), 0).config)
        for path in (
            saved("mixtral").path,
            saved("deepseek_v3_moe", n_group=2, topk_group=1).path,
        )
    )
    assert (mixtral["moe_router_pre_softmax"], theirs.moe_router_pre_softmax) == (False, True)
    assert (deepseek["moe_router_num_groups"], theirs_of_groups.moe_router_num_groups) == (2, None)
