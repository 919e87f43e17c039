"""The commands as their users meet them: hub ids, options, sizes, progress, and what is said of a folder that cannot be read."""

from __future__ import annotations

import io
import json
import pathlib
import shutil

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.convert.importing import import_hf
from mrl.convert.workspace import ProgressLines
from mrl.engine import atomic_checkpoint
from tests.convert import hf_folders
from tests.convert.test_refused import config, invoke, run


def cached(cache: pathlib.Path, name: str, folder: pathlib.Path, but: str = "nothing") -> None:
    """A model in the hub's cache, with all files of `folder` but those whose name has `but`."""
    repository, commit = cache / f"models--org--{name}", "0" * 40
    shutil.copytree(folder, repository / "snapshots" / commit, ignore=shutil.ignore_patterns(f"*{but}*"))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)


def test_a_hub_id_in_the_cache_works_offline(hub_cache, hf, tmp_path):
    cached(hub_cache, "tiny", hf("llama", shard="30KB"))
    cached(hub_cache, "half", hf("llama", shard="30KB"), but="-00002-of")
    code, said = run("import", "org/tiny", tmp_path / "out")
    assert code == 0 and (tmp_path / "out/COMPLETE").is_file(), said
    assert run("verify", "org/tiny", tmp_path / "out", "--no-logits")[0] == 0
    code, said = run("import", "org/unknown", tmp_path / "other")
    assert code == 2 and said.count("\n") == 1, said
    assert said.startswith("mrl: HF: value 'org/unknown' is no folder here and cannot be read from the hub (")
    code, said = run("import", "org/half", tmp_path / "other")
    assert code == 2 and "org/half" in said and not (tmp_path / "other").exists(), said


def test_what_is_no_hub_id_is_not_looked_for(tmp_path):
    for name in (tmp_path / "nothing", "./a/b", "a/b/c"):
        code, said = run("import", name, tmp_path / "out")
        assert code == 2 and "does not exist; give a Hugging Face model folder or a hub id" in said
    (tmp_path / "model.gguf").touch()
    said = run("import", tmp_path / "model.gguf", tmp_path / "out")[1]
    assert "is a GGUF file; make a Hugging Face folder of it with transformers (docs/convert.md#gguf)" in said


def test_the_size_of_files(imported, hf, tmp_path):
    done = invoke("export", imported, tmp_path / "out", "--max-shard-size", "30KB")
    assert done.exit_code == 0, done.stderr
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 4
    assert hf_folders.differences(hf("llama", shard="30KB"), tmp_path / "out") == []
    assert invoke("export", imported, tmp_path / "one", "--max-shard-size", "1GB").exit_code == 0
    assert [file.name for file in (tmp_path / "one").glob("*.safetensors*")] == ["model.safetensors"]
    assert hf_folders.differences(tmp_path / "one", tmp_path / "out") == []
    code, said = run("export", imported, tmp_path / "other", "--max-shard-size", "5 bananas")
    assert code == 2 and said.startswith('mrl: --max-shard-size: value "5 bananas" is not a size; '), said
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("given", ["run", "run/checkpoints/latest"])
def test_a_result_is_compared_with_the_checkpoint_that_it_is_of(imported, tmp_path, monkeypatch, given):
    """A run that goes on saves a newer one in between."""
    checkpoints, newer = tmp_path / "run/checkpoints", tmp_path / "newer"
    shutil.copytree(imported, checkpoints / "step_00000001")
    (checkpoints / "latest").write_text("step_00000001\n")
    import_hf(hf_folders.make_hf(tmp_path / "other", "llama", shard="30KB", seed=5), newer)
    from mrl.convert import exporting

    real = exporting.export_hf

    def then_saves(*args, **kwargs):
        done = real(*args, **kwargs)
        newer.rename(checkpoints / "step_00000002")
        (checkpoints / "latest").write_text("step_00000002\n")
        return done

    monkeypatch.setattr(exporting, "export_hf", then_saves)
    done = invoke("export", tmp_path / given, tmp_path / "out", "--verify", "--no-logits")
    assert done.exit_code == 0 and done.stdout.endswith("the same\n"), done.output
    assert f"A  {checkpoints / 'step_00000001'} (" in done.stdout


def test_verify_at_once_without_logits(hf, tmp_path):
    source = hf("llama", shard="30KB")
    done = invoke("import", source, tmp_path / "mcore", "--verify", "--no-logits")
    assert done.exit_code == 0 and "logits   not compared: not asked for" in done.stdout
    assert done.stdout.endswith("the same\n")
    done = invoke("export", tmp_path / "mcore", tmp_path / "back", "--verify", "--no-logits")
    assert done.exit_code == 0 and done.stdout.endswith("the same\n")
    code, said = run("import", source, tmp_path / "out", "--no-logits")
    assert code == 2 and "--no-logits: has no effect without --verify" in said
    assert not (tmp_path / "out").exists()


def test_a_result_that_differs_loses_its_name_each_time(source, tmp_path, monkeypatch):
    """The source changes between the conversion and the comparison."""
    file = sorted(source.glob("*.safetensors"))[0]
    original = file.read_bytes()
    from mrl.convert import importing

    def then_changes(*args, **kwargs):
        done = import_hf(*args, **kwargs)
        held = load_file(file)
        next(iter(held.values())).view(torch.int32).view(-1)[0] ^= 1
        save_file(held, file, {"format": "pt"})
        return done

    monkeypatch.setattr(importing, "import_hf", then_changes)
    for different in ("out.different", "out.different2"):
        file.write_bytes(original)
        code, said = run("import", source, tmp_path / "out", "--verify", "--no-logits")
        assert code == 2 and f"it is now {tmp_path / different}, and not to be used" in said
        assert not (tmp_path / "out").exists() and (tmp_path / different / "COMPLETE").is_file()


def test_logits_that_do_not_fit_in_memory_are_left_out_in_words(hf, imported, monkeypatch):
    little = psutil.virtual_memory()._replace(available=50_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: little)
    done = invoke("verify", hf("llama", shard="30KB"), imported)
    assert done.exit_code == 0
    assert "logits   not compared: the model needs 95.6 kB of memory in fp32, and 50.0 kB are free" in done.stdout


def test_a_quantised_folder_is_refused_by_its_method(source, tmp_path):
    config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})(source)
    code, said = run("import", source, tmp_path / "out")
    assert code == 2 and said.count("\n") == 1, said
    assert "'quant_method': 'gptq'" in said and "the model that it was made from" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_export_refuses_a_flipped_bit_in_a_large_file(imported, hf, tmp_path, monkeypatch):
    """Large files are summed beside the reading: what was written of a damaged one is removed."""
    monkeypatch.setattr(atomic_checkpoint, "SMALL_BYTES", 1000)
    file = imported / "mcore/__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)
    code, said = run("export", imported, tmp_path / "out")
    assert code == 2 and said.count("\n") == 1 and "the content of mcore/__0_0.distcp has changed" in said, said
    code, said = run("verify", imported, hf("llama", shard="30KB"), "--no-logits")
    assert code == 2 and "the content of mcore/__0_0.distcp has changed" in said, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mcore"]


def test_export_refuses_another_models_config_by_the_fields_name(hf, tmp_path):
    """Fields that no shape tells of."""
    source, other = hf("deepseek_v3"), tmp_path / "other"
    import_hf(source, tmp_path / "mcore")
    shutil.copytree(source, other)
    config(routed_scaling_factor=2.25, rope_theta=5000.0, rope_parameters=None)(other)
    code, said = run("export", tmp_path / "mcore", tmp_path / "out", "--model", other)
    assert code == 2 and "routed_scaling_factor is " in said and " and 2.25 in config.json" in said
    assert " and 5000.0 in config.json" in said and not (tmp_path / "out").exists()


def test_progress_is_a_line_now_and_then(monkeypatch):
    monkeypatch.setattr("mrl.convert.workspace.EVERY_S", 0.0)
    stream = io.StringIO()
    told = ProgressLines("imported", stream)(4_000_000)
    told(1_000_000), told(3_000_000)
    lines = stream.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == ["imported 1.0 MB of 4.0 MB", "imported 4.0 MB of 4.0 MB"]


def test_the_name_of_the_newest_checkpoint_and_a_folder_inside_of_one(imported, tmp_path):
    checkpoints = tmp_path / "run/checkpoints"
    shutil.copytree(imported, checkpoints / "step_00000002")
    (checkpoints / "latest").write_text("step_00000002\n")
    assert invoke("export", checkpoints / "latest", tmp_path / "out").exit_code == 0
    shutil.copytree(imported, checkpoints / "step_00000001")
    (checkpoints / "best").write_text("step_00000001\n")
    done = invoke("verify", checkpoints / "latest", checkpoints / "best", "--no-logits")
    assert done.exit_code == 0 and "step_00000002" in done.output and "step_00000001" in done.output, done.output
    code, said = run("export", checkpoints / "step_00000002/mcore", tmp_path / "other")
    assert code == 2 and "holds no whole checkpoint" in said
    for other, says in (
        (tmp_path / "run", "no such file"),
        (imported, "is a checkpoint already; name it in model.path"),
    ):
        code, said = run("import", other, tmp_path / "other")
        assert code == 2 and says in said, said


def test_the_same_weights_under_another_config_are_not_the_same(hf, tmp_path):
    """No tensor tells, and logits may not be asked for."""
    source, other = hf("qwen3_moe"), tmp_path / "other"
    shutil.copytree(source, other)
    config(norm_topk_prob=False)(other)
    done = invoke("verify", source, other, "--no-logits")
    assert done.exit_code == 2 and done.stdout.endswith("DIFFERENT\n")
    assert f"norm_topk_prob is True in {source} and False in {other}" in done.stdout
    found = json.loads(invoke("verify", source, other, "--no-logits", "--json").stdout)
    assert not found["same"] and found["differences"] == [] and len(found["config"]) == 1
