"""Every example of the help of `mrl slurm`, run as it stands on a private Slurm, whose site has a profile."""

from __future__ import annotations

import pathlib
import shlex

import pytest
import yaml

from mrl.commands.slurm import COMMAND
from tests.bad_input.mistakes import CONFIG, PPO_CONFIG, Workspace
from tests.slurm import slurm_site
from tests.slurm.test_script import wait_until_waiting

pytestmark = pytest.mark.slow

TASKS = 2
"""Of the job on two nodes: torchrun, which starts the processes of a node, has one on each."""

ORDER = (  # a job waits for its signal, is looked at, and is cancelled; the next one waits too
    "mrl slurm render sft sft.yaml --nodes 2 --gpus-per-node 8",
    "mrl slurm submit sft sft.yaml --nodes 2 --gpus-per-node 8",
    "mrl slurm status",
    "mrl slurm status runs/demo",
    "mrl slurm cancel runs/demo --save",
    "mrl slurm logs runs/demo -f",
    "mrl slurm logs 12345 -n 200",
    "mrl slurm submit ppo grpo.yaml train.steps=500 --profile site.yaml",
    "mrl slurm template bare > job.sbatch",
)


@pytest.fixture
def place(site, monkeypatch) -> pathlib.Path:
    """A user's folder with the files that the examples name. A "training" waits for a signal, and says that it saved."""
    Workspace(site.folder).make()
    fake = "until_signal(); save('step_7'); ended(75, 'stopped')"
    options = {"python": str(site.fake_python), "env": {"FAKE_RUN": fake}, "time": "10:00", "max_restarts": 0}
    monkeypatch.chdir(site.folder)
    monkeypatch.setenv("HOME", str(site.folder))
    size = {"steps": 8, "global_batch_size": 16}
    files = {
        "sft.yaml": CONFIG | {"output_dir": "runs/demo", "engine": {}, "train": size},
        "grpo.yaml": PPO_CONFIG | {"output_dir": "runs/demo-rl"},
        "site.yaml": {"slurm": options | {"gpus_per_node": 0, "processes_per_node": 2}},
        ".config/mrl/slurm.yaml": {"slurm": options},
    }
    for name, content in files.items():
        (site.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (site.folder / name).write_text(yaml.safe_dump(content))
    return site.folder


def test_every_example_of_the_help_runs(site, place):
    texts = [COMMAND.examples, *(of.examples for of in COMMAND.commands.values())]
    assert set(ORDER) == {line.strip() for text in texts for line in text.strip().splitlines()}
    job, shown = "", {}
    for line in ORDER:
        words = shlex.split(line.replace("12345", job).partition(" > ")[0])
        done = slurm_site.invoke(*words[2:])
        assert done.exit_code == 0, f"{line}: {done.output}"
        shown[line] = done.stdout
        if line.startswith("mrl slurm submit sft"):
            job = done.stdout.split()[2].rstrip(":")
            wait_until_waiting(place / "runs" / "demo", job, restart=TASKS - 1)
    render, submit, status, of_run, cancel, log, numbered, ppo, template = shown.values()
    assert "#SBATCH --nodes=2" in render and "8" in render.partition("gpus-per-node=")[2].splitlines()[0]
    assert submit.startswith(f"submitted job {job}: 2 nodes x 8 processes\n")
    assert f"job {job}  RUNNING" in status and f"job {job}  RUNNING" in of_run
    assert "step_7" in cancel, cancel
    assert log.splitlines()[-1].endswith(numbered.splitlines()[-1]) and "waiting" in numbered
    assert ppo.startswith("submitted job ") and "1 node x 2 processes" in ppo and "base.sbatch" in template
