"""SIGTERM and SIGUSR1, to the launcher or to one rank, finish the step, save and exit with 75; Ctrl-C leaves nothing."""

import os
import signal
import time

import pytest

from tests.resume import runs
from tests.resume.kills import are_gone, processes, wait_for

ONLY_ON_SIGNALS = {"every": None}


def start_and_signal(run, signum, to, *, after_steps):
    """Starts the run and sends a signal once it has made some steps. Returns exit code, stderr, the processes."""
    process = run.start()
    log = run.output / "metrics.jsonl"
    before = log.stat().st_ino if log.exists() else 0

    def made():
        return (
            log.exists() and log.stat().st_ino != before and log.read_bytes().count(b"\n") > after_steps
        )  # a line is of step 0

    try:
        assert wait_for(made, process), (run.folder / "err").read_text()
        pids = processes(process.pid)
        assert len(pids) == run.world + (run.world > 1), "a single process needs no launcher"
        os.kill(pids[{"launcher": 0, "rank 0": min(1, len(pids) - 1), "last rank": -1}[to]], signum)
        code, out, err = run.finish(process)
    finally:
        process.kill()
        process.wait()
    assert are_gone(pids, within_s=5), "processes are left"
    answer = f"received {signum.name}: the run saves and stops at the end of the step at hand"
    told = signum != signal.SIGINT and (
        to != "last rank" or run.world == 1
    )  # the launcher and rank 0 reach the main process
    assert out.splitlines().count(answer) == int(told), out
    return code, err


def stop(run, signum, to, *, after_steps):
    """As start_and_signal, for a signal that saves. Returns the step that was made last."""
    code, err = start_and_signal(run, signum, to, after_steps=after_steps)
    made = len(runs.updates(run.output))
    assert code == 75 and len(err.splitlines()) == 1 and signum.name in err, f"exit code {code}\n{err}"
    assert f"after step {made} of {runs.STEPS}" in err and after_steps <= made < runs.STEPS
    assert runs.newest(run.output).name == f"step_{made:08d}"
    assert not (run.output / "hf").exists()
    return made


@pytest.mark.parametrize(
    ("name", "signals"),
    [
        pytest.param("tp1", [(signal.SIGUSR1, "launcher")], marks=pytest.mark.nightly),
        pytest.param("tp2", [(signal.SIGTERM, "launcher"), (signal.SIGUSR1, "last rank")], marks=pytest.mark.nightly),
        pytest.param("fsdp dp2", [(signal.SIGUSR1, "launcher"), (signal.SIGTERM, "rank 0")], marks=pytest.mark.nightly),
        pytest.param("fsdp cp2", [(signal.SIGTERM, "last rank")], marks=pytest.mark.nightly),
    ],
)
def test_a_stopped_run_goes_on_bitwise(inputs, unharmed, tmp_path, name, signals):
    """Nothing but the signal saves here: what the run goes on from is what the signal saved."""
    run = runs.new_run(tmp_path, inputs, runs.LAYOUTS[name], checkpoint=ONLY_ON_SIGNALS)
    made = 0
    for signum, to in signals:
        made = stop(run, signum, to, after_steps=made + 2)
    assert f"after step {made}" in run.to_the_end()
    runs.assert_same_result(run.output, unharmed(name))


@pytest.mark.nightly
def test_ctrl_c_leaves_no_process_and_the_run_goes_on_from_its_last_save(inputs, unharmed, tmp_path):
    run = runs.new_run(tmp_path, inputs, runs.LAYOUTS["tp2"])
    began = time.monotonic()
    code, err = start_and_signal(run, signal.SIGINT, "launcher", after_steps=3)
    assert code == 130 and err.splitlines()[-1].startswith("mrl: interrupted: ") and "Traceback" not in err, err
    assert time.monotonic() - began < runs.TIMEOUT_S / 2
    said = run.to_the_end()
    assert "resuming from" in said
    runs.assert_same_run(run.output, unharmed("tp2"))
