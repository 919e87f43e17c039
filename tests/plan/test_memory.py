"""What a rank holds in each phase, by hand, from figures that are given."""

from __future__ import annotations

import dataclasses

import pytest

from mrl.config.command import Phase, Phases
from mrl.config.schema import EngineConfig, LoraConfig, MicroBatchConfig, ModelConfig, OptimizerConfig, RoleConfig
from mrl.engine.fsdp.shapes import Shape
from mrl.engine.megatron import meta
from mrl.engine.megatron.meta import Buffer, ChunkFigures, RankFigures
from mrl.parallel import ParallelDims
from mrl.plan import schedule
from mrl.plan.memory import RolePlan, _graph_pool, memory_uses, micro_batches, most_activations
from tests.cuda import models
from tests.cuda.cases import DELTA, DENSE, Case

CONFIG = RoleConfig(
    model=ModelConfig(path="none", dtype="bfloat16"), engine=EngineConfig(micro_batch=MicroBatchConfig(size=2)),
    optimizer=OptimizerConfig(lr=1e-3),
)  # fmt: skip
UPDATE = Phase("update of the actor", "actor", "train", 32, steps=2)
CHUNK = ChunkFigures(
    saved=10, forward_peak=15, backward_peak=18, forward_flops=1, backward_flops=2, forward_traffic=(),
    backward_traffic=(), sent=0, shared=0,
)  # fmt: skip


def role(config: RoleConfig = CONFIG, name: str = "actor", pp: int = 2) -> RolePlan:
    dims = ParallelDims(4, pp=pp)
    trained = RankFigures(
        coords=dims.coordinates(0), parameters=2000, trained_parameters=1000, buffers=7,
        grad_buffers=(Buffer(False, 2, 1000, 2, (600, 400)), Buffer(True, 2, 10, 4, (5, 5))), chunks=(CHUNK,),
        layers=((0,),), dtype_bytes=2,
    )  # fmt: skip
    forward = dataclasses.replace(trained, grad_buffers=(), chunks=(dataclasses.replace(CHUNK, forward_peak=12),))
    return RolePlan(name, "none", config, dims, (trained,) * pp, (forward,) * pp)


@pytest.mark.parametrize(
    ("spec", "fields", "gradients"),
    [
        ("local", {}, 1000 * 2),
        ("te", {}, 0),
        ("te", {"gradient_accumulation_fusion": False}, 1000 * 2),
        ("local", {"gradient_accumulation_fusion": True}, 1000 * 2),
    ],
)
def test_graphs_of_training_keep_gradients_that_no_kernel_adds_into_the_buffers(spec, fields, gradients):
    config = dataclasses.replace(CONFIG, engine=dataclasses.replace(CONFIG.engine, megatron=fields))
    assert _graph_pool(role().trains[0], config, spec) - _graph_pool(role().trains[0], CONFIG, "te") == gradients


def offloading(*kinds: str) -> RoleConfig:
    return dataclasses.replace(CONFIG, engine=dataclasses.replace(CONFIG.engine, offload=kinds))


def test_an_update():
    first, last = memory_uses(Phases((UPDATE,)), {"actor": role()}, 8, 0)
    assert (first.parameters, first.gradients) == (2007, 4 * 1010)
    assert first.optimizer == 12 * 600 + 8 * 5  # of the fullest rank; fp32 parameters are their own masters
    # 16 sequences over dp 2 in micro-batches of 2: one in flight before the first stage's own, none on the last
    assert (first.activations, last.activations) == (10 + 18, 18)
    assert first.total == 2007 + 4040 + 7240 + 28


def test_an_optimizer_that_waits_on_the_host_comes_when_activations_are_gone():
    [use, _] = memory_uses(Phases((UPDATE,)), {"actor": role(offloading("optimizer"))}, 8, 0)
    assert (use.optimizer, use.activations) == (7240, 0)
    plan = role(offloading("optimizer"))
    large = dataclasses.replace(plan.trains[0], chunks=(dataclasses.replace(CHUNK, saved=9000, backward_peak=9000),))
    [use, _] = memory_uses(Phases((UPDATE,)), {"actor": dataclasses.replace(plan, trains=(large,) * 2)}, 8, 0)
    assert (use.optimizer, use.activations) == (0, 18000)


def test_forward_passes_hold_weights_alone():
    use = memory_uses(Phases((Phase("forward of the actor", "actor", "forward", 32),)), {"actor": role()}, 8, 0)[0]
    assert (use.parameters, use.gradients, use.optimizer, use.activations) == (2007, 0, 0, 12)


def test_the_pool_of_graphs_is_there_in_all_phases_and_offloaded_by_none():
    inside, forward = (Phase(kind, "actor", kind, 32, engine_fraction=0.5) for kind in ("sample", "forward"))
    for phase in (UPDATE, inside, forward):
        plans = (role(pp=1), dataclasses.replace(role(pp=1), graph_pool=300))
        [without], [held] = (memory_uses(Phases((phase,)), {"actor": plan}, 8, 8000) for plan in plans)
        assert held.parameters - without.parameters == 300 == held.total - without.total, phase
    others = {"actor": role(), "critic": dataclasses.replace(role(name="critic"), graph_pool=300)}
    assert {use.idle for use in memory_uses(Phases((UPDATE,), offload_idle=False), others, 8, 0)} == {
        2307 + 4040 + 7240
    }


def test_roles_that_wait():
    roles = {"actor": role(), "critic": role(offloading("optimizer", "gradients"), "critic")}
    stay = Phases((UPDATE,), offload_idle=False)
    assert {use.idle for use in memory_uses(stay, roles, 8, 0)} == {2007}
    assert {use.idle for use in memory_uses(Phases((UPDATE,)), roles, 8, 0)} == {0}
    assert {use.idle for use in memory_uses(stay, {"actor": role(), "critic": role(name="critic")}, 8, 0)} == {
        2007 + 4040 + 7240
    }


@pytest.mark.parametrize(("offload", "kept"), [((), (2007, 4040, 7240)), (("parameters", "optimizer"), (7, 4040, 0))])
def test_a_role_that_stays_keeps_its_gradients_and_optimizer_in_all_phases(offload, kept):
    forward, inside = Phase("f", "actor", "forward", 32), Phase("s", "actor", "sample", 32, engine_fraction=0.5)
    found = memory_uses(
        Phases((forward, inside), offload_idle=False), {"actor": role(offloading(*offload), pp=1)}, 8, 8000
    )
    # a forward pass brings the parameters, a sampling engine has its own
    assert [(use.parameters, use.gradients, use.optimizer) for use in found] == [(2007, *kept[1:]), kept]


def test_an_engine_inside_the_trainer_takes_its_weights_then_its_share(tmp_path):
    """Its cache wakes when the role has left the device (docs/rollout-servers.md)."""
    path = str(models.write("Qwen/Qwen3-8B", tmp_path))
    config = dataclasses.replace(CONFIG, model=ModelConfig(path=path, dtype="bfloat16"))
    handed = Phase("new weights to vLLM", "actor", "sample", 32, handed_to_tp=2)
    inside = Phase("sampling by vLLM", "actor", "sample", 32, engine_fraction=0.5)
    found = memory_uses(Phases((handed, inside)), {"actor": role(config, pp=1)}, 8, 8000)
    assert [(use.parameters, use.cache) for use in found] == [(2007, 2 * 8_190_735_360 // 2), (0, 4000)]


@pytest.mark.parametrize(
    ("kernels", "filters", "bytes_"),
    [
        (False, {}, 2 + 4 + 4 + 8),  # logits in bfloat16 and in fp32, noise, and words that become noise
        (True, {}, 2),  # the kernel reads them in place
        (True, {"top_k": 20}, 2 + 4),
        (True, {"top_p": 0.9}, 2 + 4 + 4 + 1),  # probabilities, and which of them count
    ],
)
def test_a_role_that_samples_has_prompts_in_its_layers_then_a_choice(tmp_path, kernels, filters, bytes_):
    path = str(models.write("Qwen/Qwen3-8B", tmp_path))
    config = dataclasses.replace(CONFIG, model=ModelConfig(path=path, dtype="bfloat16"))
    plan = role(config)
    stages = (dataclasses.replace(plan.forward[0], chunks=(CHUNK, CHUNK)),) * 2
    plan = dataclasses.replace(plan, sampling=stages, kernels=kernels)
    sampling = Phase("sampling", "actor", "sample", 33, cache_tokens=0, prefill_tokens=8, **filters)
    found = memory_uses(Phases((sampling,)), {"actor": plan}, 8, 0)
    assert found[0].activations == 15
    # 33 sequences on dp 2. A candidate of a filter has 8 bytes of id and some fp32 numbers, a sequence has some numbers
    assert found[1].activations - 15 == pytest.approx(17 * 151936 * bytes_, rel=0.02, abs=2**20)
    [unknown, _] = memory_uses(Phases((sampling,)), {"actor": role(config)}, 8, 0)
    assert unknown.activations is None


@pytest.mark.parametrize(
    ("model", "dtype", "tp", "bytes_"),
    [
        ("Qwen/Qwen3-8B", "bfloat16", 2, (8 // 2) * 2 * 128 * 2), ("Qwen/Qwen3-8B", "float32", 1, 8 * 2 * 128 * 4),
        ("Qwen/Qwen3-8B", "bfloat16", 16, 2 * 128 * 2),  # shared by two ranks
        ("deepseek-ai/DeepSeek-V3", "bfloat16", 4, (128 // 4) * (128 + 64 + 128) * 2),
    ],
)  # fmt: skip
def test_keys_and_values_of_a_token(tmp_path, model, dtype, tp, bytes_):
    config = dataclasses.replace(CONFIG, model=ModelConfig(path=str(models.write(model, tmp_path)), dtype=dtype))
    assert meta.cache_bytes(config, ParallelDims(16, tp=tp)) == bytes_


def test_recurrent_layers_have_states_of_each_sequence(tmp_path):
    """Qwen3.5-9B on tp 2: eight key heads of 128, sixteen value heads of 128, three tokens before each."""
    config = dataclasses.replace(CONFIG, model=ModelConfig(path=str(models.write(DELTA, tmp_path)), dtype="bfloat16"))
    dims = ParallelDims(8, tp=2, pp=2)
    states = 3 * (2 * 8 * 128 + 16 * 128) * 2 + 4 * 16 * 128 * 128
    assert meta.recurrent_bytes(config, dims) == states
    plan = role(config)
    stages = tuple(dataclasses.replace(stage, layers=((2, 3), (6, 7))) for stage in plan.forward)  # 3 and 7 have keys
    plan = dataclasses.replace(plan, dims=dims, trains=(), forward=stages, sampling=stages)
    sampling = Phase("sampling", "actor", "sample", 33, cache_tokens=1000, prefill_tokens=8)
    first, _ = memory_uses(Phases((sampling,)), {"actor": plan}, 8, 0)
    assert first.cache == 1000 * 2 * (2 * 2 * 256 * 2) + 17 * 2 * states  # 33 sequences on dp 2
    [kinds, _] = (kind.same for kind in meta.kinds_of_stages(config, ParallelDims(2, pp=2)))
    assert len(set(kinds[0][3])) == 2


@pytest.mark.parametrize(
    ("limit", "sequences", "dims", "expected"),
    [
        (MicroBatchConfig(size=2), 16, ParallelDims(4), ((8, 8), 2)),
        (MicroBatchConfig(size=8), 16, ParallelDims(4), ((8,) * 4, 1)),  # it has no more
        (MicroBatchConfig(tokens=20), 20, ParallelDims(4), ((8, 8), 3)),
        (MicroBatchConfig(size=1), 20, ParallelDims(4, pp=4, vpp=2), ((8,), 20)),
        (MicroBatchConfig(size=1), 18, ParallelDims(4, pp=4, vpp=2), ((8,), 20)),  # a multiple of pp
    ],
)
def test_micro_batches(limit, sequences, dims, expected):
    config = dataclasses.replace(CONFIG, engine=EngineConfig(micro_batch=limit))
    found = micro_batches(config, dims, sequences, 8)
    assert (found.lengths, found.count) == expected


def test_shards_of_a_tensor_are_padded_to_the_same_rows():
    shape = Shape(rows=10, row=3, itemsize=4, trains=True)
    assert shape.held(4) == 9
    assert [shape.updated(4, rank) for rank in range(4)] == [9, 9, 9, 3]
    assert [Shape(4, 1, 4, True).updated(3, rank) for rank in range(3)] == [2, 2, 0]


@pytest.mark.parametrize(("target", "kinds"), [(r".*layers\.[0-3]\..*q_proj", 4), (r".*q_proj", 3)])
def test_stages_whose_layers_have_other_adapters_are_of_another_kind(tmp_path, target, kinds):
    """Four stages of two layers; the second and the third are equal but for their adapters."""
    path = str(models.write("Qwen/Qwen3-8B", tmp_path, 8))
    lora = LoraConfig(rank=4, target_modules=target)
    config = dataclasses.replace(CONFIG, model=ModelConfig(path=path, dtype="bfloat16", lora=lora))
    assert len({kind.same for kind in meta.kinds_of_stages(config, ParallelDims(4, pp=4))}) == kinds


def test_a_buffer_that_passes_share_counts_once():
    """However many micro-batches are in flight, of however many chunks."""
    order = schedule.passes(0, pp=2, vpp=2, micro_batches=8)
    chunks = (dataclasses.replace(CHUNK, shared=5), dataclasses.replace(CHUNK, shared=3))
    assert most_activations(order, chunks) == most_activations(order, (CHUNK, CHUNK)) + 5


def test_copies_of_weights_in_8_bits(planner):
    """Of Qwen3-8B's four layers on two stages: a byte of each value of linear layers by rows, one by columns for training."""
    linear = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288
    case = Case(DENSE, world=2, pp=2, layers=4)
    fp8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}

    def copies(**further):
        return [found for _, found in planner.call("tests.plan.planned:copies_in_8_bits", case, fp8 | further)]

    assert copies() == [4 * linear] * 2 + [2 * linear] * 2
    assert copies(first_last_layers_bf16=True) == [2 * linear] * 2 + [linear] * 2
    assert copies(fp8_recipe="mxfp8") == [4 * linear * 33 // 32] * 2 + [2 * linear * 33 // 32] * 2
    assert copies(fp8=None, fp8_recipe=None) == [0] * 4


def test_userbuffers_and_the_padding_to_one_size(planner):
    """A micro-batch of 810 tokens over two tensor-parallel ranks, padded to 1000: rows of 4096 values in bfloat16."""
    case = Case(DENSE, world=4, tp=2, pp=2, layers=2, lengths=(700, 110))
    padded = dataclasses.replace(case, megatron={"tp_comm_overlap": True})
    plain, found = (planner.call("tests.plan.planned:of_one_size", each) for each in (case, padded))
    row = 2 * 4096
    assert [sent for _, sent in plain] == [[405 * row], [0]] and [sent for _, sent in found] == [[500 * row], [0]]
    assert [have - had for (have, _), (had, _) in zip(found, plain, strict=True)] == [12 * 1000 * row] * 2
    assert planner.call("tests.plan.planned:sampling_of_one_size", padded) == [[1000 * row], [0]]  # 2000 tokens


def test_micro_batches_of_one_size_count_the_places_that_context_parallelism_adds():
    """250 tokens take 252 places of 1004: three sequences, where four fit by their tokens."""
    dims = ParallelDims(4, tp=2, cp=2, sp=True)
    for further, pad, lengths in (({}, False, 4), ({"tp_comm_overlap": True}, False, 3), ({}, True, 3)):
        engine = EngineConfig(micro_batch=MicroBatchConfig(tokens=1001, pad=pad), megatron=further)
        assert micro_batches(dataclasses.replace(CONFIG, engine=engine), dims, 8, 250).lengths == (250,) * lengths


def test_copies_in_8_bits_are_where_parameters_are():
    plan = role(pp=1)
    with_copies = dataclasses.replace(plan, trains=(dataclasses.replace(plan.trains[0], fp8_copies=500),))
    for offload, waiting in (((), 2007), (("parameters",), 7)):
        held = dataclasses.replace(with_copies, config=offloading(*offload))
        own = Phase("s", "actor", "sample", 32, engine_fraction=0.5)
        [update, idle] = memory_uses(Phases((UPDATE, own), offload_idle=False), {"actor": held}, 8, 8000)
        assert (update.parameters, idle.parameters) == (2507, waiting)
