"""A dry run reads the first rows as the run does, and is refused where one of them would stop it."""

from __future__ import annotations

import pytest
import yaml
from click.testing import CliRunner

from mrl import cli
from tests.data.tiny_tokenizers import turns, write_jsonl
from tests.trainers import tiny_runs

GOOD = {"messages": turns("2+2=", "4")}
HH = {
    "chosen": "\n\nHuman: 1+1?\n\nAssistant: 2",
    "rejected": "\n\nHuman: 1+1?\n\nAssistant: 3",
}
ROWS = {
    "a wrong column": ("sft", [{"question": "1+1?", "answer": "2"}], "a.jsonl:1: the fields question, answer fit no"),
    "too long": ("sft", [GOOD, {"messages": turns("+" * 200, "4")}], "a.jsonl:2: the row has "),
    "hh": ("dpo", [HH], "a.jsonl:1: chosen is no list of messages, and there is no prompt"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    tiny_runs.make_inputs(folder)
    return folder


def dry_run(folder, command, rows, *words, part="train"):
    """The dry run of a command on rows of data.train, or of data.eval beside good ones."""
    write_jsonl(folder / "a.jsonl", rows)
    write_jsonl(folder / "good.jsonl", [GOOD])
    data = {"train": "good.jsonl" if part == "eval" else "a.jsonl", "max_length": 64}
    config = tiny_runs.make_config(folder, folder / "none", data={})
    config["data"] = {name: str(folder / value) if name == "train" else value for name, value in data.items()}
    if part == "eval":
        config["data"]["eval"] = str(folder / "a.jsonl")
    if command != "sft":
        config["loss"] = {"name": {"dpo": "dpo", "rm": "bradley_terry"}[command]}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return CliRunner().invoke(cli.main, [command, str(folder / "config.yaml"), *words, "--dry-run"])


@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_would_stop_the_run_stops_the_dry_run(folder, name):
    command, rows, says = ROWS[name]
    done = dry_run(folder, command, rows)
    assert done.exit_code == 2 and says in done.output.replace(f"{folder}/", ""), done.output
    assert not (folder / "none").exists()
    if command == "sft" and len(rows) > 1:
        assert dry_run(folder, command, rows, part="eval").exit_code == 2
        policy = ["data.truncation=drop", "data.on_bad_row=skip"]
        assert dry_run(folder, command, rows, *policy).exit_code == 0


def test_whole_texts_with_turns_pass(folder):
    words = ['data.turns={user: "\\n\\nHuman:", assistant: "\\n\\nAssistant:"}']
    assert dry_run(folder, "dpo", [HH], *words).exit_code == 0
    assert dry_run(folder, "rm", [HH], "data.chat_template=none").exit_code == 0
