"""`mrl convert verify`: what it says of the same and of different models, in words, JSON and exit code."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from mrl import cli
from mrl.convert.importing import import_hf
from mrl.convert.verifying import LogitsRow
from mrl.errors import UserError
from tests.convert.test_refused import invoke, run
from tests.data import tiny_tokenizers
from tests.engine.harness import run_case


def verify(*arguments):
    """(exit code, its JSON)."""
    done = invoke("verify", *arguments, "--json")
    return done.exit_code, json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_an_import_computes_what_transformers_does(hf, tmp_path, family):
    """Megatron-core on the imported weights, against transformers on the folder, in fp32. All families: test_round_trip.py."""
    source = hf(family)
    import_hf(source, tmp_path / "mcore")
    code, found = verify(source, tmp_path / "mcore")
    assert code == 0 and found["same"] and found["differences"] == []
    assert [row["tokens"] for row in found["logits"]] == [24] * 4 + [128]  # all the positions that these models have
    for row in found["logits"]:
        assert row["max_difference"] < 5e-6 and row["top1_agreement"] == 1.0 and abs(row["kl"]) < 1e-9, row


def test_a_single_bit_is_found(hf, tmp_path):
    source = tmp_path / "other"
    shutil.copytree(hf("qwen2"), source)
    import_hf(hf("qwen2"), tmp_path / "mcore")
    file = next(f for f in sorted(source.glob("*.safetensors")) if "model.layers.1.mlp.up_proj.weight" in load_file(f))
    held = load_file(file)
    held["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[3, 4] ^= 1
    save_file(held, file, {"format": "pt"})
    code, found = verify(source, tmp_path / "mcore", "--no-logits")
    assert code == 2 and not found["same"] and found["no_logits"] == "not asked for"
    assert len(found["differences"]) == 1
    assert found["differences"][0].startswith("model.layers.1.mlp.up_proj.weight: 1 entries differ, by up to ")


def test_signs_of_zero_and_nan_count(hf, tmp_path):
    """Bits, not values: -0 is not 0, and a NaN is itself."""
    for name, value in (("a", 0.0), ("b", -0.0), ("nan", float("nan"))):
        shutil.copytree(hf("llama", shard="1GB"), tmp_path / name)
        held = load_file(tmp_path / name / "model.safetensors")
        held["model.norm.weight"][0] = value
        save_file(held, tmp_path / name / "model.safetensors", {"format": "pt"})
    assert verify(tmp_path / "a", tmp_path / "a", "--no-logits")[0] == 0
    assert verify(tmp_path / "nan", tmp_path / "nan", "--no-logits")[0] == 0
    assert verify(tmp_path / "a", tmp_path / "b", "--no-logits")[0] == 2
    code, found = verify(tmp_path / "a", tmp_path / "nan")
    assert code == 2 and not any(row["max_difference"] == 0 for row in found["logits"])


INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"


def test_buffers_that_follow_from_the_config_are_no_difference(hf, tmp_path):
    """Old folders have them, imports and exports have not."""
    source = tmp_path / "hf"
    shutil.copytree(hf("llama", shard="1GB"), source)
    held = load_file(source / "model.safetensors")
    save_file(held | {INV_FREQ: torch.ones(4)}, source / "model.safetensors", {"format": "pt"})
    code, said = run("import", source, tmp_path / "mcore", "--verify", "--no-logits")
    assert code == 0 and sorted(os.listdir(tmp_path)) == ["hf", "mcore"], said
    code, found = verify(source, hf("llama", shard="1GB"), "--no-logits")
    assert code == 0 and found["tensors"] == len(held)


def test_another_dtype_is_a_difference(hf, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(hf("llama", shard="1GB"), source)
    held, name = load_file(source / "model.safetensors"), "model.layers.1.self_attn.k_proj.weight"
    save_file(held | {name: held[name].bfloat16()}, source / "model.safetensors", {"format": "pt"})
    code, found = verify(hf("llama", shard="1GB"), source, "--no-logits")
    assert code == 2 and found["differences"] == [f"{name}: F32 [16, 32] and BF16 [16, 32]"]


def test_experts_of_an_odd_width(hf, tmp_path):
    """torch's grouped matrices want rows of 16 bytes; logits do not."""
    source = hf("qwen3_moe", moe_intermediate_size=23, shard="1GB")
    code, said = run("import", source, tmp_path / "mcore", "--verify")
    assert code == 0 and os.listdir(tmp_path) == ["mcore"], said


@pytest.mark.parametrize("error", [UserError("too large"), RuntimeError("a fault of ours")], ids=["refused", "fault"])
def test_a_result_that_could_not_be_compared_loses_its_name(hf, tmp_path, monkeypatch, error):
    import mrl.convert.verifying as verifying

    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(verifying, "compare", fails)
    done = CliRunner().invoke(cli.main, ["convert", "import", str(hf("llama")), str(tmp_path / "out"), "--verify"])
    assert os.listdir(tmp_path) == ["out.unverified"] and f"is now {tmp_path / 'out.unverified'}" in done.stderr
    assert (done.exit_code == 2) == isinstance(error, UserError) and done.stderr.count("mrl: ") == 1
    assert isinstance(error, UserError) or done.exception is error


def test_models_of_the_same_weights_that_compute_otherwise_are_different(hf, tmp_path):
    """A config that changes the maths changes no tensor."""
    shutil.copytree(hf("llama"), tmp_path / "other")
    config = json.loads((tmp_path / "other/config.json").read_text())
    config["rms_norm_eps"] = 0.5
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    code, found = verify(hf("llama"), tmp_path / "other")
    assert code == 2 and found["differences"] == [] and not found["same"]
    assert all(row["max_difference"] > 1e-2 for row in found["logits"])


def test_checkpoints_of_both_engines_and_a_folder(hf, tmp_path):
    source = hf("qwen3_moe")
    layouts = {"megatron": {}, "fsdp": {"backend": "fsdp"}}
    run_case(1, "tests.convert.cases:save_checkpoints", hf=str(source), out=str(tmp_path), layouts=layouts)
    for a, b in (("megatron", "fsdp"), ("fsdp", source), (source, "megatron")):
        code, found = verify(tmp_path / a, tmp_path / b, "--model", source)
        assert code == 0 and found["same"], found


@pytest.mark.parametrize(("spread", "alike"), [(2.0, True), (0.6, True), (0.4, False), (0.0, False)])
def test_logits_are_alike_by_their_own_spread(spread, alike):
    """However small: logits of a model that hardly tells tokens apart have to agree more closely."""
    assert LogitsRow("text", 8, 5e-4, 1e-4, 1.0, 0.0, spread).alike is alike


def test_prompts_need_a_tokenizer(hf, tmp_path):
    code, said = run("verify", hf("llama"), hf("llama"), "--prompt", "hello")
    assert code == 2 and "--prompt" in said and "has a tokenizer" in said


def test_a_prompt_without_tokens_of_the_model_is_one_line(hf, tmp_path):
    shutil.copytree(hf("llama"), tmp_path / "hf")
    made = tiny_tokenizers.make_tokenizer()
    made.add_tokens([f"<{n}>" for n in range(1000)])
    made.save_pretrained(tmp_path / "hf")
    for prompt in ("", "<999>"):
        code, said = run("verify", tmp_path / "hf", tmp_path / "hf", "--prompt", prompt)
        assert code == 2 and said.count("\n") == 1 and f"no tokens of {prompt!r}, or some that are not" in said, said
