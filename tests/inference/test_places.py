"""What MODEL may be: the same weights wherever they are, and what is said of a folder that holds none."""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl.config.schema import LoraConfig
from mrl.convert import sources
from mrl.convert.exporting import export_hf
from mrl.convert.importing import import_hf
from mrl.convert.sources import open_any
from mrl.errors import CheckpointError, UserError
from mrl.inference.places import find_model, renew
from tests.convert.test_quantised import make
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.inference.cases import greedy, mrl
from tests.resume.test_refused import flip, shard
from tests.trainers import tiny_runs
from tests.trainers.rl import tiny_policies

ASK = ("--prompt", "12+30=", "--greedy", "--max-new-tokens", "8")


def says(model: object, *keys: str, world: int = 1) -> tuple[str, str]:
    """(what it says, what the line on stderr says was taken)."""
    done = mrl("generate", model, *ASK, *keys, world=world)
    assert done.code == 0, done.err
    return done.out, done.err


def of_transformers(model) -> str:
    """As `says`, of a transformers model with the tokenizer of arithmetic."""
    tokenizer = tiny_runs.load_example("arithmetic/make_data.py").make_tokenizer()
    asked = [{"role": "user", "content": "12+30="}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    return tokenizer.decode(greedy(model, ids, 8, tokenizer.eos_token_id), skip_special_tokens=True) + "\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> pathlib.Path:
    """A run of `mrl sft` on megatron that has a checkpoint after each of two steps, and its export. It began from
    scratch: the folder that its config names has no weights."""
    inputs, out = tmp_path_factory.mktemp("inputs"), tmp_path_factory.mktemp("runs") / "demo"
    tiny_runs.make_inputs(inputs)
    (inputs / "model" / "model.safetensors").unlink()
    config = tiny_runs.make_config(
        inputs, out, model={"init": "random"}, engine={"backend": "megatron"}, train={"steps": 2}, optimizer={"lr": 0.05, "warmup_steps": 0},
        checkpoint={"every": 1, "keep": None}, log={"console": "none"},
    )  # fmt: skip
    ended = run_case(1, "tests.trainers.cases:train", config=config)
    assert ended[0] == "done", ended
    return out


def test_a_run_answers_with_its_export_or_its_newest_checkpoint(run, tmp_path):
    expected = of_transformers(AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32))
    text, note = says(run)
    assert text == expected and f"{run}: the run's export {run}/hf (Hugging Face folder), float32 on 1 process" in note
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("hf"))
    text, note = says(tmp_path / "run")
    assert text == expected and "megatron checkpoint of step 2" in note


@pytest.mark.slow
def test_a_checkpoint_answers_on_another_layout(run):
    """Two steps apart there are other weights; the names of the newest one mean the same."""
    last = says(run / "checkpoints" / "step_00000002", "engine.parallel.tp=2", world=2)[0]
    assert last == says(run)[0] == says(run / "checkpoints" / "latest")[0] == says(run / "checkpoints")[0]
    first = find_model(str(run / "checkpoints" / "step_00000001"))
    assert first.dtype == "float32" and first.source is not None and first.limit == 128


def test_an_earlier_checkpoint_has_other_weights(run, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(tiny_runs.chat([12, 30])) + "\n")
    scores = []
    for place in ("checkpoints/step_00000001", "checkpoints/step_00000002", "hf"):
        out = tmp_path / "scores.jsonl"
        assert mrl("generate", run / place, "--prompts", tmp_path / "rows.jsonl", "--score", "--out", out).code == 0
        scores.append(json.loads(out.read_text())["sum"])
    assert scores[0] != pytest.approx(scores[1], abs=1e-3) and scores[1] == pytest.approx(scores[2], abs=1e-4)


def test_a_damaged_checkpoint_answers_nothing(run, tmp_path):
    folder = shutil.copytree(run / "checkpoints" / "step_00000002", tmp_path / "step_00000002")
    shutil.copy(run / "config.yaml", tmp_path.parent / "config.yaml")
    flip(shard(folder))
    done = mrl("generate", folder, *ASK)
    assert (done.code, done.out) == (2, "") and "has changed; use another checkpoint" in done.err, done


def test_a_run_that_removes_its_checkpoint_meanwhile(run, tmp_path, monkeypatch):
    """As `checkpoint.keep` does while it trains: what is not yet read is the newest then, what is read is one line."""
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("hf"))
    steps = [tmp_path / "run" / "checkpoints" / f"step_0000000{step}" for step in (1, 2, 3)]
    shutil.copytree(steps[0], steps[2])  # the newest by its name alone: a copy has the serial number of step 1
    place = find_model(str(tmp_path / "run"))
    assert place.source == str(steps[1]) and renew(place) is place
    resolve = sources.checkpoint_folder

    def resolve_and_remove(path):
        folder = resolve(path)
        shutil.rmtree(steps[1], ignore_errors=True)
        return folder

    with monkeypatch.context() as patched:
        patched.setattr(sources, "checkpoint_folder", resolve_and_remove)
        found = renew(find_model(str(tmp_path / "run")))
    assert found.source == renew(place).source == str(steps[2]) and "step 1" in found.what
    removed = pytest.raises(CheckpointError, match="step_00000003: was removed while it was read: .*checkpoint.keep")
    with removed, open_any(tmp_path / "run") as source:
        shutil.rmtree(source.place)
        raise FileNotFoundError("a file of it")


def test_a_newest_checkpoint_that_is_damaged_is_named(run, tmp_path):
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("hf"))
    newest = tmp_path / "run" / "checkpoints" / "step_00000002"
    os.truncate(shard(newest), 100)
    done = mrl("generate", tmp_path / "run", *ASK)
    assert done.code == 0 and f"passed over {newest}: damaged: " in done.err and "step 1" in done.err


def test_an_imported_folder(run, tmp_path):
    import_hf(run / "hf", tmp_path / "mcore")
    text, note = says(tmp_path / "mcore")
    assert text == says(run)[0] and "imported checkpoint, float32" in note


def test_an_adapter_answers_over_its_base(run, tmp_path):
    lora = LoraConfig(rank=4, alpha=64.0)
    adapter = tiny.make_adapter(str(tmp_path / "adapter"), str(run / "hf"), lora, seed=3)
    base = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    expected = of_transformers(PeftModel.from_pretrained(base, adapter))
    text, note = says(adapter)
    assert text == expected != says(run)[0] and f"adapters over {run}/hf" in note
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(adapter)
    assert says(adapter)[0] != text, "its own chat template, where it has one"


def test_folders_without_a_model(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "started" / "checkpoints").mkdir(parents=True)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    cases = {
        "empty": "MODEL: value '{}' holds no model; give a Hugging Face folder or hub id, a checkpoint, an adapter folder, or",
        "none": "MODEL: value '{}' does not exist",
        "model.gguf": "MODEL: value '{}' is a file; make a Hugging Face folder of it with transformers",
        "started": "holds no whole checkpoint",
        "bare": "MODEL: value '{}' has a config.json and no *.safetensors weights; save the model",
    }
    for name, says_ in cases.items():
        with pytest.raises(UserError) as caught:
            find_model(str(tmp_path / name))
        assert says_.format(tmp_path / name) in str(caught.value), str(caught.value)
    with pytest.raises(UserError, match="MODEL: value 'a/b/c' does not exist"):
        find_model("a/b/c")


def test_a_value_head_makes_no_text(tmp_path):
    tiny_policies.make_inputs(tmp_path)
    done = mrl("generate", tmp_path / "scorer", *ASK)
    assert done.code == 2 and "lm_head.weight" in done.err, done.err


def test_names_of_the_positions_and_dtypes(tmp_path):
    folder = pathlib.Path(tiny.make_model(str(tmp_path / "m"), "gpt2", n_positions=64, max_position_embeddings=64))
    assert find_model(str(folder)).limit == 64 and find_model(str(folder)).dtype == "float32"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert find_model(str(folder)).dtype == "float32", "what the weights are, whatever config.json says of them"
    longrope = {"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(config | longrope))
    assert find_model(str(folder)).limit == 32, "beyond, keys would be of another length than the sequence's"
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
    (folder / "config.json").write_text(json.dumps(config | yarn))
    assert find_model(str(folder)).limit == 256, "many models leave max_position_embeddings as it was"
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    (folder / "model.safetensors").rename(folder / "of_another_layout.safetensors")
    assert find_model(str(folder)).dtype == "bfloat16"


def test_an_adapter_over_a_folder_of_text_and_more(tmp_path):
    """The folder's names have a prefix that the table's lack, and it holds a layer's experts in one tensor."""
    tokenizer = tiny_runs.load_example("arithmetic/make_data.py").make_tokenizer()
    folder = make(tmp_path / "whole", "qwen3_5_moe", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    adapter = tiny.make_adapter(str(tmp_path / "adapter"), str(folder), LoraConfig(rank=4, alpha=64.0), seed=3)
    for file in pathlib.Path(adapter).glob(
        "tokenizer*"
    ):  # transformers picks another class for it beside a config.json
        file.unlink()
    export_hf(adapter, tmp_path / "merged")
    text, note = says(adapter)
    assert text == says(tmp_path / "merged")[0] != says(folder)[0] and f"adapters over {folder}" in note
    refused = mrl("generate", adapter, *ASK, "engine.backend=fsdp")
    assert (
        refused.code == 2
        and 'engine.backend: value "fsdp" reads a \'' in refused.err
        and "`mrl convert export`" in refused.err
    )
