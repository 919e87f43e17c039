"""`mrl slurm` in this process, on a private cluster: what it prints, and jobs waited for."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import subprocess
import sys
import time
from unittest import mock

from click import Command
from click.testing import CliRunner, Result

from mrl import cli
from mrl.launch.slurm import jobs
from tests.slurm.cluster import Cluster

REPO = pathlib.Path(__file__).parents[2]
TIMEOUT_S = 600.0
"""For what takes seconds where nobody else is at work."""

FAKE_PYTHON = """\
import json, os, pathlib, signal, sys, time

first_end = pathlib.Path(os.environ["MRL_FIRST_END"])
restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
run_dir = first_end.parents[2]
if sys.argv[-1].startswith("output_dir="):
    run_dir = pathlib.Path(json.loads(sys.argv[-1].partition("=")[2]))


def save(name):
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run_dir / "checkpoints" / "latest").write_text(name + "\\n")


def ended(code, message):
    first_end.write_text(f"{code}\\nrank 0: {message}\\n")


def until_signal():
    came = []
    signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    print("waiting", flush=True)
    while not came:
        time.sleep(0.02)


exec(os.environ["FAKE_RUN"])
"""
"""What takes the interpreter's place: FAKE_RUN is the Python that a "training" is."""


@functools.cache
def made() -> dict[str, Command]:
    """The command itself. Its options take most of a call's time to be made."""
    return {"slurm": cli.main.commands["slurm"]}


def invoke(*args: str) -> Result:
    with mock.patch.object(cli.main, "commands", made()):
        return CliRunner().invoke(cli.main, ["slurm", *map(str, args)])


class Site:
    """A cluster and its user. Jobs find this checkout's mrl, and have one thread a process."""

    def __init__(self, cluster: Cluster, folder: pathlib.Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "fake.py").write_text(FAKE_PYTHON)
        self.fake_python = folder / "fake python"
        self.fake_python.write_text(
            f'#!/bin/sh\n[ "$1" != -c ] || exec {sys.executable} "$@"\nexec {sys.executable} -S "{folder}/fake.py" "$@"\n'
        )
        self.fake_python.chmod(0o755)

    def submit(self, command: str, config: object, *args: str) -> str:
        """Submits and returns the job's id."""
        env = [f"--env=PYTHONPATH={REPO}", "--env=OMP_NUM_THREADS=1", "--env=HF_HUB_OFFLINE=1"]
        done = invoke("submit", command, config, *args, *env, "--python", self._python(args))
        assert done.exit_code == 0, done.output
        return re.match(r"submitted job (\d+)", done.stdout)[1]

    def _python(self, args: tuple[str, ...]) -> str:
        return str(self.fake_python) if any(arg.startswith("--env=FAKE_RUN=") for arg in args) else sys.executable

    def wait(self, job_id: str, *states: str, timeout_s: float = TIMEOUT_S) -> jobs.Job:
        """Waits until the job, or each task of the array, is in one of `states`; by default until it has ended."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = jobs.known(job_id)
            if found and all(job.state in (states or jobs.END_STATES) for job in found):
                return found[0]
            assert time.monotonic() < deadline, f"{[dict(job.fields) for job in found]}\n{self.logs()}"
            time.sleep(0.1)

    def release(self, job_id: str) -> None:
        """Lets a job that was put back into the queue start soon: Slurm holds it for two minutes.

        Not at once: within a second or so slurmd takes the new start for the old one, and refuses it.
        """
        self.wait(job_id, "PENDING")
        deadline = time.monotonic() + TIMEOUT_S
        time.sleep(2)
        while (job := jobs.known(job_id)[0]).state == "PENDING":
            if job.fields["Reason"] == "BeginTime":  # again where it was set before Slurm had put the job back
                self.run("scontrol", "update", f"JobId={job_id}", "StartTime=now")
            assert time.monotonic() < deadline, dict(job.fields)
            time.sleep(0.3)

    def take_node(self, node: str) -> str:
        """Submits a job that takes all of a node, before any of the partitions `scavenge` and `sudden`. Returns its id."""
        whole = ("--partition=debug", f"--nodelist={node}", "--cpus-per-task=2", "--output=/dev/null", "--wrap=true")
        return self.run("sbatch", "--parsable", *whole).strip()

    def run(self, *command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def logs(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text()[-3000:]}" for path in self.folder.rglob("slurm/*.log"))


def history(run_dir: pathlib.Path, job_id: str) -> list[str]:
    """What the job's script said, without the time."""
    return [line[20:] for line in (run_dir / "slurm" / f"{job_id}.history").read_text().splitlines()]


def log(run_dir: pathlib.Path, job_id: str) -> str:
    path = run_dir / "slurm" / f"{job_id}.log"
    return path.read_text() if path.exists() else ""


def wait_for_steps(run_dir: pathlib.Path, count: int) -> None:
    path, deadline = run_dir / "metrics.jsonl", time.monotonic() + TIMEOUT_S
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, (
            f"{path} has no {count} steps\n{[p.read_text() for p in run_dir.glob('slurm/*.log')]}"
        )
        time.sleep(0.05)


def clean_environment() -> None:
    """No trace of another launcher or cluster."""
    for name in [n for n in os.environ if n.startswith(("SLURM_", "SBATCH_")) or n in ("RANK", "WORLD_SIZE")]:
        del os.environ[name]
