"""The command as a user types it: every example of its help, on real processes, and what it refuses."""

from __future__ import annotations

import json
import shlex
import socket
import textwrap
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from mrl import cli
from mrl.commands.check import COMMAND
from mrl.commands.sft import SFT
from mrl.trainers.run_directory import versions
from tests.check.works import make_configs

EXAMPLES = [line.strip() for line in textwrap.dedent(COMMAND.examples).strip().splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with the files that examples name."""
    folder = tmp_path_factory.mktemp("check")
    make_configs(folder)
    return folder


def mrl(place: Path, line: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(place)
    return CliRunner().invoke(cli.main, shlex.split(line)[1:], catch_exceptions=False)


def test_the_first_example_is_the_plain_command():
    assert EXAMPLES[0] == "mrl check sft.yaml"


OTHERS = [
    "mrl check lora.yaml --layouts dp1,tp2,pp2",  # whose adapters have dropout
    "mrl check dpo.yaml --layouts dp1 loss.name=orpo engine.backend=fsdp",
    "mrl check kto.yaml --layouts dp1,pp2",
    "mrl check rm.yaml --layouts tp2,dp2",
]


@pytest.mark.nightly
@pytest.mark.parametrize("line", [*EXAMPLES, *OTHERS])
def test_every_example_of_the_help_runs(place, monkeypatch, line):
    before = set(place.iterdir())
    done = mrl(place, line, monkeypatch)
    assert done.exit_code == 0, done.output
    if "--json" in line:
        found = json.loads(done.stdout)
        assert not found["different"] + found["undecided"] and [row["verdict"] for row in found["rows"]] == [
            "same"
        ] * len(found["rows"])
    else:
        assert "\nthe same: " in done.stdout and "DIFFERENT" not in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 100
    (place / "check.json").unlink(missing_ok=True)  # of --save
    assert set(place.iterdir()) == before, "nothing is left behind"


@pytest.mark.nightly
def test_actor_and_critic(place, monkeypatch):
    """A role each, on its own engine; what differs is an exit code and a name."""
    done = mrl(place, "mrl check ppo.yaml --layouts dp1,dp2 --nproc 2 --json", monkeypatch)
    found = json.loads(done.stdout)
    assert done.exit_code == 0, found
    assert [(row["role"], row["layout"]) for row in found["rows"]] == [
        ("actor", "dp1"), ("critic", "dp1"), ("actor", "dp2"), ("critic", "dp2"),
    ]  # fmt: skip
    assert all(row["numbers"]["gradients"]["compared"] > 20 for row in found["rows"])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("mrl check sft.yaml --layouts tp3", "the model's 4 attention heads"),
        ("mrl check sft.yaml --save gone/check.json", '--save: value "gone/check.json" cannot be written'),
        ("mrl check sft.yaml --layouts tp2xpp2 --nproc 2", "--layouts: tp2+spxpp2 needs 4 processes, and 2 run here"),
        (
            "mrl check sft.yaml --layouts dp8",
            "train.global_batch_size: value 4 has too few sequences for the 8 replicas",
        ),
        ("mrl check sft.yaml --layouts ep2", "splits experts, and the model (qwen3) has none"),
        ("mrl check sft.yaml engine.backend=fsdp --layouts tp2", "engine.parallel.tp: value 2 is not supported"),
        ("mrl check ppo.yaml --layouts tp2", "critic.engine.parallel.tp: value 2 is not supported by backend fsdp"),
        (
            "mrl check sft.yaml engine.moe.aux_loss=0.01",
            "engine.moe.aux_loss: value 0.01 is a router loss, which transf",
        ),
    ],
)
def test_mistakes_are_one_line(place, monkeypatch, line, says):
    done = mrl(place, line, monkeypatch)
    assert done.exit_code == 2, done.output
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and says in lines[0], done.stderr


def test_a_command_brings_what_is_checked(place, monkeypatch):
    monkeypatch.setattr(SFT, "checked", None)
    done = mrl(place, "mrl check sft.yaml", monkeypatch)
    assert done.exit_code == 2
    assert done.stderr == (
        "mrl: sft.yaml: is a config of mrl sft, which mrl check has no step for; give one of mrl ppo, mrl dpo, mrl rm\n"
    )


@pytest.mark.nightly
def test_save_writes_what_somebody_elsewhere_needs(place, monkeypatch, tmp_path):
    """The rows of --json, with machine, versions and words, in a file that names neither the host nor the folder.

    GRPO has a reference by default, which is not checked."""
    file = tmp_path / "check.json"
    done = mrl(place, f"mrl check {place}/grpo.yaml seed=3 --layouts dp1 --save {file} --json", monkeypatch)
    assert done.exit_code == 0, done.output
    saved = json.loads(file.read_text())
    assert saved["check"] == json.loads(done.stdout)
    rows = [(row["role"], row["layout"], row["verdict"]) for row in saved["check"]["rows"]]
    assert rows == [("actor", "dp1", "same")]
    assert saved["asked"]["overrides"] == ["seed=3"] and saved["asked"]["config"] == "grpo.yaml"
    assert saved["versions"] == versions()
    titles = [section["title"] for section in saved["machine"]["sections"]]
    assert "GPUs" in titles and "host" not in saved["machine"] and socket.gethostname() not in saved["machine"].values()


def test_the_template_asks_for_the_file():
    """The template is for GitHub; its command and layouts are those that the command takes."""
    template = yaml.safe_load((Path(__file__).parents[2] / ".github/ISSUE_TEMPLATE/layout.yml").read_text())
    asked = {part["id"]: part for part in template["body"] if "id" in part}
    assert "--save" in asked["file"]["attributes"]["description"] and asked["file"]["validations"]["required"]
    shown = template["body"][0]["attributes"]["value"]
    line = next(line for line in shown.splitlines() if "mrl check" in line and "--save" in line)
    assert {word for word in line.split() if word.startswith("--")} <= {param.names for param in COMMAND.params[2:]}
    assert template["name"] in (Path(__file__).parents[2] / "docs/check.md").read_text()
