"""Micro-batches whose tokens are padded to a multiple of 16 or 32 on each rank, as products in FP8 take them, or all to one
number, as userbuffers do: every number is that of the micro-batch that is not, within the rounding of fp32 sums in another
order. FP8 and userbuffers themselves need a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mrl.config.schema import EngineConfig, MoEConfig, MTPConfig
from mrl.engine.checks import Sequences
from mrl.engine.megatron.checks import MegatronChecks
from mrl.engine.megatron.inputs import padded_lengths
from mrl.engine.megatron.pipeline import PipelineConfig, make_micro_batch
from mrl.errors import ConfigError
from mrl.mcore_models import megatron_needs
from mrl.parallel import ParallelDims
from tests.engine import mtp, tiny
from tests.engine.harness import run_case
from tests.tiers import in_tiers

ROUNDING = 1e-5
CASES = [
    ("qwen3", 1, {}, {"multiple": 16}, {"tokens": 64}),
    ("qwen3_moe", 1, {}, {"multiple": 32}, {"size": 1}),
    ("qwen3_moe", 2, {"tp": 2}, {"places": 66, "fixed": True}, {"tokens": 65}),
    ("qwen3", 2, {"cp": 2}, {"multiple": 16}, {"size": 2, "packing": False}),
    ("qwen3", 2, {"pp": 2}, {"multiple": 16}, {"size": 2}),
    ("deepseek_v3", 2, {"ep": 2}, {"multiple": 32}, {"size": 1}),
    ("glm4_moe mtp", 2, {"tp": 2}, {"multiple": 16}, {"size": 2}),
    ("gpt_oss", 4, {"tp": 2, "cp": 2, "etp": 1}, {"places": 300}, {"tokens": 300}),
]


@pytest.mark.parametrize(
    ("family", "world", "parallel", "padding", "cut"), in_tiers(CASES[:3], [CASES[3], *CASES[5:7]], CASES), ids=str
)
def test_padding_counts_in_nothing(tmp_path, family, world, parallel, padding, cut):
    """Router losses are on where there are experts, and a rank may have fewer sequences than another, or none."""
    name, _, with_mtp = family.partition(" ")
    folder = (mtp.make_model if with_mtp else tiny.make_model)(str(tmp_path / "model"), name)
    experts = any("expert" in field for field in tiny.FAMILIES[name][1])
    moe = MoEConfig(aux_loss=0.1, z_loss=0.01) if experts else MoEConfig()
    config = tiny.role(folder, backend="megatron", parallel=parallel, moe=moe, **cut)
    config = dataclasses.replace(config, mtp=MTPConfig() if with_mtp else None)
    found = run_case(world, "tests.engine.padding:compare", config=config, padding=padding)
    assert found["padded"] == [False, True]
    assert not {name: far for name, far in found["far"].items() if not far < ROUNDING}


def test_padding_of_many_places_is_of_many_tokens():
    """Experts choose tokens by what they are: equal ones would all go to the same few."""
    dims, batch = ParallelDims(), tiny.uneven_batch(sequences=3)
    setup = PipelineConfig(dims, dims.coordinates(0), packed=True, thd=False, head="lm", vocab_size=50)
    many, few = (
        make_micro_batch(batch, {}, None, dataclasses.replace(setup, **padding)).inputs
        for padding in ({"places": 300}, {"multiple": 16})
    )
    assert len(many.tokens) == 300 and len(many.tokens[many.padding].unique()) == 50
    assert torch.equal(many.tokens[~many.padding], batch.tokens)
    assert len(few.tokens) % 16 == 0 and not few.tokens[few.padding].any()


def test_sequences_of_padding_are_no_longer_than_others():
    """Three context-parallel ranks take sequences of multiples of 6 places."""
    dims = ParallelDims(3, cp=3)
    for lengths, padded in (
        ([140, 5], [144, 6, 144, 144, 144, 18]), ([5], [6, 132, 132, 132, 132, 66]), ([300, 300], [300, 300]),
    ):  # fmt: skip
        assert padded_lengths(lengths, dims, packed=True, places=600) == padded


def test_a_sequence_of_more_places_than_all_have_is_refused(tmp_path):
    """Of a model that never trains, too, which otherwise takes longer ones."""
    folder = tiny.make_model(str(tmp_path / "model"), "qwen3")
    config = tiny.role(folder, backend="megatron", tokens=20, optimizer=None)
    said = run_case(1, "tests.engine.padding:refused", config=config, places=20)
    assert said.startswith("engine.micro_batch.tokens: value 20 is less than a sequence of 23 tokens; use at least 23 ")


def test_experts_with_a_place_for_every_token_compute_the_same(tmp_path):
    """A factor of experts over experts for each token, which leaves out no token; with router losses."""
    folder, moe = tiny.make_model(str(tmp_path / "model"), "qwen3_moe"), MoEConfig(aux_loss=0.1, z_loss=0.01)
    config = tiny.role(folder, backend="megatron", parallel={"tp": 2, "ep": 2}, moe=moe, size=2)
    keys = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}
    found = run_case(2, "tests.engine.padding:with_keys", config=config, keys=keys)
    assert not {name: far for name, far in found.items() if not far < ROUNDING}


@pytest.mark.parametrize(
    ("keys", "bound"),
    [({"moe_expert_capacity_factor": 2.0}, ROUNDING), ({"moe_shared_expert_overlap": True}, ROUNDING),
     ({"moe_expert_capacity_factor": 0.25}, float("inf"))],  # which leaves tokens out
    ids=str,
)  # fmt: skip
def test_other_ways_of_tokens_to_experts(tmp_path, keys, bound):
    folder = tiny.make_model(str(tmp_path / "model"), "deepseek_v3")
    config = tiny.role(folder, backend="megatron", size=2)
    found = run_case(1, "tests.engine.padding:with_keys", config=config, keys=keys)
    assert not {name: far for name, far in found.items() if not far < bound}
    assert bound == ROUNDING or found["loss"] > 1e-4


@pytest.mark.slow
def test_experts_by_deep_ep_compute_the_same(tmp_path):
    """By megatron-core's own code for it, over a stand-in of what DeepEP does between ranks."""
    folder = tiny.make_model(str(tmp_path / "model"), "qwen3_moe")
    config = tiny.role(folder, backend="megatron", parallel={"ep": 2}, size=2)
    keys = {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}
    found = run_case(2, "tests.engine.deep_ep_like:with_keys", config=config, keys=keys)
    assert found.pop("calls") > 3
    assert not {name: far for name, far in found.items() if not far < ROUNDING}


PLACES = {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 15.0}
SIXTY = {"num_moe_experts": 60, "moe_router_topk": 4}


@pytest.mark.parametrize(
    ("given", "layout", "why"),
    [
        ({}, {"ep": 2}, "several replicas, whose numbers of tokens differ"),
        ({"moe_expert_capacity_factor": None}, {}, "needs a number of places"),
        ({"moe_expert_capacity_factor": 16.0}, {}, "more places than there are tokens"),
        ({}, {}, "more places than there are tokens"),  # of 31 tokens 32, by rounding
    ],
)
def test_places_that_megatron_cannot_fill_are_refused(given, layout, why):
    with pytest.raises(ConfigError, match=why):
        megatron_needs.check(PLACES | given, SIXTY, ParallelDims(2, **layout))


def test_places_that_megatron_can_fill_are_taken_and_others_refused_before_a_model_is_built():
    megatron_needs.check(PLACES | {"moe_expert_capacity_factor": 14.999}, SIXTY, ParallelDims(2))
    experts, spread = tiny.config_of("qwen3_moe").to_dict(), ParallelDims(2, ep=2)
    sequences = Sequences(8, "data.max_length", packed=True, generated=False)
    with pytest.raises(ConfigError, match="several replicas"):
        MegatronChecks.check_model(EngineConfig(megatron=PLACES), spread, experts, sequences)
