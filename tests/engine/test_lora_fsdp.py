"""LoRA on the FSDP engine, at 1 and 2 ranks, against PEFT on plain Hugging Face (tests/engine/lora.py)."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from mrl.config.schema import LoraConfig
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.engine.parity import Row
from tests.tiers import in_tiers

ALL = LoraConfig(rank=4, alpha=6.0)


def run(world, case, folder, lora, *, module="lora", role=None, **kwargs):
    config = tiny.role(folder, model={"lora": lora}, **(role or {}))
    return run_case(world, f"tests.engine.{module}:{case}", config=config, **kwargs)


ROWS = [
    dataclasses.replace(row, backend="fsdp")
    for row in (
        Row("llama", tokens=64, lora="all"),
        Row("llama", "dp2", packing=False, size=2, lora="q v"),
        Row("llama", "dp2", tokens=64, recompute="full", lora="rslora"),
        Row("llama value head", "dp2", tokens=64, lora="all"),
        Row("qwen3_moe", "dp2", tokens=64, lora="all"),
        Row("qwen2_moe", "dp2", tokens=64, lora="stacks"),
        Row("deepseek_v3", "dp2", tokens=64, lora="all", why="a router whose bias is no parameter"),
        Row("gpt2", "dp2", tokens=64, lora="all", why="no table, and weights held [inputs, outputs]"),
        Row("llama tied", "dp2", tokens=64, lora="all"),
        Row("qwen3_5", tokens=64, lora="all"),
    )
]


@pytest.mark.parametrize("row", in_tiers(ROWS[::2], [ROWS[3], ROWS[5], ROWS[7]], ROWS), ids=str)
def test_equal_to_peft(table, row):
    table.check(row)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_starts_as_the_base(folder, dtype):
    run(2, "starts_as_the_base", folder(), ALL, role={"dtype": dtype})


def test_experts_start_as_the_base(folder):
    run(2, "starts_as_the_base", folder("qwen3_moe"), ALL)


def test_first_steps_are_guarded(folder):
    run(2, "first_steps_are_guarded", folder(), ALL)
    run(2, "an_a_that_has_no_excuse_is_found", folder(), ALL)


def test_only_adapters_are_held(folder, tmp_path):
    """Moments and checkpoint do not know of the base, which is held in bfloat16, without masters."""
    wide = folder(hidden_size=256, intermediate_size=512)
    lora = LoraConfig(rank=4, target_modules=("q_proj", "v_proj", "o_proj"))
    found = run(1, "only_adapters_are_held", wide, lora, path=str(tmp_path), role={"dtype": "bfloat16"})
    assert found["dtypes"] == {"torch.bfloat16"}
    assert found["base"] > 80 * found["adapter"]
    assert found["moments"] == 2 * found["adapter"]
    assert found["saved"] == 3 * found["adapter"]
    assert found["bytes"] < 2 * found["base"] / 5, "a fifth of the base alone, most of it names and random generators"


@pytest.mark.parametrize("world", [1, 2])
def test_resume_is_bitwise(folder, tmp_path, world):
    lora = dataclasses.replace(ALL, dropout=0.2)
    offload = ("parameters", "gradients", "optimizer")
    role = {"dtype": "bfloat16", "offload": offload, "recompute": "full"} if world == 2 else {}
    run(world, "resume_is_bitwise", folder(), lora, module="contract", path=str(tmp_path), role=role)


@pytest.mark.parametrize(
    ("saved_by", "read_by"), [pytest.param(1, 2, marks=pytest.mark.nightly), pytest.param(2, 1, marks=pytest.mark.slow)]
)
def test_another_world_size_goes_on(folder, tmp_path, saved_by, read_by):
    saved = run(saved_by, "save_two_steps", folder(), ALL, path=str(tmp_path))
    histories = [
        run(world, "goes_on", folder(), ALL, path=str(tmp_path), expected=saved) for world in (read_by, saved_by)
    ]
    for (loss, norm, *_), (expected_loss, expected_norm, *_) in zip(*histories, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-6) and norm == pytest.approx(expected_norm, rel=1e-5)


def test_another_base_or_selection_is_refused(folder, tmp_path):
    run(1, "save_two_steps", folder(), ALL, path=str(tmp_path))
    other = folder(seed=3)  # of the same architecture
    refused = [
        (other, ALL, "over the base model"),
        (folder("qwen2"), ALL, "model_type"),
        (folder(), dataclasses.replace(ALL, alpha=7.0), "model.lora.alpha"),
        (folder(), dataclasses.replace(ALL, rank=5), "model.lora.rank"),
        (folder(), dataclasses.replace(ALL, target_modules=("q_proj",)), "model.lora.target_modules 'all-linear'"),
        (folder(), None, "was saved with adapters"),
    ]
    for model, lora, says in refused:
        run(1, "refuses_checkpoint", model, lora, module="contract", path=str(tmp_path), message=says)
    whole = str(tmp_path / "whole")
    run(1, "save_whole", folder(), None, path=whole)
    run(1, "refuses_checkpoint", folder(), ALL, module="contract", path=whole, message="was saved without adapters")


EXPORTED = [
    ("llama", "lm"), ("llama", "value"), ("qwen3_moe", "lm"), ("qwen2_moe", "lm"), ("deepseek_v3", "lm"), ("gpt2", "lm"),
]  # fmt: skip


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize(("family", "head"), in_tiers(EXPORTED[:3], EXPORTED[5:], EXPORTED))
def test_export(folder, tmp_path, world, family, head):
    run(world, "export_loads_in_peft", folder(family, head=head), ALL, path=str(tmp_path), role={"head": head})
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == folder(family, head=head) and about["r"] == 4


def test_generates_with_adapters(folder):
    run(2, "generates_with_adapters", folder(), ALL)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_an_adapter_of_another_scale_or_selection_is_refused(folder, tmp_path, backend):
    """The tensors of another scale have the shapes of ours."""
    changes = {
        "the scale 1.75 and this config's model.lora 1.5 (14 adapters differ)": {"lora_alpha": 7.0},
        "the scale 3.0 and this config's model.lora 1.5 (14 adapters differ)": {"use_rslora": True},
        "model.layers.1.self_attn.q_proj the scale 2.0 and": {"alpha_pattern": {r"layers\.1\..*q_proj": 8.0}},
    }
    right, wrong = tiny.make_adapter(str(tmp_path / "right"), folder(), ALL), {}
    for n, (says, fields) in enumerate(changes.items()):
        path = tmp_path / str(n)
        shutil.copytree(right, path)
        about = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps(about | fields))
        wrong[says] = str(path)
    other = LoraConfig(rank=4, target_modules=("q_proj",))
    wrong["give the adapter's own rank and targets"] = tiny.make_adapter(str(tmp_path / "other"), folder(), other)
    run(1, "only_its_own_scale_is_loaded", folder(), ALL, role={"backend": backend}, right=right, wrong=wrong)


def test_dropout(folder):
    run(1, "dropout_trains_and_evaluates_without", folder(), dataclasses.replace(ALL, dropout=0.3))
