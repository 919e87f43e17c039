"""Adapters on the Megatron engine: what trains, what is saved, what peft makes of it; gradients are in the parity table."""

from __future__ import annotations

import dataclasses
import functools
import math
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file

from mrl.config.schema import LoraConfig, RoleConfig
from mrl.engine.base import BaseEngine
from mrl.engine.guards import Problem
from mrl.engine.lora.shapes import adapter_shapes
from mrl.engine.megatron.optim import gradient_buffers, optimizers_of, shards
from mrl.engine.torch_dist.reader import TorchDistReader
from tests.engine import tiny
from tests.engine.contract import assert_equal, gradients, make_engine, train
from tests.engine.harness import run_case
from tests.engine.parity import LORAS, Row, Table
from tests.engine.parity_rows import LORA_ROWS, NIGHTLY_LORA_ROWS
from tests.tiers import in_tiers


def with_adapters(config: RoleConfig, adapter: str) -> BaseEngine:
    engine = make_engine(config)
    engine.load_adapter(adapter)
    return engine


def only_adapters_train(config: RoleConfig) -> None:
    """Gradients, masters and moments are of adapters alone (and a value head), and the weights under them stay to the bit."""
    engine = make_engine(config)
    if config.head == "value":
        engine.set_loss_fn(tiny.value_loss)
    with engine.without_adapters():
        before = {name: t.clone() for name, t in engine.hf_weights() if name != "score.weight"}
    start = {name: t.clone() for name, t in engine.adapter_weights()}
    train(engine, 3)
    with engine.without_adapters():
        assert_equal({name: t for name, t in engine.hf_weights() if name != "score.weight"}, before)
    assert all(not torch.equal(t, start[name]) for name, t in engine.adapter_weights())
    trained = {n for m in engine.model.chunks for n, p in m.named_parameters() if p.requires_grad}
    assert all(".adapter." in name or name == "output_layer.weight" and config.head == "value" for name in trained)
    here = sum(p.numel() for m in engine.model.chunks for p in m.parameters() if p.requires_grad)
    in_buffers = sum(p.numel() for b in gradient_buffers(engine.model.wrapped) for p in b.param_index_map)
    assert in_buffers == here
    states = [
        s for part in optimizers_of(engine.model.optimizer) if part.optimizer for s in part.optimizer.state.values()
    ]
    held = sum(span.stop - span.start for _, _, _, span in shards(engine.model.optimizer))
    assert sum(s["exp_avg"].numel() for s in states) == held <= here
    assert all(not hasattr(p, "main_grad") for m in engine.model.chunks for p in m.parameters() if not p.requires_grad)


def an_adapter_without_a_gradient_is_found(config: RoleConfig, adapter: str) -> None:
    """A zero gradient of B is a fault, and one of A where B is not zero."""
    engine = with_adapters(config, adapter)
    found = _problems(engine, lambda name: ".adapter.A.q_proj" in name or ".adapter.B.q_proj" in name)
    ends = [f"q_proj.lora_{part}.weight: its gradient is zero" for part in "AB"]
    assert all(any(str(problem).endswith(end) for problem in found) for end in ends), found
    assert all(str(problem).endswith(tuple(ends)) for problem in found), found


def _problems(engine: BaseEngine, zeroed) -> list[Problem]:
    """What the guards say of a step whose reduced gradients are zero where `zeroed(name)`."""
    gradients(engine, engine.shard_data(tiny.uneven_batch()))
    for model in engine.model.chunks:
        for name, parameter in model.named_parameters():
            if zeroed(name):
                parameter.main_grad.zero_()
    token = engine.guard_before_step()
    engine.optimizer_step()
    return engine.guard_after_step(token)


def checkpoint_holds_adapters_alone(config: RoleConfig, path: str) -> int:
    """Its tensors are those of the adapters' file, and their masters and moments. Returns the bytes of the folder."""
    engine = make_engine(config)
    train(engine, 1)
    saved = engine.save_checkpoint(path, global_step=1)
    if engine.is_main:
        reader = TorchDistReader(os.path.join(saved, "mcore"))
        expected = adapter_shapes(engine.model.adapters, config.head, engine.model.hf["hidden_size"])
        keys = {f"{prefix}{name}" for name in expected for prefix in _KINDS}
        assert set(reader.tensors) == keys, sorted(set(reader.tensors) ^ keys)
        sizes = {name: math.prod(reader.tensors[name].shape) for name in expected}
        assert sizes == {name: math.prod(shape) for name, shape in expected.items()}
    size = sum(os.path.getsize(os.path.join(d, f)) for d, _, files in os.walk(saved) for f in files)
    dist.barrier()
    return size


_KINDS = ("", "optimizer.master.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")


def start_of(config: RoleConfig) -> dict[str, float] | None:
    """A checksum of each adapter tensor at the start."""
    engine = make_engine(config)
    sums = {
        name: float((t.double() * torch.arange(t.numel()).view_as(t)).sum()) for name, t in engine.adapter_weights()
    }
    return sums if engine.is_main else None


ALL = LoraConfig(**LORAS["all"])
LAYOUTS = {
    "dp1": (1, {}),
    "tp2": (2, {"tp": 2, "sp": False}),
    "tp2+sp": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {}),
    "ep2": (2, {"ep": 2}),
    "tp4": (4, {"tp": 4}),
    "tp2 ep2 etp2": (4, {"tp": 2, "ep": 2, "etp": 2}),
}


@pytest.mark.parametrize(
    "row",
    in_tiers(LORA_ROWS[::3], [LORA_ROWS[i] for i in (1, 2, 4, 10, 11)], (*LORA_ROWS, *NIGHTLY_LORA_ROWS)),
    ids=str,
)
def test_row(table: Table, row: Row):
    table.check(row)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder of a model, folder of random adapters for it) by family and selection; each is made once."""
    made = {}

    def of(family="llama", lora=ALL, **fields):
        key = (family, lora, *sorted(fields.items()))
        if key not in made:
            folder = tiny.make_model(str(tmp_path_factory.mktemp(family)), family, **fields)
            adapter = str(tmp_path_factory.mktemp("adapter") / "of")
            made[key] = folder, tiny.make_adapter(adapter, folder, lora, head=fields.get("head", "lm"))
        return made[key]

    return of


def run(layout, case, folder, *, lora=ALL, module="tests.engine.test_lora_megatron", role=None, **kwargs):
    world_size, parallel = LAYOUTS[layout]
    config = tiny.role(folder, backend="megatron", parallel=parallel, model={"lora": lora}, **(role or {}))
    return run_case(world_size, f"{module}:{case}", config=config, **kwargs)


nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)
FEW = (("tp2+sp", "llama"), nightly("pp2", "llama"), ("ep2", "qwen3_moe"))


@pytest.mark.parametrize(("layout", "family"), FEW)
def test_only_adapters_train(model, layout, family):
    run(layout, "only_adapters_train", model(family)[0])


@pytest.mark.nightly
def test_a_value_head_trains_beside_adapters(model):
    run("tp2", "only_adapters_train", model(head="value")[0], role={"head": "value"})


@pytest.mark.parametrize(("layout", "family"), FEW)
def test_an_adapter_without_a_gradient_is_found(model, layout, family):
    folder, adapter = model(family)
    run(layout, "an_adapter_without_a_gradient_is_found", folder, adapter=adapter)


@pytest.mark.parametrize("layout", ["tp2+sp", "pp2"])
def test_first_steps_are_guarded(model, layout):
    run(layout, "first_steps_are_guarded", model()[0], module="tests.engine.lora")


@pytest.mark.parametrize(
    ("layout", "family", "head"), [("tp2+sp", "llama", "lm"), ("pp2", "llama", "value"), ("ep2", "qwen3_moe", "lm")]
)
def test_starts_as_the_base(model, layout, family, head):
    run(layout, "starts_as_the_base", model(family, head=head)[0], module="tests.engine.lora", role={"head": head})


STACKS = LoraConfig(**LORAS["stacks"])


@pytest.mark.parametrize(
    ("layout", "family", "head", "lora"),
    [
        ("pp2", "llama", "lm", ALL), ("tp2", "llama", "value", ALL), ("ep2", "qwen3_moe", "lm", ALL),
        nightly("dp1", "mixtral", "lm", ALL), nightly("dp1", "deepseek_v3", "lm", ALL),
        ("tp2", "qwen3_5", "lm", ALL), nightly("ep2", "qwen3_5_moe", "lm", ALL),
        nightly("ep2", "qwen2_moe", "lm", ALL), nightly("tp2 ep2 etp2", "mixtral", "lm", ALL),
        nightly("ep2", "gpt_oss", "lm", STACKS),  # gate and up turn by turn, and matrices transposed
    ],
)  # fmt: skip
def test_exports_load(model, tmp_path, layout, family, head, lora):
    """The adapter in peft, and the merged model in transformers."""
    given = {"module": "tests.engine.lora", "role": {"head": head}, "path": str(tmp_path)}
    run(layout, "export_loads_in_peft", model(family, head=head)[0], lora=lora, **given)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", nightly("deepseek_v3"), nightly("qwen3_5_moe")])
def test_generation_uses_the_adapters(model, family):
    """The same tokens in every layout; deepseek_v3 goes through GPTModel, the others through the lean decoder."""
    layouts = ("dp1", "tp2+sp", "pp2") + (() if family == "llama" else ("ep2",))
    given = {"folder": model(family)[0], "module": "tests.engine.lora"}
    tokens = [run(layout, "generates_with_adapters", **given) for layout in layouts]
    assert all(found == tokens[0] for found in tokens)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [nightly("tp2"), "tp2+sp", nightly("pp2")])
def test_dropout(model, tmp_path, layout):
    """It is off in evaluation (trap 18); ranks that share an input drop the same, and stay equal."""
    lora = dataclasses.replace(ALL, dropout=0.3)
    given = {"folder": model()[0], "lora": lora, "module": "tests.engine.lora"}
    run(layout, "dropout_trains_and_evaluates_without", **given)
    run(layout, "first_steps_are_guarded", **given)
    run(layout, "resume_is_bitwise", **given | {"module": "tests.engine.contract"}, path=str(tmp_path / "r"))


@pytest.mark.parametrize(
    ("layout", "family"), [nightly("cp2", "llama"), pytest.param("ep2", "qwen3_moe", marks=pytest.mark.slow)]
)
def test_resume_is_bitwise_in_bf16_with_recompute_and_offload(model, tmp_path, layout, family):
    role = {"dtype": "bfloat16", "recompute": "full", "offload": ("parameters", "gradients", "optimizer")}
    run(layout, "resume_is_bitwise", model(family)[0], module="tests.engine.contract", path=str(tmp_path), role=role)


@pytest.mark.parametrize(
    ("layout", "family", "targets"),
    [("pp2", "llama", r".*layers\.1\..*proj"), ("ep2", "qwen3_moe", ("experts.down_proj",))],
)
def test_resume_is_bitwise_where_a_rank_has_an_optimizer_of_nothing(model, tmp_path, layout, family, targets):
    """A pipeline stage without adapters, which is the one that describes the checkpoint; and nothing dense that trains."""
    lora = LoraConfig(rank=4, target_modules=targets)
    run(layout, "resume_is_bitwise", model(family)[0], lora=lora, module="tests.engine.contract", path=str(tmp_path))


def test_a_start_is_the_same_in_every_layout(model):
    folder = model("qwen3_moe")[0]
    starts = [run(layout, "start_of", folder) for layout in ("dp1", "tp2+sp", "pp2", "ep2")]
    assert all(start == starts[0] for start in starts) and len(starts[0]) == 2 * 2 * 7


@pytest.mark.parametrize(
    ("family", "saved_by", "read_by"),
    [
        ("llama", "tp2+sp", ("pp2", "dp2")),
        ("qwen3_moe", "ep2", ("tp2+sp",)),
        nightly("llama", "tp4", ("tp2", "dp1")),  # which cuts each of two key heads in two
        nightly("llama", "pp2", ("tp4",)),
        nightly("qwen3_moe", "tp2 ep2 etp2", ("dp1", "ep2")),  # which cuts gate and up of an expert's one adapter
        nightly("deepseek_v3", "tp2+sp", ("dp1",)),  # whose router's bias is saved by none
    ],
)
def test_another_layout_goes_on(model, tmp_path, family, saved_by, read_by):
    given = {"folder": model(family)[0], "module": "tests.engine.lora", "path": str(tmp_path)}
    saved = run(saved_by, "save_two_steps", **given)
    expected = run(saved_by, "goes_on", expected=saved, **given)
    for layout in read_by:
        for found, right in zip(run(layout, "goes_on", expected=saved, **given), expected, strict=True):
            assert found[:2] == (pytest.approx(right[0], rel=1e-5), pytest.approx(right[1], rel=1e-4))
            assert found[2] == right[2]


def test_a_checkpoint_holds_adapters_alone(model, tmp_path):
    wide = {"hidden_size": 256, "intermediate_size": 512}
    folder = model(**wide)[0]
    size = run("tp2", "checkpoint_holds_adapters_alone", folder, path=str(tmp_path / "c"))
    weights = sum(t.numel() * 4 for t in load_file(f"{folder}/model.safetensors").values())
    assert size < weights / 2, "smaller than the weights alone, though it has masters and moments"


def test_wrong_checkpoints_are_refused(model, tmp_path):
    """All that is refused: test_lora_fsdp.py."""
    adapters, whole = str(tmp_path / "adapters"), str(tmp_path / "whole")
    run("pp2", "save_two_steps", model()[0], module="tests.engine.lora", path=adapters)
    run("pp2", "save_whole", model()[0], lora=None, module="tests.engine.lora", path=whole)
    for folder, path, says in (
        (model(seed=1)[0], adapters, "over the base model"),
        (model()[0], whole, "was saved without adapters"),
    ):
        run("tp2", "refuses_checkpoint", folder, module="tests.engine.contract", path=path, message=says)


def test_a_norm_that_is_fused_with_the_linear_comes_before_the_adapter():
    """transformer-engine's linears hold the norm before them; their input is what goes into that."""
    from mrl.mcore_models.lora import _normed

    linear = torch.nn.Linear(6, 4)
    x = torch.randn(3, 6)
    assert _normed(linear, x) is x
    linear.layer_norm_weight, linear.eps = torch.nn.Parameter(torch.rand(6)), 1e-5
    for centered in (False, True):
        linear.zero_centered_gamma = centered
        torch.testing.assert_close(_normed(linear, x), F.rms_norm(x, (6,), linear.layer_norm_weight + centered, 1e-5))
