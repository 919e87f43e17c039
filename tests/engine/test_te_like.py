"""What mrl makes of the names of transformer-engine's modules, on CPUs (te_like.py): rules, adapters, checkpoints."""

import pytest

from mrl.config.schema import LoraConfig
from tests.engine import generation, tiny
from tests.engine.harness import Case, run_case, run_world
from tests.engine.lora import random_adapter
from tests.engine.parity import Outcome, Row, Table
from tests.tiers import in_tiers

ROWS = (
    Row("qwen3_moe", "dp2xep2", size=4, lora="all"),
    Row("gpt_oss", "tp2+spxdp2xep2", size=4, why="experts and their biases, each of which a rank has for itself"),
    Row("deepseek_v3", size=4, why="norms of latents have an epsilon of their own, in the linear after them"),
    Row("qwen3_moe", "tp2+spxdp2xep2", size=4, recompute="full", lora="stacks"),
    Row("qwen3_5", "tp2+sp", size=4, why="a norm in the linear before a gated delta net; gates behind queries"),
    Row("qwen3_moe", "cp2", size=4, why="each rank turns packed tokens by positions of its own"),
    Row("mixtral", "tp2+spxdp2xep2xetp2", size=4, lora="all", why="experts that two ranks share"),
    Row("glm4_moe", "pp2", size=2, why="a dense layer, shared experts"),
    Row("qwen3_5_moe", "tp2+spxdp2xep2", size=4, lora="all", why="adapters after norms whose factor is 1 + weight"),
    Row("gpt_oss", "dp2xep2", size=4, lora="stacks", why="experts whose gate and up take turns in the file"),
)


@pytest.mark.parametrize("row", in_tiers(ROWS[:1], [*ROWS[1:3], *ROWS[4:6]], ROWS), ids=str)
def test_row(table: Table, row: Row):
    given = {"row": row, "folder": table.model(row.model), "reference": table.reference(row)}
    case = Case("tests.engine.te_like:measure", given | {"adapter": table.adapter(row)})
    outcome = run_world(row.world_size, [case])[0].get()
    assert isinstance(outcome, Outcome)
    assert not outcome.problems, f"{row}: " + "; ".join(outcome.problems)


@pytest.mark.parametrize(
    "family, parallel",
    [
        ("qwen3_moe", {}),
        pytest.param("qwen3_5", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {}, marks=pytest.mark.nightly),
        pytest.param("qwen3", {"tp": 2}, marks=pytest.mark.nightly),
        pytest.param("glm4_moe", {}, marks=pytest.mark.nightly),
        pytest.param("qwen3_5_moe", {}, marks=pytest.mark.nightly),
    ],
)
def test_the_decoder_takes_its_modules(tmp_path, family, parallel):
    fields = {"mlp_only_layers": [1]} if family == "qwen3_moe" else {}
    folder = tiny.make_model(str(tmp_path / "model"), family, **fields)
    config = tiny.role(folder, backend="megatron", parallel=parallel, optimizer=None, layer_spec="te")
    expected = generation.hugging_face(folder, generation.sampled_requests())
    size = max(parallel.values(), default=1)
    run_case(size, "tests.engine.te_like:generates", config=config, expected=expected)


SAVED = [
    ("qwen3_moe", {"ep": 2}, None, ("te", "local")), ("qwen3_moe", {"ep": 2}, None, ("local", "te")),
    ("qwen3_moe", {"ep": 2}, LoraConfig(rank=4), ("te", "local")), ("deepseek_v3", {"tp": 2}, None, ("local", "te")),
    ("qwen3_5", {"tp": 2}, None, ("te", "local")), ("gpt_oss", {"pp": 2}, None, ("te", "local")),
]  # fmt: skip


@pytest.mark.parametrize("family, parallel, lora, specs", in_tiers(SAVED[:2], SAVED[2:5], SAVED), ids=str)
def test_a_checkpoint_of_one_spec_goes_on_under_the_other(tmp_path, family, parallel, lora, specs):
    fields = {"mlp_only_layers": [1]} if family == "qwen3_moe" else {}  # a dense layer, whose norms are in its linears
    folder = tiny.make_model(str(tmp_path / "model"), family, **fields)
    roles = [
        tiny.role(folder, backend="megatron", parallel=parallel, model={"lora": lora}, layer_spec=spec)
        for spec in specs
    ]
    adapter = None if lora is None else random_adapter(folder, lora)
    given = {"first": roles[0], "second": roles[1], "folder": str(tmp_path), "adapter": adapter}
    run_case(2, "tests.engine.te_like:goes_on_under_the_other", **given)
