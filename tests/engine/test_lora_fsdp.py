"""LoRA on the FSDP engine, at 1 and 2 ranks, against PEFT on plain Hugging Face (tests/engine/lora.py)."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from mrl.config.schema import LoraConfig
from tests.engine import lora as cases
from tests.engine import tiny
from tests.engine.harness import run_case

ATTENTION = LoraConfig(rank=4, alpha=6.0, target_modules=("q_proj", "v_proj", "o_proj"))
ALL = LoraConfig(rank=4, alpha=6.0)
STABLE = LoraConfig(rank=4, target_modules=r".*\.(k_proj|down_proj)", exclude_modules=("1.mlp.down_proj",), rslora=True)
EXPERTS = LoraConfig(rank=2, target_modules=("q_proj", "experts.gate_up_proj", "experts.down_proj"))


def run(world, case, folder, lora, timeout_s=180.0, role=None, **kwargs):
    config = tiny.role(folder, model={"lora": lora}, **(role or {}))
    return run_case(world, f"tests.engine.lora:{case}", config=config, timeout_s=timeout_s, **kwargs)


PARITY = [
    ("llama", "lm", ALL, {"packing": True}),
    ("llama", "lm", ATTENTION, {"packing": False, "size": 2}),
    ("llama", "lm", STABLE, {"recompute": "full"}),
    ("llama", "value", ALL, {}),
    ("qwen3_moe", "lm", ALL, {}),
    ("qwen2_moe", "lm", EXPERTS, {}),
    ("deepseek_v3", "lm", ALL, {}),  # a router whose bias is no parameter
    ("gpt2", "lm", ALL, {}),  # no table, and weights held [inputs, outputs]
]


@pytest.mark.parametrize(
    ("world", "family", "head", "lora", "role"),
    [
        pytest.param(world, *row, marks=[pytest.mark.nightly] * (world == 1 and i > 0) + [pytest.mark.slow] * (i % 2))
        for world in (1, 2)
        for i, row in enumerate(PARITY)
    ],
)
def test_equal_to_peft(folder, tmp_path, world, family, head, lora, role):
    model, batch = folder(family, head=head), tiny.uneven_batch()
    expected = cases.reference(model, lora, batch, str(tmp_path), head)
    run(world, "equals_peft", model, lora, role=role | {"head": head}, expected=expected, batch=batch)


def test_tied_embeddings(folder, tmp_path):
    model, batch = folder(tied=True), tiny.uneven_batch()
    expected = cases.reference(model, ALL, batch, str(tmp_path))
    run(2, "equals_peft", model, ALL, expected=expected, batch=batch)


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
    found = run(1, "only_adapters_are_held", wide, ATTENTION, path=str(tmp_path), role={"dtype": "bfloat16"})
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
    run(world, "resume_is_bitwise", folder(), lora, path=str(tmp_path), role=role)


@pytest.mark.parametrize(("saved_by", "read_by"), [(1, 2), (2, 1)])
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
    refused = {
        "another base": (other, ALL, "over the base model"),
        "another architecture": (folder("qwen2"), ALL, "model_type"),
        "another alpha": (folder(), dataclasses.replace(ALL, alpha=7.0), "model.lora.alpha"),
        "another rank": (folder(), dataclasses.replace(ALL, rank=5), "model.lora.rank"),
        "no adapters": (folder(), None, "model.lora"),
    }
    for what, (model, lora, says) in refused.items():
        message = run(1, "refusal", model, lora, path=str(tmp_path))
        assert says in message and "\n" not in message, (what, message)
    whole = tmp_path / "whole"
    run(1, "save_whole", folder(), None, path=str(whole))
    assert "model.lora" in run(1, "refusal", folder(), ALL, path=str(whole))


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize(("family", "head"), [("llama", "lm"), ("llama", "value"), ("qwen3_moe", "lm")])
def test_export(folder, tmp_path, world, family, head):
    run(world, "export_loads_in_peft", folder(family, head=head), ALL, path=str(tmp_path), role={"head": head})
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == folder(family, head=head) and about["r"] == 4


def test_generates_with_adapters(folder):
    run(2, "generates_with_adapters", folder(), ALL)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_an_adapter_of_another_scale_is_refused(folder, tmp_path, backend):
    """Its tensors have the shapes of ours."""
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
    run(1, "only_its_own_scale_is_loaded", folder(), ALL, role={"backend": backend}, right=right, wrong=wrong)


def test_dropout(folder):
    run(1, "dropout_trains_and_evaluates_without", folder(), dataclasses.replace(ALL, dropout=0.3))
