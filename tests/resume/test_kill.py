"""A run that is killed by SIGKILL, again and again, and started with the same command is the run that was not killed.

Through the real command line, in CI by one kill after one stop; at night at 20 seeded moments over six layouts,
and at 24 over three of gated delta nets. At least a third of them are at a save. Equal: metrics but for timings, the exported files byte by byte, and everything in the last
checkpoint. That is parameters, master weights, moments and step count of AdamW (trap 25), schedule (trap 23), RNG of
every rank (the models have dropout), position in the data (trap 32), all experts on all ranks (trap 33). The processes
of a kill are gone before the next start. CI kills ranks without the command line: test_background_kills.py.
"""

import os
import signal

import pytest

from tests.resume import runs
from tests.resume.kills import Moment, are_gone, kill_at, moments, processes, wait_for

SEEDED = {"tp1": 4, "tp2": 4, "pp2 tied": 3, "dp2": 3, "ep2": 3, "fsdp dp2": 3}
SEEDED |= {"delta tp2": 8, "delta cp2": 8, "delta fsdp dp2": 8}
IN_A_RUN = 4  # a moment takes up to two of a run's steps


def kill_and_compare(folder, inputs, unharmed, name, chosen, **changes):
    """The moments one after another in one run, then to the end."""
    run = runs.new_run(folder, inputs, runs.LAYOUTS[name], **changes)
    ends = []
    for moment in chosen:
        ends.append(kill_at(run, moment))
        print(f"{name}: {moment}: {ends[-1]}")
    assert "missed" not in ends, list(zip(chosen, ends, strict=True))
    kept = any(name.startswith("step_") for name in os.listdir(run.output / "checkpoints"))
    said = run.to_the_end()
    goes_on = ("resuming from", "but not its export; exporting", "is complete")  # killed as it ended
    assert any(words in said for words in goes_on) or not kept  # killed before each first save was whole
    runs.assert_same_run(run.output, unharmed(name))
    assert not (run.output / ".tmp-hf").exists()
    return ends


@pytest.mark.nightly
@pytest.mark.parametrize("name", SEEDED)
def test_a_run_killed_at_seeded_moments(inputs, unharmed, tmp_path, name):
    drawn = moments(f"kill {name}", SEEDED[name])
    for first in range(0, len(drawn), IN_A_RUN):
        kill_and_compare(tmp_path / f"from {first}", inputs, unharmed, name, drawn[first : first + IN_A_RUN])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["lora tp2", "lora ep2", "lora fsdp dp2"])
def test_a_killed_run_of_adapters(inputs, unharmed, tmp_path, name):
    """The checkpoint holds the adapters and their optimizer alone; the base is read again."""
    kill_and_compare(tmp_path, inputs, unharmed, name, moments(f"kill {name}", 2))


def stop(run, signum, to, *, after_steps):
    """Starts the run and sends a signal once it has made some steps. Returns the step that was made last."""
    process = run.start()
    log = run.output / "metrics.jsonl"
    before = log.stat().st_ino if log.exists() else 0

    def made():  # a line is of step 0
        return log.exists() and log.stat().st_ino != before and log.read_bytes().count(b"\n") > after_steps

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
    told = to != "last rank" or run.world == 1  # the launcher and rank 0 reach the main process
    assert out.splitlines().count(answer) == int(told), out
    step = len(runs.updates(run.output))
    assert code == 75 and len(err.splitlines()) == 1 and signum.name in err, f"exit code {code}\n{err}"
    assert f"after step {step} of {runs.STEPS}" in err and after_steps <= step < runs.STEPS
    assert runs.newest(run.output).name == f"step_{step:08d}" and not (run.output / "hf").exists()
    return step


STOPS = [
    ("tp1", [(signal.SIGUSR1, "launcher")]),
    ("tp2", [(signal.SIGTERM, "launcher"), (signal.SIGUSR1, "last rank")]),
    ("fsdp dp2", [(signal.SIGUSR1, "launcher"), (signal.SIGTERM, "rank 0")]),
    ("fsdp cp2", [(signal.SIGTERM, "last rank")]),
]


@pytest.mark.slow
def test_a_run_that_is_stopped_and_then_killed_goes_on_bitwise(inputs, unharmed, tmp_path):
    """What the run goes on from at first is what the signal saved."""
    run = runs.new_run(tmp_path, inputs, runs.LAYOUTS["tp2"], checkpoint={"every": None})
    stop(run, signal.SIGTERM, "launcher", after_steps=2)
    run.config["checkpoint"]["every"] = 1
    assert kill_at(run, Moment("marker", "last rank", 1, 0.0)) != "missed"
    assert "resuming from" in run.to_the_end()
    runs.assert_same_run(run.output, unharmed("tp2"))


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "signals"), STOPS)
def test_a_stopped_run_goes_on_bitwise(inputs, unharmed, tmp_path, name, signals):
    """Nothing but the signal saves here: what the run goes on from is what the signal saved."""
    run = runs.new_run(tmp_path, inputs, runs.LAYOUTS[name], checkpoint={"every": None})
    made = 0
    for signum, to in signals:
        made = stop(run, signum, to, after_steps=made + 2)
    assert f"after step {made}" in run.to_the_end()
    runs.assert_same_result(run.output, unharmed(name))
