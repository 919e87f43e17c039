"""Experts by grouped products (mrl/mcore_models/grouped.py): every number is that of transformers, as expert by expert. Kernels
need a GPU; on a CPU torch takes expert after expert, and what is around them is the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config.schema import MoEConfig, RoleConfig
from mrl.engine.checks import EngineChecks, Sequences
from mrl.engine.fsdp.checks import FSDPChecks
from mrl.engine.megatron.checks import MegatronChecks
from mrl.engine.registry import build_engine
from mrl.errors import ConfigError
from mrl.mcore_models import grouped
from mrl.parallel import ParallelDims
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.engine.parity import Row, Table
from tests.gpu.measures import grouped_products
from tests.tiers import in_tiers

LOCAL, TE = False, True
ROWS = [
    (LOCAL, Row("qwen3_moe", size=4, why="a dense layer among those of experts")),
    (TE, Row("qwen3_moe", "dp2xep2", size=4, lora="all", why="adapters of each expert beside the product of all")),
    (LOCAL, Row("deepseek_v3", "tp2+spxdp2xep2", size=2, recompute="full", why="experts without tokens on a rank")),
    (LOCAL, Row("mixtral", "tp2+spxdp2xep2xetp2", size=4, why="experts that two ranks share")),
    (LOCAL, Row("glm4_moe", "pp2", size=2, why="shared experts")),
    (LOCAL, Row("qwen3_moe", size=4, lora="all", why="adapters of each expert, which are multiplied one by one")),
    (TE, Row("deepseek_v3", size=4)),
]


@pytest.mark.parametrize(("te", "row"), in_tiers(ROWS[:1], [*ROWS[1:4], ROWS[5]], ROWS), ids=str)
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


def test_products_of_any_number_of_tokens(monkeypatch):
    monkeypatch.setattr("tests.gpu.measures.DEVICE", "cpu")
    assert not grouped_products((0, 1, 17, 0, 300, 64, 3, 0))["problems"]
    for dtype in (torch.float32, torch.bfloat16):
        x, weights = torch.randn(40, 16, dtype=dtype), torch.randn(3, 24, 16, dtype=dtype).unbind()
        one_by_one = [part @ w.T for part, w in zip(x.split((7, 0, 33)), weights, strict=True)]
        assert torch.equal(grouped.grouped_product(x, torch.tensor((7, 0, 33)), weights), torch.cat(one_by_one))
    weights = [torch.randn(8, 4) for _ in range(3)]
    x = torch.randn(
        4, 5, requires_grad=True
    )  # in an order that kernels refuse; weights do not train, as beside adapters
    found = grouped.grouped_product(x.t(), torch.tensor((2, 0, 3)), weights)
    assert found.grad_fn.saved_tensors[0] is None, "inputs are kept for no gradient"
    found.sum().backward()  # of a gradient with one element
    torch.testing.assert_close(x.grad.t(), torch.cat([weights[0].sum(0).expand(2, 4), weights[2].sum(0).expand(3, 4)]))
    none, trained = (
        torch.empty(0, 4, requires_grad=True),
        [w.requires_grad_() for w in weights],
    )  # of a rank without tokens
    found = grouped.grouped_product(none, torch.tensor((0, 0, 0)), trained)
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
    engine = build_engine(tiny.role(tiny.make_model(str(tmp_path / "model"), family, **sizes), backend="megatron"))
    engine.init_model()
    grouped.install(engine.model.chunks)
    assert not [name for chunk in engine.model.chunks for name, m in chunk.named_modules() if "forward" in vars(m)]


REFUSED = {
    "gpt_oss": ({}, {}, "multiplies experts without biases, and the model's have some; leave it out"),
    "qwen3": ({}, {}, "is for experts, and the model (qwen3) has none; leave it out"),
    "qwen3_moe": ({}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "multiplies experts in 16 bits, and engine.megatron.fp8 in 8; leave one of both out"),
    "deepseek_v3": ({"moe_intermediate_size": 20}, {}, "takes experts whose sizes are multiples of 4 (16 bytes in float32), and theirs are 32 x 10 on a rank; leave it out"),
    "mixtral": ({"intermediate_size": 26}, {}, "takes experts whose sizes are multiples of 4 (16 bytes in float32), and theirs are 32 x 26 on a rank; leave it out"),
}  # fmt: skip


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_is_refused(tmp_path, family):
    sizes, fields, said = REFUSED[family]
    folder = tiny.make_model(str(tmp_path / "model"), family, **sizes)
    config = tiny.role(folder, backend="megatron", layer_spec="auto", moe=MoEConfig(grouped_mm=True), megatron=fields)
    dims = ParallelDims(2, tp=2, etp=2, sp=True) if family == "deepseek_v3" else ParallelDims()
    refusals = [lambda: checked(config, MegatronChecks, dims)]
    if "sizes" in said:  # by a run, wherever it is; and by an engine that nobody has checked
        refusals += [lambda: MegatronChecks.check_here(config.model, config.engine, dims, model_of(config))]
        refusals += [lambda: build_engine(config).init_model()] * (dims.world_size == 1)
    for refusal in refusals:
        with pytest.raises(ConfigError) as error:
            refusal()
        assert str(error.value) == f"engine.moe.grouped_mm: value true {said}"


def test_fsdp_has_no_such_key(tmp_path):
    config = tiny.role(tiny.make_model(str(tmp_path / "model"), "qwen3_moe"), moe=MoEConfig(grouped_mm=True))
    with pytest.raises(ConfigError, match="engine.moe.grouped_mm: value true is not supported by backend fsdp"):
        checked(config, FSDPChecks)


def model_of(config: RoleConfig) -> dict[str, Any]:
    return json.loads(Path(config.model.path, "config.json").read_text())


def checked(config: RoleConfig, checks: type[EngineChecks], dims: ParallelDims | None = None) -> None:
    dims = ParallelDims() if dims is None else dims
    checks.check_config(config.model, config.engine)
    checks.check_model(
        config.engine, dims, model_of(config), Sequences(8, "data.max_length", packed=True, generated=False)
    )
    checks.check_anywhere(config.model, config.engine, dims, model_of(config))
