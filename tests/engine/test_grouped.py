"""Experts by grouped products (mrl/mcore_models/grouped.py): every number is that of transformers, as expert by expert. Kernels
need a GPU; on a CPU torch takes expert after expert, and what is around them is the same."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mrl.config.schema import EngineConfig, LoraConfig, ModelConfig, MoEConfig
from mrl.engine.checks import Sequences
from mrl.engine.megatron.checks import MegatronChecks
from mrl.engine.registry import build_engine
from mrl.errors import ConfigError
from mrl.mcore_models import grouped
from mrl.parallel import ParallelDims
from tests.engine import tiny
from tests.engine.contract import numbers_of_step
from tests.engine.grouped import with_key
from tests.engine.harness import run_case
from tests.engine.lora import make_engine
from tests.engine.parity import Row, Table
from tests.gpu.measures import grouped_products
from tests.operators import Operators
from tests.resume.runs import assert_same_state, sharded_tensors
from tests.tiers import in_tiers

LOCAL, TE = False, True
ROWS = [
    (LOCAL, Row("qwen3_moe", size=4, why="a dense layer among those of experts")),
    (TE, Row("qwen3_moe", "dp2xep2", size=4, lora="all", why="adapters of each expert beside the product of all")),
    (LOCAL, Row("deepseek_v3", "tp2+spxdp2xep2", size=2, recompute="full", why="experts without tokens on a rank")),
    (LOCAL, Row("mixtral", "tp2+spxdp2xep2xetp2", size=4, why="experts that two ranks share")),
    (LOCAL, Row("qwen3_moe", size=4, lora="all", why="adapters of each expert, which are multiplied one by one")),
]


@pytest.mark.parametrize(("te", "row"), in_tiers(ROWS[:1], [ROWS[1], ROWS[3]], ROWS), ids=str)
def test_row(table: Table, te: bool, row: Row):
    given = {
        "row": row,
        "folder": table.model(row.model),
        "reference": table.reference(row),
        "adapter": table.adapter(row),
    }
    outcome = run_case(row.world_size, "tests.engine.grouped:measure", te=te, **given)
    assert not outcome.problems, f"{row}: " + "; ".join(outcome.problems)


@pytest.mark.slow
def test_weights_that_are_gathered_are_waited_for(tmp_path):
    """No forward pass of the experts' own linear layers runs, whose hooks wait."""
    folder = tiny.make_model(str(tmp_path / "model"), "qwen3_moe", layers=2)
    found = run_case(2, "tests.engine.grouped:overlapped", config=tiny.role(folder, backend="megatron", size=1))
    assert found["reduced"] and found["gathered"]
    assert found["norms"] < 1e-5 and found["others"] == 0, found


def test_a_linear_layer_of_all_experts_is_one_tensor(folder):
    """Before and after DDP; what trains adds its gradients at once, into the buffer that the optimizer reads."""
    frozen = grouped_engine(folder, optimizer=None)
    assert_one_tensor(frozen, trains=False)
    engine = grouped_engine(folder)
    assert_one_tensor(engine, trains=True)
    batch = tiny.uneven_batch(0)
    micro_batches = len(engine._plan(batch))
    with Operators() as operators, engine.train_mode():
        engine.forward_backward_step(batch)
    added = [args[0] for func, args in operators.calls if func is torch.ops.aten.add_.Tensor]
    gradients = [weights.parameters[0].main_grad for weights in weights_of(engine)]
    for gradient in gradients:
        first = gradient.data_ptr()
        of_experts = [tuple(t.shape) for t in added if first <= t.data_ptr() < first + 4 * gradient.nbytes]
        assert of_experts == [(4, *gradient.shape)] * micro_batches, of_experts
    assert all(p.grad is None for weights in weights_of(engine) for p in (*weights.parameters, *weights.tensors))
    engine.optimizer_step()
    assert_one_tensor(engine, trains=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_tensor_and_several_give_the_same_bits(folder, dtype, monkeypatch):
    """Several: as where a bucket of DDP ends between two experts, with padding."""
    one = steps_of(grouped_engine(folder, dtype=dtype))
    monkeypatch.setattr(grouped, "_as_one", lambda tensors: None)
    engine = grouped_engine(folder, dtype=dtype)
    assert all(len(weights.tensors) == 4 for weights in weights_of(engine))
    assert_same_state(one, steps_of(engine), "steps")


def test_a_view_is_of_tensors_with_equal_distances():
    memory = torch.arange(40.0)
    spread = [memory[start : start + 6].view(2, 3) for start in (0, 8, 16)]
    together = grouped._as_one(spread)
    assert torch.equal(together, torch.stack(spread)) and together.data_ptr() == memory.data_ptr()
    for places in ((0, 8, 17), (16, 8, 0), (0, 5, 10)):
        assert grouped._as_one([memory[start : start + 6].view(2, 3) for start in places]) is None
    with pytest.raises(AssertionError, match="several buffers"):
        grouped._as_one([memory[:6], memory.clone()[6:12]])
    one = torch.zeros(2, 3)
    assert torch.equal(grouped._as_one([one]), one[None])  # a rank with one expert


def test_checkpoints_are_those_of_single_experts(folder, tmp_path):
    """Names, boxes, masters and moments: one by one -> grouped -> one by one."""
    engine = make_engine(tiny.role(folder, backend="megatron", size=2))
    steps_of(engine)
    engine.save_checkpoint(str(tmp_path / "one by one"))
    first = sharded_tensors(tmp_path / "one by one")
    assert any(".experts." in name for name in first)
    saved = "one by one"
    for name, other in (("grouped", grouped_engine(folder)), ("one by one again", make_engine(engine.config))):
        other.load_checkpoint(str(tmp_path / saved))
        other.save_checkpoint(str(tmp_path / name))
        assert_same_state(first, sharded_tensors(tmp_path / name), name)
        saved = name


def test_weights_that_leave_the_device_come_back(folder):
    """The one tensor is of the memory that is moved."""
    kinds = ("parameters", "gradients", "optimizer")
    stays, moves = grouped_engine(folder), grouped_engine(folder, offload=kinds)
    assert_same_state(steps_of(stays), steps_of(moves), "steps")


def test_decoding_in_fixed_shapes(tmp_path):
    """What a CUDA graph captures: experts that get tokens alone, of sequences whose number is odd."""
    config = tiny.role(tiny.make_model(str(tmp_path / "model"), "qwen2_moe"), backend="megatron", optimizer=None)
    found = run_case(1, "tests.engine.grouped:decodes_in_fixed_shapes", config=config)
    assert found["layers"] and found["idle"], found
    run_case(1, "tests.engine.grouped:samples_in_fixed_shapes", config=config)


@pytest.mark.parametrize("dtype, capability, works", [
    (torch.bfloat16, (9, 0), True), (torch.bfloat16, (8, 0), False), (torch.float32, (9, 0), False), (torch.bfloat16, None, False),
])  # fmt: skip
def test_what_asks_the_host_is_not_captured(monkeypatch, dtype, capability, works):
    """torch takes expert after expert where it has no kernel."""
    monkeypatch.setattr(grouped.devices, "capability", lambda: capability)
    assert grouped.works_on_device(torch.empty(2, dtype=dtype, device="meta")) is works
    assert grouped.works_on_device(torch.empty(2, dtype=dtype))


def test_frozen_weights_get_no_gradient(folder):
    lora = LoraConfig(rank=4, alpha=6.0, target_modules=("q_proj", "v_proj"))
    engine = grouped_engine(folder, model={"lora": lora})
    assert_one_tensor(engine, trains=False)
    before = [tensor.clone() for weights in weights_of(engine) for tensor in weights.tensors]
    steps_of(engine)
    assert_one_tensor(engine, trains=False)
    after = [tensor for weights in weights_of(engine) for tensor in weights.tensors]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_products_of_any_number_of_tokens(monkeypatch):
    monkeypatch.setattr("tests.gpu.measures.DEVICE", "cpu")
    assert not grouped_products((0, 1, 17, 0, 300, 64, 3, 0))["problems"]
    for dtype in (torch.float32, torch.bfloat16):
        x, weights = torch.randn(40, 16, dtype=dtype), torch.randn(3, 24, 16, dtype=dtype).unbind()
        one_by_one = [part @ w.T for part, w in zip(x.split((7, 0, 33)), weights, strict=True)]
        assert torch.equal(product(x, (7, 0, 33), weights), torch.cat(one_by_one))
        assert torch.equal(product(x, (7, 0, 33), [torch.stack(weights)]), torch.cat(one_by_one))
    weights = [torch.randn(8, 4) for _ in range(3)]
    x = torch.randn(
        4, 5, requires_grad=True
    )  # in an order that kernels refuse; weights do not train, as beside adapters
    found = product(x.t(), (2, 0, 3), weights)
    assert found.grad_fn.saved_tensors[0] is None, "inputs are kept for no gradient"
    found.sum().backward()  # of a gradient with one element
    torch.testing.assert_close(x.grad.t(), torch.cat([weights[0].sum(0).expand(2, 4), weights[2].sum(0).expand(3, 4)]))
    none, trained = (
        torch.empty(0, 4, requires_grad=True),
        [w.requires_grad_() for w in weights],
    )  # of a rank without tokens
    found = product(none, (0, 0, 0), trained)
    found.sum().backward()
    assert found.shape == (0, 8) and none.grad.shape == (0, 4) and all(torch.equal(w.grad, 0 * w) for w in trained)


def test_auto_is_where_torch_has_the_kernel():
    for capability, chosen in ((None, False), ((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)):
        assert grouped.is_chosen("auto", "local", torch.bfloat16, capability) == chosen
        assert grouped.is_chosen(True, "te", torch.float32, capability)
        assert not grouped.is_chosen(False, "local", torch.bfloat16, capability)
    assert not grouped.is_chosen("auto", "te", torch.bfloat16, (9, 0))
    assert not grouped.is_chosen("auto", "local", torch.float32, (9, 0))


@pytest.mark.parametrize(("family", "sizes"), [("gpt_oss", {}), ("mixtral", {"intermediate_size": 26})])
def test_experts_that_the_kernel_does_not_take_stay_as_they_are(tmp_path, family, sizes):
    config = tiny.role(tiny.make_model(str(tmp_path / "model"), family, **sizes), backend="megatron")
    engine = build_engine(config)
    engine.init_model()
    grouped.install(engine.model.chunks)
    assert not [name for chunk in engine.model.chunks for name, m in chunk.named_modules() if "forward" in vars(m)]


REFUSED = {
    "gpt_oss": ({}, {}, "multiplies experts without biases, and the model's have some; leave it out"),
    "qwen3_moe": ({"moe_intermediate_size": 32}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "multiplies experts in 16 bits, and engine.megatron.fp8 in 8; leave it out"),
    "deepseek_v3": ({"moe_intermediate_size": 20}, {}, "takes experts whose sizes are multiples of 4 (16 bytes in float32), and theirs are 32 x 10 on a rank; leave it out"),
}  # fmt: skip


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_is_refused(family):
    sizes, fields, said = REFUSED[family]
    raw, dims = tiny.config_of(family, **sizes).to_dict(), ParallelDims()
    if family == "deepseek_v3":
        dims = ParallelDims(2, tp=2, etp=2, sp=True)
    engine, model = (
        EngineConfig(moe=MoEConfig(grouped_mm=True), megatron=fields),
        ModelConfig(path="none", dtype="float32"),
    )
    with pytest.raises(ConfigError) as error:
        MegatronChecks.check_model(engine, dims, raw, Sequences(8, "data.max_length", packed=True, generated=False))
        MegatronChecks.check_anywhere(model, engine, dims, raw)
    assert str(error.value) == f"engine.moe.grouped_mm: value true {said}"


def product(x: torch.Tensor, counts: tuple[int, ...], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return grouped.grouped_product(x, grouped.row_ends(torch.tensor(counts), x), weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_model(str(tmp_path_factory.mktemp("experts") / "model"), "qwen3_moe", layers=2)


def grouped_engine(folder: str, **fields: Any) -> Any:
    return make_engine(with_key(tiny.role(folder, backend="megatron", size=2, **fields)))


def weights_of(engine: Any) -> list[grouped.ExpertWeights]:
    return [weights for chunk in engine.model.chunks for weights in grouped.weights_of(chunk)]


def assert_one_tensor(engine: Any, *, trains: bool) -> None:
    """Both matrices of each layer: what a product takes is what the parameters are."""
    found = weights_of(engine)
    assert len(found) == 4
    for weights in found:
        (together,) = weights.tensors
        assert together.is_contiguous() and together.requires_grad == trains
        assert all(part.data_ptr() == p.data_ptr() for part, p in zip(together, weights.parameters, strict=True))
        assert torch.equal(together, torch.stack(list(weights.parameters)))


def steps_of(engine: Any) -> dict[str, torch.Tensor]:
    """All numbers of two steps."""
    steps = [numbers_of_step(engine, tiny.uneven_batch(step)) for step in range(2)]
    return {f"{step} {name}": value for step, found in enumerate(steps) for name, value in found.items()}
