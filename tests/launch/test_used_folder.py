"""What is saved in output_dir is looked at before PyTorch is loaded, and a dry run says what this machine lacks."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
import yaml

from mrl.config.command import record, roots
from mrl.config.load import from_dict
from mrl.engine import atomic_checkpoint
from mrl.errors import ConfigError
from mrl.launch import preflight
from mrl.trainers import run_lock, used_folder
from mrl.trainers.run_directory import RunDirectory
from tests.bad_input.mistakes import MODEL
from tests.config.refused import BASES
from tests.config.test_load import merged

RUN_ALL = """
import json, sys
from click.testing import CliRunner
from mrl import cli
for line in json.loads(sys.argv[1]):
    done = CliRunner().invoke(cli.main, line)
    loaded = [name for name in ("torch", "megatron", "wandb") if name in sys.modules]
    print(json.dumps([done.exit_code, done.stdout, done.stderr, loaded]))
"""


def run_all(*lines: list[str]) -> list[tuple[int, str, str, list[str]]]:
    """Exit code, stdout, stderr and which of three packages are loaded, of commands in one process."""
    ran = subprocess.run([sys.executable, "-c", RUN_ALL, json.dumps(lines)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return [tuple(json.loads(line)) for line in ran.stdout.splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """fresh/, foreign/, half/ (step 3 of 5) and whole/ (all 5, exported), of one config."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    raw = merged(BASES["sft"], {"model": {"path": str(folder / "model")}, "train": {"steps": 5}})
    raw = merged(raw, {"data": {"train": str(folder / "rows.jsonl")}})
    for name, step in (("fresh", 0), ("foreign", 0), ("half", 3), ("whole", 5)):
        config = merged(raw, {"output_dir": str(folder / name)})
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
        (folder / name).mkdir()
        if step:
            RunDirectory(folder / name).prepare(from_dict(config), "mrl")
            with atomic_checkpoint.writing(str(folder / name / "checkpoints"), step, backend="fsdp") as path:
                pathlib.Path(path, "weights").write_text("w")
    (folder / "foreign" / "config.yaml").write_text("mine: 1\n")
    (folder / "whole" / "hf").mkdir()
    return folder


@pytest.mark.slow
def test_what_is_saved_is_looked_at_before_torch_is_loaded_and_a_dry_run_says_what_this_machine_lacks(runs):
    def line(name: str, *words: str) -> list[str]:
        return ["sft", str(runs / f"{name}.yaml"), *words]

    job = ["--gpus-per-node", "0", "--processes-per-node", "2", "model.init=pretrained", "data.train=/not/here.jsonl"]
    lock = run_lock.RunLock(runs / "used")
    lock.acquire()
    used = yaml.safe_load((runs / "fresh.yaml").read_text()) | {"output_dir": str(runs / "used")}
    (runs / "used.yaml").write_text(yaml.safe_dump(used))
    *refused, complete, half, whole, rendered = run_all(
        line("half", "optimizer.lr=0.5"), line("half", "optimizer.lr=0.5", "--dry-run"), line("foreign", "--dry-run"),
        line("half", "checkpoint.resume=never"), line("fresh", f"checkpoint.resume={runs / 'fresh'}"),
        line("half", f"checkpoint.resume={runs / 'whole' / 'checkpoints'}"), line("used"), line("whole"),
        line("half", "engine.device=cuda", "--dry-run"),
        line("whole", "engine.device=auto", "engine.layer_spec=te", "--dry-run"),
        ["slurm", "render", *line("fresh", *job)],
    )  # fmt: skip
    says = [
        "optimizer.lr: value 0.5 is not the 1e-05 that the checkpoint was saved with",
        "optimizer.lr: value 0.5 is not the 1e-05 that the checkpoint was saved with",
        "holds a config.yaml that mrl did not write", "would overwrite the run in", "holds no whole checkpoint",
        "is not the newest checkpoint of the run", "is in use by another run (process ",
    ]  # fmt: skip
    for (code, _, error, loaded), part in zip(refused, says, strict=True):
        assert (code, loaded) == (2, []) and part in error, error
    lock.release()
    run_lock.refuse_if_in_use(runs / "never made")
    assert not (runs / "never made").exists(), "what is not there is not made"
    code, said, _, loaded = complete
    assert (code, loaded) == (0, [])
    assert f"the run in {runs / 'whole'} is complete: 5 of 5 steps are made; raise train.steps" in said
    assert half[0] == whole[0] == rendered[0] == 0, (half, whole, rendered)
    assert half[2:] == ("", ["torch"]), "no megatron"
    assert "after step 3" in half[1] and "is complete: 5 of 5 steps are made" in whole[1]
    assert "# engine.layer_spec: te (as configured; torch sees no GPU" in whole[1]
    assert rendered[1].startswith("#!"), "a script is rendered where neither weights nor rows are"


def test_checkpoints_on_a_disk_that_is_not_mounted_are_no_start_from_the_beginning(tmp_path):
    (tmp_path / "checkpoints").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has checkpoints that is no folder, or a link to one that is not there"):
        used_folder.refuse_foreign(tmp_path)


@pytest.mark.parametrize(
    ("change", "is_complete"),
    [
        ({}, True),
        ({"train": {"steps": 6}}, False),
        ({"train": {"steps": 4}}, True),
        ({"train": {"steps": None}}, False),
    ],
)
def test_a_run_is_complete_by_its_steps(runs, change, is_complete):
    raw = merged(yaml.safe_load((runs / "whole.yaml").read_text()), change)
    saved = preflight.check_used(record("sft"), from_dict(raw))
    assert saved is not None and saved.is_complete == is_complete


def test_a_run_without_its_export_is_not_complete(runs):
    """It is made again."""
    raw = yaml.safe_load((runs / "whole.yaml").read_text())
    (runs / "whole" / "hf").rmdir()
    assert not preflight.check_used(record("sft"), from_dict(raw)).is_complete
    (runs / "whole" / "hf").mkdir()


def test_a_limit_that_no_checkpoint_has_may_be_lowered_again(runs, tmp_path):
    """A start that saved nothing left its config.yaml. The run compares the checkpoint's limit once it has read that."""
    half = shutil.copytree(runs / "half", tmp_path / "half")
    raw = merged(yaml.safe_load((runs / "half.yaml").read_text()), {"output_dir": str(half)})
    raw = merged(raw, {"data": {"max_length": 64}})
    marker = next((half / "checkpoints").glob("step_*")) / atomic_checkpoint.MARKER
    RunDirectory(half).prepare(from_dict(merged(raw, {"data": {"max_length": 200, "truncation": "drop"}})), "mrl")
    assert "after step 3" in str(preflight.check_used(record("sft"), from_dict(raw)))
    marker.touch()
    with pytest.raises(ConfigError, match="^data.max_length: value 64 is not the 200 .*data.truncation"):
        preflight.check_used(record("sft"), from_dict(raw))


def test_a_run_goes_on_beside_weights_that_lie_in_its_folder(runs, tmp_path):
    """As where a release before this one took a model's folder; a run does not begin in one."""
    shutil.copytree(runs / "half", tmp_path / "half")
    (tmp_path / "half" / "model.safetensors").write_text("w")
    preflight._check_output_dir(str(tmp_path / "half"))
    (tmp_path / "half" / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="is the folder of a model \\(it holds model.safetensors\\)"):
        preflight._check_output_dir(str(tmp_path / "half"))


def test_of_serve_the_folder_alone_is_looked_at(runs):
    raw = merged(BASES["serve"], {"output_dir": str(runs / "foreign")})
    with pytest.raises(ConfigError, match="did not write"):
        preflight.check_used(record("serve"), from_dict(raw, roots()["serve"]))
    assert used_folder.files_of_run(runs / "whole") == ["config.yaml", "checkpoints", "hf"]
