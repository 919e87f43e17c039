"""What a job's script does on a real Slurm: exit codes, signals, starting again, arrays, dependencies.

The training is a line of shell (slurm_site.FAKE_PYTHON) here, so that each case takes a second or two; test_training.py has the
real one.
"""

from __future__ import annotations

import pathlib
import socket
import sys
import time
from importlib import metadata

import pytest

from mrl.launch.slurm import jobs
from tests.bad_input.mistakes import Workspace
from tests.slurm import slurm_site

pytestmark = pytest.mark.slow

ONE = ("--nodes", "1", "--gpus-per-node", "0", "--processes-per-node", "1", "--time", "10:00")


@pytest.fixture
def workspace(site, monkeypatch) -> Workspace:
    root = site.folder / "my work"
    root.mkdir()
    made = Workspace(root)
    made.make()
    monkeypatch.chdir(root)
    return made


def submit(site, fake, *args):
    return site.submit("sft", "config.yaml", *ONE, f"--env=FAKE_RUN={fake}", *args)


def test_tasks_have_the_script_s_environment_which_is_recorded_without_secrets(site, workspace, monkeypatch):
    """Also where sbatch exports none."""
    monkeypatch.setenv("OF_THE_SHELL", "1")
    fake = "save(os.environ['MASTER_ADDR'] + ' ' + os.environ.get('OF_THE_SHELL', 'clean'))"
    given = ("--env=HF_HOME=/cache", "--env=HF_TOKEN=secret", "--env=LOADEDMODULES=cuda/13")
    job = submit(site, fake, "--sbatch", "--export=NONE", *given)
    run_dir = workspace.root / "run"
    assert site.wait(job).fields["ExitCode"] == "0:0", slurm_site.log(run_dir, job)
    assert slurm_site.history(run_dir, job) == ["start 0 on n1, from checkpoint none", "done"]
    assert (run_dir / "checkpoints" / "latest").read_text() == "127.0.0.1 clean\n"
    folder = run_dir / "slurm" / f"{job}.0"
    environment = (folder / "environment").read_text()
    assert {"HF_HOME=/cache", "LOADEDMODULES=cuda/13", f"SLURM_JOB_ID={job}"} <= set(environment.splitlines())
    assert "secret" not in environment
    assert f"torch=={metadata.version('torch')}" in (folder / "packages").read_text().splitlines()


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_one_failed_task_of_many_on_nodes_that_answer_is_a_failure(site, workspace, launcher):
    """And no reason to start again, as a node that does not answer is."""
    fake = "sys.exit(3 if os.environ['SLURM_PROCID'] == '1' else 0)"
    job = submit(site, fake, "--nodes", "2", "--processes-per-node", "2", "--launcher", launcher)
    assert site.wait(job).fields["ExitCode"] == "3:0"
    said = slurm_site.history(workspace.root / "run", job)
    assert said[1:] == ["failed with exit code 3: the log has what srun said"]


def test_logs_are_followed_to_the_end_and_the_first_error_is_told_apart(site, workspace):
    """From before the job has begun; afterwards the error is the first thing shown."""
    fake = (
        "print('begun', flush=True); time.sleep(1); ended(2, 'data.train: is gone'); print('late noise'); sys.exit(1)"
    )
    job = submit(site, fake)
    followed = slurm_site.invoke("logs", "run", "-f").stdout.splitlines()
    error = "first error (start 0, exit code 2), rank 0: data.train: is gone"
    assert {"begun", "late noise", error} <= set(followed) and followed.index("begun") < followed.index(error)
    assert followed[-1].endswith("failed with exit code 2: rank 0: data.train: is gone") or followed[-2] == error
    assert site.wait(job).fields["ExitCode"] == "2:0"
    shown = slurm_site.invoke("logs", job, "-n", "1").stdout.splitlines()
    assert shown[:2] == [error, ""] and shown[2].endswith(" failed with exit code 2: rank 0: data.train: is gone")


def wait_until_waiting(run_dir, job, restart=0):
    deadline = time.monotonic() + slurm_site.TIMEOUT_S
    while slurm_site.log(run_dir, job).count("waiting") <= restart:
        assert time.monotonic() < deadline, slurm_site.log(run_dir, job)
        time.sleep(0.05)


def signal_when_waiting(site, run_dir, job, *, restart=0):
    """The signal ahead of a time limit or a preemption, sent by hand."""
    wait_until_waiting(run_dir, job, restart)
    site.run("scancel", "--batch", "--signal=USR1", job)


TOLD = "received SIGUSR1: the run is told to save and stop"


def test_a_signal_saves_and_the_job_starts_again_as_often_as_it_may(site, workspace):
    fake = "until_signal(); save(f'step_{restart}'); ended(75, 'stopped')"
    job, run_dir = submit(site, fake, "--max-restarts", "1"), workspace.root / "run"
    signal_when_waiting(site, run_dir, job)
    site.release(job)
    signal_when_waiting(site, run_dir, job, restart=1)
    assert site.wait(job).fields["ExitCode"] == "75:0"
    assert slurm_site.history(run_dir, job) == [
        "start 0 on n1, from checkpoint none", TOLD,
        "stopped by a signal; the newest checkpoint is step_0; back into the queue as restart 1 of 1",
        "start 1 on n1, from checkpoint step_0", TOLD,
        "stopped by a signal; the newest checkpoint is step_1; stopped: --max-restarts is 1; submit again to go on",
    ]  # fmt: skip
    lines = slurm_site.invoke("status", run_dir).stdout.splitlines()
    assert lines[0].startswith(f"job {job}  FAILED (NonZeroExitCode) with exit code 75  ") and "restarts 1" in lines[0]
    assert lines[1].endswith("--max-restarts is 1; submit again to go on")
    assert lines[2:] == [f"  {run_dir}: no step yet"]


def test_without_progress_between_restarts_it_stops_and_says_why(site, workspace):
    """The first start may save nothing: it may have been stopped before there was anything to save."""
    job, run_dir = submit(site, "until_signal(); ended(75, 'stopped')"), workspace.root / "run"
    signal_when_waiting(site, run_dir, job)
    site.release(job)
    signal_when_waiting(site, run_dir, job, restart=1)
    assert site.wait(job).fields["ExitCode"] == "1:0"
    assert slurm_site.history(run_dir, job)[-1] == (
        "stopped by a signal; stopped: restart 1 made no progress, the newest checkpoint is still none"
    )


def test_the_temporary_folder_of_a_task_that_was_killed_goes_with_the_job(site, workspace):
    job = submit(site, "save(os.environ['TMPDIR']); os.kill(os.getppid(), 9)")
    assert site.wait(job).fields["ExitCode"] == "137:0"
    folder = pathlib.Path((workspace.root / "run" / "checkpoints" / "latest").read_text().strip())
    assert folder.name.startswith(f"mrl-{job}.0.") and not folder.exists()


@pytest.mark.nightly
def test_a_controller_that_does_not_answer_at_first_is_asked_again(site, workspace):
    """A shell function takes the place of scontrol, and fails once for each of the two questions."""
    fails = '[[ -e $attempt_dir/$1 ]] || { touch "$attempt_dir/$1"; return 1; }'
    setup = f'scontrol() {{ case "$*" in requeue*|*"show job"*) {fails} ;; esac; command scontrol "$@"; }}'
    fake = "None if restart else (until_signal(), save('step_0'), ended(75, 'stopped'))"
    job, run_dir = submit(site, fake, "--setup", setup), workspace.root / "run"
    signal_when_waiting(site, run_dir, job)
    site.release(job)
    assert site.wait(job).state == "COMPLETED", slurm_site.history(run_dir, job)
    assert {"requeue", "show"} <= {path.name for path in (run_dir / "slurm" / f"{job}.0").iterdir()}


@pytest.mark.nightly
def test_a_start_that_nothing_came_of_is_not_repeated_after_slurm_has_restarted_the_job(site, workspace):
    """As after a failed node: Slurm puts the job back, and the script is not asked."""
    job, run_dir = submit(site, "save('step_1'); until_signal()"), workspace.root / "run"
    for restart in range(2):
        wait_until_waiting(run_dir, job, restart)
        site.run("scontrol", "requeue", job)
        site.release(job)
    assert site.wait(job).fields["ExitCode"] == "1:0"
    assert slurm_site.history(run_dir, job)[-1] == (
        "stopped: restart 1 made no progress, the newest checkpoint is still step_1; the log says why"
    )


@pytest.mark.nightly
def test_the_signal_before_the_time_limit_is_in_time(site, workspace):
    """Slurm sends it, by its own clock, up to a minute early; a limit is of whole minutes."""
    fake = "save('step_1') if restart else (until_signal(), save('step_0'), ended(75, 'stopped'))"
    job, run_dir = submit(site, fake, "--time", "2", "--signal-s", "30"), workspace.root / "run"
    site.wait(job, "RUNNING")
    site.release(job)
    ended = site.wait(job)
    assert (ended.state, ended.fields["Restarts"]) == ("COMPLETED", "1")
    assert slurm_site.history(run_dir, job) == [
        "start 0 on n1, from checkpoint none", TOLD,
        "stopped by a signal; the newest checkpoint is step_0; back into the queue as restart 1 of 3",
        "start 1 on n1, from checkpoint step_0", "done",
    ]  # fmt: skip


@pytest.mark.nightly
def test_a_job_that_slurm_preempts_without_grace_is_started_again_by_slurm(site, workspace):
    """There are KillWait's seconds to save in, and the script is not asked; what a start goes on from was saved before."""
    fake = "None if restart else (save('step_1'), until_signal())"
    job, run_dir = submit(site, fake, "--nodelist", "n1", "--partition", "sudden"), workspace.root / "run"
    wait_until_waiting(run_dir, job)
    assert site.wait(site.take_node("n1")).state == "COMPLETED"
    site.release(job)
    ended = site.wait(job)
    assert (ended.state, ended.fields["Restarts"]) == ("COMPLETED", "1")
    assert slurm_site.history(run_dir, job)[-2:] == ["start 1 on n1, from checkpoint step_1", "done"]


def test_a_cancelled_job_is_not_started_again(site, workspace):
    fake = "until_signal(); save('step_7'); ended(75, 'stopped')"
    job, run_dir = submit(site, fake), workspace.root / "run"
    wait_until_waiting(run_dir, job)
    done = slurm_site.invoke("cancel", run_dir, "--save")
    assert done.exit_code == 0 and done.stdout.splitlines() == [
        f"job {job} is told to save and stop", f"stopped job {job}: the newest checkpoint is step_7"
    ]  # fmt: skip
    assert slurm_site.history(run_dir, job)[1:] == [
        TOLD,
        "stopped by a signal; the newest checkpoint is step_7; cancelled",
    ]
    again = slurm_site.invoke("cancel", job)
    assert again.exit_code == 2 and "there is nothing to cancel" in again.stderr


@pytest.mark.nightly
def test_of_a_cancelled_array_no_task_begins_in_the_place_of_one_that_has_saved(site, workspace):
    job, run_dir = (
        submit(site, "until_signal(); save('step_7'); ended(75, 'stopped')", "--array", "0-1%1"),
        workspace.root / "run",
    )
    wait_until_waiting(run_dir, f"{job}_0")
    assert slurm_site.invoke("cancel", job, "--save").stdout.splitlines() == [
        f"job {job} is told to save and stop", f"stopped job {job}_0: the newest checkpoint is step_7"
    ]  # fmt: skip
    assert {task.id: task.state for task in jobs.known(job)} == {f"{job}_0": "FAILED", f"{job}_1": "CANCELLED"}
    assert not (run_dir / "task_1").exists()


def test_status_of_a_running_job_says_how_long_it_has_left(site, workspace):
    """From what the run itself has left: the length in config.yaml, the pace in metrics.jsonl."""
    job, run_dir = submit(site, "until_signal()"), workspace.root / "run"
    wait_until_waiting(run_dir, job)
    workspace.write("run/config.yaml", "# versions: none\n# length: 130 steps\ntrain: {steps: null, epochs: 3}\n")
    workspace.write("run/metrics.jsonl", "".join(f'{{"step": {i}, "perf/step_s": 10.0}}\n' for i in range(1, 11)))
    state, _, progress = slurm_site.invoke("status").stdout.splitlines()
    assert state.startswith(f"job {job}  RUNNING  00:00:") and state.endswith(" of 00:10:00  restarts 0  on n1")
    assert progress == f"  {run_dir}: step 10 of 130; about 20 min 00 s left"
    site.run("scancel", job)


def test_an_array_trains_in_folders_of_their_own_and_another_job_waits_for_it(site, workspace):
    fake = "save(sys.argv[-2])"
    job, run_dir = submit(site, fake, "--array", "3,5", "seed=%a"), workspace.root / "run"
    second = slurm_site.invoke("submit", "sft", "config.yaml", *ONE)
    assert second.exit_code == 2 and f"has job {job}_" in second.stderr, second.output
    after = submit(site, "save('after')", f"--dependency=afterok:{job}")
    assert jobs.known(after)[0].state == "PENDING"
    assert site.wait(after).state == "COMPLETED"
    assert {task.id for task in jobs.known(job)} == {f"{job}_3", f"{job}_5"}
    for task in (3, 5):
        assert (run_dir / f"task_{task}" / "checkpoints" / "latest").read_text() == f"seed={task}\n"
        assert slurm_site.history(run_dir, f"{job}_{task}")[-1] == "done"
    assert (run_dir / "checkpoints" / "latest").read_text() == "after\n"
    assert slurm_site.invoke("logs", f"{job}_5", "-n", "1").stdout.endswith(" done\n")
    refused = slurm_site.invoke("logs", job)
    assert refused.exit_code == 2 and "is an array, whose tasks have a log each" in refused.stderr
    ended = {job.id: job.fields["EndTime"] for job in jobs.known(job)}
    assert max(ended.values()) <= jobs.known(after)[0].fields["StartTime"]


def test_two_jobs_on_a_node_meet_at_different_ports(site, workspace):
    """Also where the port that the job's id gives is taken."""
    fake = "until_signal(); save(os.environ['MASTER_ADDR'] + ' ' + os.environ['MASTER_PORT'])"
    first = submit(site, fake, "--nodelist", "n1")
    next_id = int(first) + 1
    with socket.create_server(("127.0.0.1", 20000 + next_id % 12000)):
        second = submit(site, fake, "--nodelist", "n1", "output_dir=other")
        for name, job in (("run", first), ("other", second)):
            signal_when_waiting(site, workspace.root / name, job)
            site.wait(job)
    ports = [(workspace.root / name / "checkpoints" / "latest").read_text() for name in ("run", "other")]
    assert second == str(next_id)
    wanted = [20000 + int(first) % 12000, 20000 + next_id % 12000 + 1]
    assert ports == [f"127.0.0.1 {port}\n" for port in wanted]


SERVER = """\
import socket, sys, time
assert sys.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"], sys.argv
listening = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
time.sleep(600)
"""


def make_server(site, text=SERVER):
    (site.folder / "server.py").write_text(text)
    server = site.folder / "server"
    server.write_text(f'#!/bin/sh\nexec {sys.executable} -S "{site.folder}/server.py" "$@"\n')
    server.chmod(0o755)
    return server


@pytest.mark.nightly
def test_a_server_that_ends_meanwhile_ends_the_run_and_says_where_to_look(site, workspace):
    """On a port of the job; the lines of setup may read what is not set."""
    server = make_server(site, SERVER.replace("sleep(600)", "sleep(15)"))
    args = ("--template", "hetero", "--servers-nodes", "1", "--servers-python", server, "--servers-setup", "x=$NOT_SET")
    fake = "until_signal(); save('step_3'); ended(75, 'stopped')"
    job = site.submit("ppo", "ppo.yaml", *ONE, f"--env=FAKE_RUN={fake}", "rollout.backend=vllm", *args)
    ended, run_dir = site.wait(job), workspace.root / "run"
    assert ended.fields["ExitCode"] == "1:0", slurm_site.log(run_dir, job)
    why = f"a server has ended; {run_dir}/slurm/{job}.0/servers.log says why"
    said = slurm_site.history(run_dir, job)
    assert said[0] == f"servers: http://127.0.0.1:{8000 + int(job) % 12000}"
    assert said[2:] == [why, f"stopped: {why}; the newest checkpoint is step_3"]


def test_servers_on_nodes_of_their_own_are_there_before_the_training(site, workspace):
    """A heterogeneous job; the server and the training are a few lines of Python."""
    server = make_server(site)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fake = (
        "until_signal() if restart == 0 else None; save(sys.argv[-1]); ended(75, 'stopped') if restart == 0 else None"
    )
    args = ("--template", "hetero", "--servers-nodes", "1", "--servers-python", server, "--servers-port", port)
    args = (f"--env=FAKE_RUN={fake}", "--sbatch=--export=NONE", *args)
    job = site.submit("ppo", "ppo.yaml", *ONE, "rollout.backend=vllm", *args)
    run_dir = workspace.root / "run"
    signal_when_waiting(site, run_dir, job)
    site.release(job)
    assert site.wait(job).state == "COMPLETED", slurm_site.log(run_dir, job)
    urls = f"http://127.0.0.1:{port}"
    said = slurm_site.history(run_dir, job)
    assert said[0] == f"servers: {urls}" and said[-1] == "done", said
    assert (run_dir / "checkpoints" / "latest").read_text() == f"rollout.server.urls=[{urls}]\n"


def test_a_server_that_ends_ends_the_job_and_says_where_to_look(site, workspace):
    args = ("--template", "hetero", "--servers-nodes", "1", "--servers-python", "false")
    job = site.submit("ppo", "ppo.yaml", *ONE, "--env=FAKE_RUN=0", "rollout.backend=vllm", *args)
    assert site.wait(job).fields["ExitCode"] == "1:0"
    run_dir = workspace.root / "run"
    assert slurm_site.history(run_dir, job)[-1] == (
        f"a server has ended before it listened; {run_dir}/slurm/{job}.0/servers.log says why"
    )
