"""The local launcher, run as a process of its own; the ranks run tests/launch/targets.py."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings

import pytest

from mrl import cli
from mrl.config.load import from_dict
from mrl.errors import ConfigError, UserError
from mrl.launch import local
from mrl.trainers.signals import APART_S
from tests.config.test_load import BASE
from tests.launch import targets
from tests.resume.kills import are_gone

REPO = pathlib.Path(__file__).parents[2]
TIMEOUT_S = 90


def start(target: str, output_dir: pathlib.Path, nproc: int = 2) -> subprocess.Popen[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GLOO_", "SLURM_"))}
    command = [sys.executable, "-m", "tests.launch.run_target", "run", target, str(output_dir), str(nproc)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=REPO, env=environ, start_new_session=True, **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, err


def run(target: str, output_dir: pathlib.Path, nproc: int = 2) -> tuple[int, str, str]:
    return finish(start(target, output_dir, nproc))


def notes(output_dir: pathlib.Path, name: str) -> list[str]:
    return [path.read_text() for path in sorted((output_dir / "notes").glob(f"{name}_*"))]


def wait_for_pids(output_dir: pathlib.Path) -> list[int]:
    """Process ids of all ranks and their children, once they run."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        found = [text for text in notes(output_dir, "pid") if text]
        if len(found) == 2:
            return [int(pid) for text in found for pid in text.split()]
        time.sleep(0.05)
    raise TimeoutError("the ranks did not start")


def launch(target: str, output_dir: pathlib.Path) -> None:
    """In this process, as `mrl` does."""
    config = from_dict(BASE | {"output_dir": str(output_dir)})
    local.launch(f"tests.launch.targets:{target}", config, "mrl sft c.yaml", 2, log_dir=local.logs_of(config))


def test_each_rank_gets_its_place_and_rank_0_the_terminal(tmp_path, monkeypatch, capfd):
    for name in [name for name in os.environ if name.startswith(("OMP_", "GLOO_", "SLURM_"))]:
        monkeypatch.delenv(name)
    launch("environment", tmp_path)
    assert capfd.readouterr() == ("printed by rank 0\n", "")
    places = [text.split() for text in notes(tmp_path, "env")]
    assert [p[:3] for p in places] == [["0", "2", "0"], ["1", "2", "1"]]
    assert places[0][3:] == places[1][3:], "ranks must agree on where they meet"
    assert places[0][5:] == ["1", "mrl", "sft", "c.yaml"], "OMP_NUM_THREADS is 1, then the command line"
    logs = [(tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert ["printed by" in log for log in logs] == [False, True]
    assert ["a library warns rank" in log for log in logs] == [True, True]


def test_a_user_error_is_that_of_one_rank_and_ends_all(tmp_path, capfd):
    with pytest.raises(UserError) as caught:
        launch("user_error_on_rank_1", tmp_path)
    assert str(caught.value) == "rows.jsonl:3: is not an object; give one JSON object a line"
    assert capfd.readouterr() == ("", "")
    assert {path.name for path in tmp_path.iterdir()} <= {"logs", "notes"}
    assert are_gone([int(pid) for text in notes(tmp_path, "pid") for pid in text.split()])


@pytest.mark.slow
def test_a_fault_is_shown_once_and_not_what_it_did_to_the_others(tmp_path, capfd):
    with pytest.raises(local.RankFailed, match="^rank 1 failed") as caught:
        launch("fault_on_rank_1", tmp_path)
    said = str(caught.value)
    assert said.count("Traceback") == said.count("ZeroDivisionError: the one true error") == 1
    assert capfd.readouterr() == ("", "")
    assert "ZeroDivisionError" in (tmp_path / "logs" / "rank_1.log").read_text()


@pytest.mark.nightly
def test_ranks_that_do_not_end_after_a_failure_are_killed(tmp_path):
    started = time.monotonic()
    code, _, err = run("ignore_terminate_after_failure", tmp_path)
    assert code == 1
    assert "the one true error" in err
    assert time.monotonic() - started < 25, "torch elastic alone would wait 30 s"


@pytest.mark.slow
def test_stop_signals_reach_every_rank_and_exit_75(tmp_path):
    process = start("stop_when_hurried", tmp_path)
    pids = wait_for_pids(tmp_path)
    # schedulers repeat themselves; what comes later is another request
    for signum, wait_s in (("USR1", 0.1), ("TERM", APART_S + 0.1), ("TERM", 0.3), ("TERM", 0.0)):
        process.send_signal(signal.Signals[f"SIG{signum}"])
        time.sleep(wait_s)
    code, _, err = finish(process)
    assert (code, err) == (75, "mrl: stopped after step 3; run the same command again to go on\n")
    assert notes(tmp_path, "saved") == ["SIGUSR1"] * 2
    assert are_gone(pids)


@pytest.mark.nightly
def test_a_stop_signal_before_training_kills(tmp_path):
    process = start("wait_forever", tmp_path)
    pids = wait_for_pids(tmp_path)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert (code, err) == (128 + signal.SIGTERM, "")
    assert are_gone(pids)


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_behind(tmp_path):
    process = start("wait_forever", tmp_path)
    pids = wait_for_pids(tmp_path)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    code, _, err = finish(process)
    assert (code, err) == (130, f"mrl: {cli.INTERRUPTED}\n")
    assert are_gone(pids)


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_rank_behind(tmp_path):
    process = start("wait_forever", tmp_path)
    pids = wait_for_pids(tmp_path)
    ranks, children = pids[::2], pids[1::2]
    process.kill()
    process.wait(timeout=TIMEOUT_S)
    try:
        assert are_gone(ranks)
    finally:
        for pid in children:  # what a rank started itself is its own to end
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)


def test_any_dataclass_of_keys_is_a_config(tmp_path, monkeypatch):
    """Of a command that does not train: its config has no output_dir, and its logs are gone with it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    config = targets.Notes(output_dir=str(tmp_path), words=("a", "b"))
    local.launch("tests.launch.targets:words", config, "mrl words", 2, quiet=True)
    assert notes(tmp_path, "words") == ["('a', 'b') mrl words"] * 2
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize(
    ("target", "signal", "log"),
    [
        ("killed_on_rank_1", r"SIGKILL \(out of memory\?\)", ""),
        ("crashes_on_rank_1", "SIGSEGV", "Fatal Python error: Segmentation fault.* in crashes_on_rank_1"),
    ],
)
def test_a_killed_rank_ends_all_and_is_named_and_temporary_logs_stay(tmp_path, monkeypatch, target, signal, log):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(local.RankFailed, match=f"^rank 1 was killed by {signal}; its log is") as caught:
        local.launch(f"tests.launch.targets:{target}", targets.Notes(output_dir=str(tmp_path)), "mrl words", 2)
    assert len(str(caught.value).splitlines()) == 1
    assert are_gone([int(pid) for text in notes(tmp_path, "pid") for pid in text.split()])
    assert "checkpoint" not in str(caught.value), "nothing was saved that the command would go on from"
    written = pathlib.Path(str(caught.value).rpartition("its log is ")[2]).read_text()
    assert re.search(log, written, re.DOTALL), written


def test_logs_that_cannot_be_made_are_the_users_mistake():
    config = from_dict(BASE | {"output_dir": "/proc/x"})
    with pytest.raises(ConfigError, match="^output_dir: value '/proc/x' cannot be written"):
        local.logs_of(config)


def test_one_rank_runs_in_this_process_and_leaves_the_environment_alone(tmp_path, monkeypatch):
    place = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in place:
        monkeypatch.delenv(name, raising=False)
    seen, before = {}, dict(os.environ)

    def target(config, command_line):
        seen.update(os.environ, pid=os.getpid(), command_line=command_line)
        warnings.warn("a library warns", stacklevel=1)

    config = from_dict(BASE | {"output_dir": str(tmp_path)})
    local.run_here(target, config, "mrl sft c.yaml", log_dir=tmp_path / "logs")
    assert seen["pid"] == os.getpid()
    assert not [name for name in place if name in seen], "a port that is chosen here may be taken before it is used"
    assert "a library warns" in (tmp_path / "logs" / "rank_0.log").read_text()
    assert dict(os.environ) == before
