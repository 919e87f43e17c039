"""What a run has to do with what is around it: how long its data makes it, the template it exports, the remote it copies to."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from tests.convert.test_quantised import make
from tests.engine.harness import run_case
from tests.engine.test_fsdp_composite import tensors_of
from tests.inference.cases import mrl
from tests.tiers import in_tiers
from tests.trainers import tiny_runs
from tests.trainers.rl import tiny_policies
from tests.trainers.test_sft import CASE, train


def test_the_export_has_the_chat_template_that_was_trained_with(inputs, tmp_path):
    """Whatever template the source has: in tokenizer_config.json, in its file, or several by name."""
    model, template = tmp_path / "model", tmp_path / "mine.jinja"
    shutil.copytree(inputs / "model", model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "theirs {{ messages }}"}))
    (model / "additional_chat_templates").mkdir(exist_ok=True)
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("theirs with tools {{ messages }}")
    source = AutoTokenizer.from_pretrained(inputs / "model").chat_template
    template.write_text("{# mine \u00e9 #}" + source)
    before = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    config = tiny_runs.make_config(
        inputs, tmp_path / "run", model={"path": str(model)}, data={"chat_template": str(template)},
        train={"steps": 1}, optimizer={"warmup_steps": 0},
    )  # fmt: skip
    assert train(config) == ("done", "")
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "hf").chat_template == template.read_text()
    assert not (tmp_path / "run" / ".tmp-hf").exists()
    assert {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()} == before


def test_an_epoch_is_a_pass_over_the_rows_that_can_be_used(inputs, tmp_path):
    """Half of the rows are too long: five of the ten in batches of two are three steps, also for the one that goes on."""
    lines = (inputs / "train.jsonl").read_text().splitlines()
    lines[1::2] = [json.dumps(tiny_runs.chat([1] * 40))] * 5
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    data = {"train": str(tmp_path / "rows.jsonl"), "truncation": "drop"}
    config = tiny_runs.make_config(
        inputs, tmp_path / "run", data=data, train={"steps": None, "epochs": 1, "global_batch_size": 2}
    )
    kind, _, _ = run_case(2, CASE, config=config, happening="signals", step=2)
    assert kind == "stopped"
    kind, message, said = run_case(2, CASE, config=config)
    assert (kind, message) == ("done", "")
    assert "5 rows can be used, which makes the 3 steps of 1 epoch" in said
    assert [row["step"] for row in tiny_runs.steps(tmp_path / "run")] == [1, 2, 3]
    met = int(said.split("data.train: rows dropped: ")[1].split()[0])
    assert met <= 2 * 5, "rows of the counting pass are counted once more"


def test_a_schedule_longer_than_the_epochs_is_refused_before_anything_is_written(inputs, tmp_path):
    epochs = {"steps": None, "epochs": 1}
    config = tiny_runs.make_config(inputs, tmp_path / "run", train=epochs, optimizer={"warmup_steps": 4})
    kind, message = train(config)
    assert kind == "ConfigError" and message.startswith("optimizer.warmup_steps: value 4 is above ")
    assert "the 3 steps of 1 epoch" in message and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("world", "failures"), [(1, 2), (2, 99)])
def test_a_remote_that_fails_for_a_while_is_tried_again_and_one_that_is_gone_is_named(
    inputs, tmp_path, world, failures
):
    """The local checkpoint is whole, and the same command makes the copy and goes on."""
    config = tiny_runs.make_config(
        inputs, tmp_path / "run", checkpoint={"every": 3, "remote": f"file://{tmp_path}/remote"}
    )
    kind, message = train(config, world, happening="remote_fails", times=failures)
    if failures == 99:
        saved = tmp_path / "run" / "checkpoints" / "step_00000003"
        says = f"checkpoint.remote: {saved} cannot be copied to file://"
        assert kind == "CheckpointError" and message.startswith(says)
        assert "no route" in message and f"{saved} is whole" in message
        assert not (tmp_path / "remote" / "latest").exists()
        kind, message = train(config, world)
    assert (kind, message) == ("done", "")
    assert (tmp_path / "remote" / "latest").read_text() == "step_00000008\n"
    assert [row["step"] for row in tiny_runs.steps(tmp_path / "run")] == list(range(1, 9))


@pytest.mark.parametrize("command", ["sft", "dpo", "rl"])
def test_a_teacher_or_reference_of_another_vocabulary_is_refused_by_the_token_that_differs(tmp_path, command):
    """Its log-probs would be those of another text."""
    tiny_policies.make_inputs(tmp_path)
    file = shutil.copytree(tmp_path / "other", tmp_path / "seven") / "tokenizer.json"
    file.write_text(file.read_text().replace('"7": ', '"seven": '))
    key = "teacher" if command == "sft" else "reference"
    make, case = (
        (tiny_runs, f"{'' if command == 'sft' else 'dpo_'}cases") if command != "rl" else (tiny_policies, "rl.cases")
    )
    sections = {key: {"model": {"path": str(tmp_path / "seven")}}} | (
        {"loss": {"name": "dpo"}} if command == "dpo" else {}
    )
    kind, said, _ = run_case(
        1, f"tests.trainers.{case}:train", config=make.make_config(tmp_path, tmp_path / "run", **sections)
    )
    assert kind == "ConfigError" and f"{key}.model.path: value" in said and "\n" not in said
    of = "actor.model.path" if command == "rl" else "model.path"
    assert f"has another vocabulary than {of}: 2 tokens differ" in said
    assert said.endswith(f"give a {key} with the same tokenizer")


@pytest.mark.parametrize(
    ("kind", "backend", "lora"),
    in_tiers(
        [], [("qwen3_5", "megatron", None)],
        [
            ("qwen3_5_moe", "fsdp", None), ("qwen3_5", "megatron", None),
            ("qwen3_5", "fsdp", {"rank": 2, "export": "merged"}),
        ],
    ),
)  # fmt: skip
def test_a_folder_of_text_and_more_trains_and_its_checkpoint_is_the_export(inputs, tmp_path, kind, backend, lora):
    """Its config.json is read from the file by each of them, and its text part is made of it once."""
    model, run, file = tmp_path / "model", tmp_path / "run", tmp_path / "run.yaml"
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    make(model, kind, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(model)
    config = tiny_runs.make_config(
        inputs, run, model={"path": str(model), "lora": lora}, engine={"backend": backend}, train={"steps": 1},
        optimizer={"warmup_steps": 0},
    )  # fmt: skip
    assert train(config) == ("done", "")
    mrl("convert", "export", run / "checkpoints", tmp_path / "again")
    trained, again = tensors_of(run / "hf"), tensors_of(tmp_path / "again")
    assert trained.keys() == again.keys() == tensors_of(model).keys()
    assert [name for name in trained if not torch.equal(trained[name], again[name])] == []
    assert mrl("generate", run / "checkpoints", "--prompt", "x", "--max-new-tokens", "2").out
    file.write_text(yaml.safe_dump(config))
    assert "the same: 1 row" in mrl("check", file, "--layouts", "dp1").out
