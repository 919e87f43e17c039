"""The real trainer on a real Slurm of two nodes: tp2 x dp2 over gloo, to the end, preempted, on a failed node, cancelled."""

from __future__ import annotations

import math
import time

import pytest
import yaml

from mrl.launch.slurm import jobs
from tests.resume import runs
from tests.slurm import slurm_site

pytestmark = pytest.mark.slow

LAYOUT = runs.Layout(4, parallel={"tp": 2})

NODES = ("--nodes", "2", "--gpus-per-node", "0", "--processes-per-node", "2", "--cpus-per-task", "1", "--time", "1:00:00")  # fmt: skip
STEPS = 40


def make_config(inputs, folder, *, every=None, **changes):
    """A config in `folder`, whose run is in `folder/the run`."""
    folder.mkdir(parents=True, exist_ok=True)
    changes = {"checkpoint": {"every": every}, "train": {"steps": STEPS, "eval_every": 10}} | changes
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(runs.make_config(inputs, folder / "the run", LAYOUT, **changes)))
    return path, folder / "the run"


@pytest.mark.always
def test_a_run_on_two_nodes_ends_with_a_model_and_says_so(site, inputs, monkeypatch):
    """Two ranks on each, submitted from a folder that has nothing to do with it; its length is set in epochs."""
    path, run_dir = make_config(inputs, site.folder / "a b", train={"epochs": 1, "steps": None})
    monkeypatch.chdir("/")
    job = site.submit("sft", path, *NODES)
    ended = site.wait(job)
    assert ended.state == "COMPLETED", slurm_site.log(run_dir, job)
    assert slurm_site.history(run_dir, job) == ["start 0 on n1 n2, from checkpoint none", "done"]
    assert (run_dir / "hf" / "model.safetensors").is_file()
    environment = (run_dir / "slurm" / f"{job}.0" / "environment").read_text().splitlines()
    assert {"nodes: n1 n2", "MASTER_ADDR=127.0.0.1", "SLURM_JOB_NUM_NODES=2"} <= set(environment)
    [record] = jobs.records(run_dir / "slurm")
    assert yaml.safe_load((run_dir / "slurm" / record["config"]).read_text())["train"]["epochs"] == 1
    steps = math.ceil(runs.ROWS / runs.BATCH)
    for what in (job, run_dir):
        state, note, progress = slurm_site.invoke("status", what).stdout.splitlines()
        assert state.startswith(f"job {job}  COMPLETED  00:0") and state.endswith(" of 01:00:00  restarts 0  on n[1-2]")
        assert note.endswith(" done")
        assert progress.startswith(f"  {run_dir}: step {steps} of {steps}, train/loss ")
    assert slurm_site.invoke("logs", job, "-f", "-n", "3").stdout.splitlines()[-2].startswith(f"done: {steps} steps")


@pytest.fixture(scope="module")
def unbroken(inputs, tmp_path_factory):
    """The folder of a run that nothing happened to, in waiting processes of this machine."""
    path, run_dir = make_config(inputs, tmp_path_factory.mktemp("unbroken"))
    runs.finish(yaml.safe_load(path.read_text()), LAYOUT.world)
    return run_dir


def went_on(site, run_dir, job):
    """What the script of a job said that was stopped once, saved, and went on from there to the end."""
    ended = site.wait(job)
    assert (ended.state, ended.fields["Restarts"]) == ("COMPLETED", "1"), slurm_site.log(run_dir, job)
    said = slurm_site.history(run_dir, job)
    assert [line.partition(",")[0] for line in said if line.startswith("start")] == [
        "start 0 on n1 n2",
        "start 1 on n1 n2",
    ]
    saved = said[-2].removeprefix("start 1 on n1 n2, from checkpoint ")
    assert saved != "none" and any(f"the newest checkpoint is {saved}; back into the queue" in line for line in said)
    return said


@pytest.mark.nightly
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param((), id="static"),
        pytest.param(("--rendezvous", "c10d"), id="c10d"),
        pytest.param(("--launcher", "srun"), id="srun"),
    ],
)
def test_preempted_runs_go_on_bitwise(site, unbroken, inputs, launcher):
    """Nothing but the signals saves: what a start goes on from is what the signal saved."""
    path, run_dir = make_config(inputs, site.folder)
    job = site.submit("sft", path, *NODES, *launcher)
    slurm_site.wait_for_steps(run_dir, 3)
    site.run("scancel", "--batch", "--signal=USR1", job)
    site.release(job)
    went_on(site, run_dir, job)
    runs.assert_same_result(run_dir, unbroken)


@pytest.mark.nightly
def test_a_run_that_slurm_preempts_for_another_goes_on_bitwise(site, unbroken, inputs):
    """Slurm sends the signal, as PreemptMode=REQUEUE, preempt_send_user_signal and a GraceTime make it do."""
    path, run_dir = make_config(inputs, site.folder)
    job = site.submit("sft", path, *NODES, "--partition", "scavenge")
    slurm_site.wait_for_steps(run_dir, 3)
    other = site.take_node("n2")
    assert site.wait(other).state == "COMPLETED"
    site.release(job)
    assert went_on(site, run_dir, job)[1] == "received SIGUSR1: the run is told to save and stop"
    runs.assert_same_result(run_dir, unbroken)


@pytest.mark.parametrize(
    ("node", "back_s"),
    [
        pytest.param("n1", None, marks=pytest.mark.nightly, id="n1"),
        pytest.param("n2", 3.0, marks=pytest.mark.nightly, id="n2 soon"),
    ],
)
def test_a_failed_node_starts_the_job_again(site, unbroken, inputs, node, back_s):
    """SIGKILL to a node's slurmd and to its tasks in the middle of steps: of n1, where the job's script runs, Slurm puts the
    job back; of n2 whoever finds out first. The node comes back later, or before anyone has asked for it."""
    path, run_dir = make_config(inputs, site.folder, every=3)
    job = site.submit("sft", path, *NODES)
    slurm_site.wait_for_steps(run_dir, 8)
    site.cluster.kill_node(node)
    if back_s is not None:
        time.sleep(back_s)
        site.cluster.start_node(node)
        site.wait(job, "PENDING")
    else:
        try:
            site.wait(job, "PENDING")
        finally:
            site.cluster.start_node(node)
    ended = site.wait(
        job
    )  # after the two minutes of being held: what ends the first start can reach a second one before
    assert ended.state == "COMPLETED" and int(ended.fields["Restarts"]) >= 1, slurm_site.log(run_dir, job)
    starts = [line.rpartition(" ")[2] for line in slurm_site.history(run_dir, job) if line.startswith("start ")]
    assert starts[0] == "none" and len(starts) > 1 and all(start.startswith("step_") for start in starts[1:]), starts
    runs.assert_same_result(run_dir, unbroken)
