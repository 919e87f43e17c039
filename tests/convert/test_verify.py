"""`mrl convert verify`: what it says of the same and of different models, in words, JSON and exit code."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.convert.importing import import_hf
from mrl.convert.verifying import LogitsRow
from tests.convert.test_refused import run
from tests.engine import tiny
from tests.engine.harness import run_case


def verify(*arguments):
    """(exit code, its JSON)."""
    from click.testing import CliRunner

    from mrl import cli

    done = CliRunner().invoke(cli.main, ["convert", "verify", *map(str, arguments), "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_an_import_computes_what_transformers_does(hf, tmp_path, family):
    """Megatron-core on the imported weights, against transformers on the folder, in fp32."""
    source = hf(family)
    import_hf(source, tmp_path / "mcore")
    code, found = verify(source, tmp_path / "mcore")
    assert code == 0 and found["same"] and found["differences"] == []
    assert [row["tokens"] for row in found["logits"]] == [
        24,
        24,
        24,
        24,
        128,
    ]  # all the positions that these models have
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
    code, found = verify(tmp_path / "nan", tmp_path / "nan")
    assert code == 2 and found["differences"] == [] and found["logits"][0]["kl"] is None, (
        "logits that are NaN are alike to none"
    )


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


def test_verify_of_a_result_that_differs_takes_its_name_away(hf, tmp_path, monkeypatch):
    import mrl.convert.importing as importing

    real = importing.row_blocks

    def wrong(rule, read):
        for block in real(rule, read):
            yield block + (rule.mcore == "decoder.final_layernorm.weight")

    monkeypatch.setattr(importing, "row_blocks", wrong)
    code, said = run("import", hf("llama"), tmp_path / "out", "--verify")
    assert code == 2 and "differs from" in said and "out.different" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("spread", "alike"), [(2.0, True), (0.6, True), (0.4, False), (0.0, False)])
def test_logits_are_alike_by_their_own_spread(spread, alike):
    """However small: logits of a model that hardly tells tokens apart have to agree more closely."""
    assert LogitsRow("text", 8, 5e-4, 1e-4, 1.0, 0.0, spread).alike is alike


def test_prompts_need_a_tokenizer(hf, tmp_path):
    code, said = run("verify", hf("llama"), hf("llama"), "--prompt", "hello")
    assert code == 2 and "--prompt" in said and "has a tokenizer" in said
