"""Sampled generation by every engine: the same tokens in every layout, which are those of Hugging Face with the same noise.

Greedy generation is in the contract (test_contract.py), the choice of a token in test_sampling.py, the order of work in
test_generation_schedule.py.
"""

import dataclasses

import pytest

from mrl.config.schema import EngineConfig, MicroBatchConfig, ParallelConfig
from mrl.engine.checks import Sequences
from mrl.engine.megatron.checks import MegatronChecks, check_batch_invariant
from mrl.errors import ConfigError
from mrl.parallel import ParallelDims
from tests.engine import generation, tiny
from tests.engine.harness import run_case
from tests.engine.layouts import EXTERNAL, available
from tests.tiers import in_tiers

# name -> (world size, backend, degrees, family, layers)
LAYOUTS = {
    "fsdp": (1, "fsdp", {}, "qwen3", 2),
    "fsdp dp2": (2, "fsdp", {}, "qwen3", 2),
    "fsdp cp2": (2, "fsdp", {"cp": 2}, "qwen3", 2),
    "megatron": (1, "megatron", {}, "qwen3", 2),
    "megatron mistral": (1, "megatron", {}, "mistral", 2),
    "megatron tp2": (2, "megatron", {"tp": 2}, "qwen3", 2),
    "megatron tp4": (4, "megatron", {"tp": 4}, "qwen3", 2),
    "megatron pp2": (2, "megatron", {"pp": 2}, "qwen3", 2),
    "megatron dp2": (2, "megatron", {}, "qwen3", 2),
    "megatron cp2": (2, "megatron", {"cp": 2}, "qwen3", 2),
    "megatron pp2 vpp2": (2, "megatron", {"pp": 2, "vpp": 2}, "qwen3_moe", 4),
    "megatron ep2": (2, "megatron", {"ep": 2}, "qwen3_moe", 4),
    "megatron tp2 pp2": (4, "megatron", {"tp": 2, "pp": 2}, "qwen3", 2),
    "megatron pp2 ep2": (4, "megatron", {"pp": 2, "ep": 2}, "qwen3_moe", 4),
    "megatron tied tp2": (2, "megatron", {"tp": 2}, "llama tied", 2),
    "megatron tied pp2": (2, "megatron", {"pp": 2}, "llama tied", 2),
    "megatron qwen2": (1, "megatron", {}, "qwen2", 2),
    "megatron llama3 rope tp2": (2, "megatron", {"tp": 2}, "llama3", 2),
    "megatron mixtral": (1, "megatron", {}, "mixtral", 2),
    "megatron olmoe tp2": (2, "megatron", {"tp": 2}, "olmoe", 2),
    "megatron qwen2_moe": (1, "megatron", {}, "qwen2_moe", 2),
    "megatron glm4_moe ep2": (2, "megatron", {"ep": 2}, "glm4_moe", 2),
    "megatron deepseek_v3 tp2": (2, "megatron", {"tp": 2}, "deepseek_v3", 2),
    "megatron deepseek_v3 pp2": (2, "megatron", {"pp": 2}, "deepseek_v3", 2),
    "megatron gpt_oss": (1, "megatron", {}, "gpt_oss", 2),
    "megatron gpt_oss tp2": (2, "megatron", {"tp": 2, "etp": 1}, "gpt_oss", 2),
    "megatron experts tp2 ep2": (2, "megatron", {"tp": 2, "ep": 2}, "qwen3_moe", 4),
    "megatron experts tp2": (2, "megatron", {"tp": 2}, "qwen3_moe", 4),
    "megatron qwen3_5": (1, "megatron", {}, "qwen3_5", 2),
    "megatron qwen3_5 tp2": (2, "megatron", {"tp": 2}, "qwen3_5", 2),
    "megatron qwen3_5 pp2 vpp2": (2, "megatron", {"pp": 2, "vpp": 2}, "qwen3_5", 4),
    "megatron qwen3_5_moe ep2": (2, "megatron", {"ep": 2}, "qwen3_5_moe", 4),
    "fsdp qwen3_5": (1, "fsdp", {}, "qwen3_5", 2),
    "fsdp qwen3_5_moe dp2": (2, "fsdp", {}, "qwen3_5_moe", 2),
    "fsdp experts dp2": (2, "fsdp", {}, "qwen3_moe", 4),
    "external": (1, EXTERNAL, {}, "qwen3", 2),
    "external dp2": (2, EXTERNAL, {}, "qwen3", 2),
    "external experts dp2": (2, EXTERNAL, {}, "qwen3_moe", 4),
    "fsdp gemma2": (1, "fsdp", {}, "gemma2", 2),
}
SEEN = {family.removesuffix(" tied") for _, _, _, family, _ in LAYOUTS.values()}
LAYOUTS |= {f"megatron {name}": (1, "megatron", {}, name, 2) for name in tiny.FAMILIES if name not in SEEN}

FAST = [
    "fsdp dp2", "megatron", "megatron tp2", "megatron pp2", "megatron ep2", "megatron mistral", "megatron deepseek_v3 tp2",
    "megatron gpt_oss", "external dp2", "fsdp gemma2",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder, what Hugging Face completes there) by family and layers; each is made once."""
    made = {}

    def of(family, layers):
        if (family, layers) not in made:
            name, tied = family.removesuffix(" tied"), family.endswith(" tied")
            folder = tiny.make_model(str(tmp_path_factory.mktemp(name)), name, layers=layers, tied=tied)
            made[family, layers] = (folder, generation.hugging_face(folder, generation.sampled_requests()))
        return made[family, layers]

    return of


def run(layout, case, model, optimizer=None, **kwargs):
    world_size, backend, parallel, family, layers = LAYOUTS[layout]
    config = tiny.role(model(family, layers)[0], backend=available(backend), parallel=parallel, optimizer=optimizer)
    run_case(world_size, f"tests.engine.generation:{case}", config=config, **kwargs)


AT_NIGHT = [  # of which layout and family are each in another one
    "megatron tp4", "megatron experts tp2", "megatron olmoe tp2", "fsdp", "external", "megatron deepseek_v3 pp2", "megatron tp2 pp2",
    "megatron gpt_oss tp2", "megatron experts tp2 ep2", "external experts dp2", "megatron tied tp2", "megatron dp2",
    "megatron pp2 ep2", "megatron qwen3_5", "megatron qwen3_5 pp2 vpp2", "fsdp experts dp2", "fsdp qwen3_5",
]  # fmt: skip


@pytest.mark.parametrize("layout", in_tiers(FAST, [one for one in LAYOUTS if one not in AT_NIGHT], LAYOUTS))
def test_samples_as_hugging_face(model, layout):
    family, layers = LAYOUTS[layout][3:]
    run(layout, "samples_as_hugging_face", model, expected=model(family, layers)[1])


COMPANY = [
    "fsdp dp2", "megatron qwen3_5 tp2", "megatron pp2", "megatron ep2", "external dp2", "megatron mistral", "megatron tp2",
    "megatron qwen3_5 pp2 vpp2",
]  # fmt: skip


@pytest.mark.parametrize("layout", in_tiers(COMPANY[:2], COMPANY[3:4], COMPANY))
def test_same_in_any_company(model, layout):
    run(layout, "same_in_any_company", model)


@pytest.mark.parametrize(
    "layout", in_tiers(["megatron qwen3_5"], ["fsdp dp2"], ["fsdp dp2", "megatron qwen3_5", "megatron pp2 vpp2"])
)
def test_the_cache_is_bounded(model, layout):
    """Of mrl's own cache; an engine of another package need have none."""
    run(layout, "the_cache_is_bounded", model)


@pytest.mark.parametrize(
    "layout",
    in_tiers(["fsdp dp2", "megatron tp2"], ["external dp2"], ["fsdp dp2", "megatron tp2", "megatron", "external dp2"]),
)
def test_the_weights_of_now_generate(model, layout):
    run(layout, "the_weights_of_now_generate", model, optimizer=tiny.OPTIMIZER)


TWO_WAYS = [
    "megatron", "megatron qwen3_5 tp2", "megatron mistral", "megatron qwen2_moe", "megatron tied pp2", "megatron ep2", "megatron pp2 vpp2",
    "megatron deepseek_v3 tp2", "megatron gpt_oss tp2", "megatron tp2", "megatron deepseek_v3 pp2", "megatron experts tp2",
    "megatron glm4_moe ep2", "megatron olmoe tp2",
]  # fmt: skip


@pytest.mark.parametrize("layout", in_tiers(TWO_WAYS[:4], TWO_WAYS[6:9], TWO_WAYS))
def test_gpt_model_itself_gives_the_same(model, layout):
    """The megatron engine alone has two ways through a model."""
    run(layout, "gpt_model_itself_gives_the_same", model)


FIXED = [
    "megatron qwen2_moe", "megatron qwen3_5 tp2", "megatron pp2", "megatron mistral", "megatron tied tp2", "megatron pp2 vpp2",
    "megatron deepseek_v3 tp2", "megatron gpt_oss tp2", "megatron deepseek_v3 pp2", "megatron experts tp2 ep2",
    "megatron olmoe tp2",
]  # fmt: skip


@pytest.mark.parametrize("layout", in_tiers(FIXED[:2], [FIXED[2], *FIXED[6:8]], FIXED))
def test_fixed_shapes_give_the_same(model, layout):
    run(layout, "fixed_shapes_give_the_same", model)


def test_experts_on_ranks_have_no_fixed_shapes(model):
    run("megatron ep2", "experts_on_ranks_have_no_fixed_shapes", model)


INVARIANT = [
    "megatron qwen3_5", "megatron", "megatron pp2", "megatron cp2", "megatron gpt_oss", "megatron qwen2_moe", "megatron experts tp2",
    "megatron dp2", "megatron tp4", "megatron deepseek_v3 tp2", "megatron mistral",
]  # fmt: skip


@pytest.mark.parametrize("layout", in_tiers(INVARIANT[:1], INVARIANT[3:5], INVARIANT))
def test_company_changes_no_bit(model, layout):
    world_size, backend, parallel, family, layers = LAYOUTS[layout]
    config = tiny.role(model(family, layers)[0], backend=backend, parallel=parallel, optimizer=None, size=1)
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, batch_invariant=True))
    run_case(world_size, "tests.engine.generation:company_changes_no_bit", config=config)


def test_without_it_company_does(model):
    """So that the test above can fail."""
    config = tiny.role(model("llama", 2)[0], backend="megatron", optimizer=None, size=1)
    assert run_case(1, "tests.engine.generation:company_changes_bits", config=config)


def test_experts_on_ranks_are_not_invariant():
    engine = EngineConfig(
        batch_invariant=True, micro_batch=MicroBatchConfig(size=1, tokens=None), parallel=ParallelConfig(ep=2)
    )
    with pytest.raises(ConfigError, match=r"^engine\.batch_invariant: value true is not for engine\.parallel\.ep 2: "):
        check_batch_invariant(engine)
    with pytest.raises(ConfigError, match=r"needs micro-batches of one sequence.*set engine\.micro_batch\.size to 1"):
        check_batch_invariant(dataclasses.replace(engine, micro_batch=MicroBatchConfig(size=2, tokens=None)))
    spread = dataclasses.replace(engine, parallel=ParallelConfig(etp=2))
    dims, experts = ParallelDims(world_size=2, etp=2), tiny.config_of("qwen3_moe").to_dict()
    with pytest.raises(ConfigError, match=r"experts on ranks of several replicas.*\(etp2xdp2\)"):
        MegatronChecks.check_model(spread, dims, experts, Sequences(8, "data.max_length", packed=False, generated=True))


def test_stages_agree_on_the_way(model):
    run("megatron deepseek_v3 pp2", "ranks_agree_on_the_way", model)


@pytest.mark.parametrize("refuses", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_graphs_on_all_tensor_parallel_ranks_or_none(model, refuses):
    run("megatron tp2", "graphs_on_all_tensor_parallel_ranks_or_none", model, refuses=refuses)


def test_own_attention_in_place_of_another(model):
    """Only the megatron engine's layers may hold an attention that knows nothing of the cache."""
    run("megatron tp2 pp2", "own_attention_in_place_of_another", model)
