"""Adapters on the Megatron engine: what trains, what is saved, what peft makes of it; gradients are in the parity table."""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from mrl.config.schema import LoraConfig
from mrl.errors import ModelError
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.engine.parity import LORAS, Outcome, Row, Table
from tests.engine.parity_rows import LORA_ROWS, NIGHTLY_LORA_ROWS
from tests.tiers import slow_but

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


@pytest.fixture(scope="module")
def table():
    return Table()


@pytest.mark.parametrize("row", slow_but(LORA_ROWS[::2], LORA_ROWS), ids=str)
def test_row(table: Table, row: Row):
    ((_, outcome),) = table.run([row])
    assert isinstance(outcome, Outcome), outcome
    assert not outcome.problems, f"{row}: " + "; ".join(outcome.problems)


@pytest.mark.nightly
@pytest.mark.parametrize("row", NIGHTLY_LORA_ROWS, ids=str)
def test_slow_row(table: Table, row: Row):
    test_row(table, row)


def test_the_rows_are_what_was_promised():
    rows = (*LORA_ROWS, *NIGHTLY_LORA_ROWS)
    assert len({str(row) for row in rows}) == len(rows)
    promised = {"dp1", "tp2", "tp2+sp", "pp2", "cp2", "dp2xep2", "tp2+spxdp2xep2", "tp2+spxdp2xep2xetp2", "pp2xvpp2"}
    assert promised <= {row.layout for row in rows}
    assert {row.packing for row in rows} == {True, False} and {row.recompute for row in rows} >= {"none", "full"}
    assert {row.lora for row in rows} == set(LORAS)


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


def run(layout, case, folder, *, lora=ALL, module="tests.engine.lora_cases", role=None, **kwargs):
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
def test_guards_know_that_b_starts_at_zero(model, layout, family):
    folder, adapter = model(family)
    run(layout, "guards_know_that_b_starts_at_zero", folder, adapter=adapter)


@pytest.mark.parametrize("layout", ["tp2+sp", "pp2"])
def test_first_steps_are_guarded(model, layout):
    run(layout, "first_steps_are_guarded", model()[0], module="tests.engine.lora")


@pytest.mark.parametrize(("layout", "head"), [("tp2+sp", "lm"), ("pp2", "value")])
def test_starts_as_the_base(model, layout, head):
    run(layout, "starts_as_the_base", model(head=head)[0], module="tests.engine.lora", role={"head": head})


@pytest.mark.parametrize(("layout", "head"), [("pp2", "lm"), ("tp2", "value")])
def test_exports_load(model, tmp_path, layout, head):
    """The adapter in peft, and the merged model in transformers."""
    role = {"head": head}
    run(layout, "export_loads_in_peft", model(head=head)[0], module="tests.engine.lora", role=role, path=str(tmp_path))


@pytest.mark.parametrize(("layout", "family"), [("dp1", "llama"), *FEW])
def test_agrees_with_peft(model, tmp_path, layout, family):
    folder, adapter = model(family)
    run(layout, "agrees_with_peft", folder, adapter=adapter, path=str(tmp_path / "hf"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "family"),
    [("dp1", "mixtral"), ("dp1", "deepseek_v3"), ("ep2", "qwen2_moe"), ("tp2 ep2 etp2", "mixtral")],
)
def test_agrees_with_peft_in_other_families(model, tmp_path, layout, family):
    test_agrees_with_peft(model, tmp_path, layout, family)


@pytest.mark.nightly
def test_agrees_with_peft_on_stacked_experts(model, tmp_path):
    """gpt-oss holds gate and up turn by turn, and matrices transposed."""
    lora = LoraConfig(**LORAS["stacks"])
    folder, adapter = model("gpt_oss", lora)
    run("ep2", "agrees_with_peft", folder, lora=lora, adapter=adapter, path=str(tmp_path / "hf"))


@pytest.mark.parametrize(
    ("layout", "family"), [nightly("tp2+sp", "llama"), nightly("pp2", "llama"), ("ep2", "qwen3_moe")]
)
def test_without_adapters_it_is_the_base_model(model, layout, family):
    folder, adapter = model(family)
    run(layout, "is_the_base_model_without_adapters", folder, adapter=adapter)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", nightly("deepseek_v3")])
def test_generation_uses_the_adapters(model, family):
    """The same tokens in every layout; deepseek_v3 goes through GPTModel, the others through the lean decoder."""
    folder, adapter = model(family)
    layouts = ("dp1", "tp2+sp", "pp2") + (() if family == "llama" else ("ep2",))
    tokens = [run(layout, "generates_with_adapters", folder, adapter=adapter) for layout in layouts]
    assert all(found == tokens[0] for found in tokens)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [nightly("tp2"), "tp2+sp", nightly("pp2")])
def test_dropout(model, tmp_path, layout):
    lora = dataclasses.replace(ALL, dropout=0.3)
    folder, adapter = model("llama", lora)
    run(layout, "dropout_of_adapters", folder, lora=lora, adapter=adapter)
    run(layout, "resume_is_bitwise", folder, lora=lora, module="tests.engine.contract", path=str(tmp_path / "r"))


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
    run(layout, "resume_is_bitwise", model(family)[0], lora=lora, module="tests.engine.lora", path=str(tmp_path))


def test_a_start_is_the_same_in_every_layout(model):
    folder = model("qwen3_moe")[0]
    starts = [run(layout, "start_of", folder) for layout in ("dp1", "tp2+sp", "pp2", "ep2")]
    assert all(start == starts[0] for start in starts) and len(starts[0]) == 2 * 2 * 7


@pytest.mark.parametrize(
    ("family", "saved_by", "read_by"),
    [("llama", "tp2+sp", ("pp2", "dp1", "dp2")), ("qwen3_moe", "ep2", ("tp2+sp", "pp2"))],
)
def test_another_layout_goes_on(model, tmp_path, family, saved_by, read_by):
    folder = model(family)[0]
    expected = run(saved_by, "save_adapters", folder, path=str(tmp_path))
    for layout in read_by:
        run(layout, "load_adapters", folder, path=str(tmp_path), expected=expected)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "saved_by", "read_by"),
    [
        ("llama", "tp4", ("tp2", "dp1")),
        ("llama", "pp2", ("tp4",)),
        ("qwen3_moe", "tp2 ep2 etp2", ("dp1", "ep2")),
        ("deepseek_v3", "tp2+sp", ("dp1",)),
    ],
)
def test_layouts_that_split_oddly_go_on(model, tmp_path, family, saved_by, read_by):
    """tp4 cuts each of two key heads in two; etp cuts gate and up of an expert's one adapter; a router's bias is saved by none."""
    test_another_layout_goes_on(model, tmp_path, family, saved_by, read_by)


def test_a_checkpoint_holds_adapters_alone(model, tmp_path):
    wide = {"hidden_size": 256, "intermediate_size": 512}
    folder = model(**wide)[0]
    size = run("tp2", "checkpoint_holds_adapters_alone", folder, path=str(tmp_path / "c"))
    weights = sum(t.numel() * 4 for t in load_file(f"{folder}/model.safetensors").values())
    assert size < weights / 2, "smaller than the weights alone, though it has masters and moments"


def test_wrong_checkpoints_are_refused(model, tmp_path):
    folder, other = model()[0], model(seed=1)[0]
    adapters, whole = str(tmp_path / "adapters"), str(tmp_path / "whole")
    run("pp2", "save_two_steps", folder, module="tests.engine.lora", path=adapters)
    run("pp2", "save_whole", folder, lora=None, module="tests.engine.lora", path=whole)
    refused = {
        "over the base model": (other, ALL, adapters),
        "model.lora.rank 4": (folder, dataclasses.replace(ALL, rank=8), adapters),
        "model.lora.target_modules 'all-linear'": (
            folder,
            dataclasses.replace(ALL, target_modules=("q_proj",)),
            adapters,
        ),
        "was saved with adapters": (folder, None, adapters),
        "was saved without adapters": (folder, ALL, whole),
    }
    for says, (model_folder, lora, path) in refused.items():
        message = run("tp2", "refusal", model_folder, lora=lora, module="tests.engine.lora", path=path)
        assert says in message and "\n" not in message, message


def test_an_adapter_of_another_selection_is_refused(model):
    folder = model()[0]
    _, other = model("llama", LoraConfig(rank=4, target_modules=("q_proj",)))
    with pytest.raises(AssertionError, match=f"{ModelError.__name__}.*give the adapter's own rank and targets"):
        run("dp1", "with_adapters", folder, adapter=other)


def test_a_norm_that_is_fused_with_the_linear_comes_before_the_adapter():
    """transformer-engine's linears hold the norm before them; their input is what goes into that."""
    from mrl.mcore_models.lora import _normed

    linear = torch.nn.Linear(6, 4)
    x = torch.randn(3, 6)
    assert _normed(linear, x) is x
    linear.layer_norm_weight, linear.eps = torch.nn.Parameter(torch.rand(6)), 1e-5
    torch.testing.assert_close(_normed(linear, x), F.rms_norm(x, (6,), linear.layer_norm_weight, 1e-5))
