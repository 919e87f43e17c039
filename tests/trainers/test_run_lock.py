"""One run at a time in an output_dir: refused by name, however the run before ended, and nothing is left of the lock."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import subprocess
import sys
import threading
import time

import pytest

from mrl.errors import ConfigError
from mrl.trainers.run_lock import NAME, RunLock
from tests.engine.harness import run_case
from tests.trainers import tiny_runs

HOLD = """
import pathlib, sys
from mrl.trainers.run_lock import RunLock
lock = RunLock(pathlib.Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_is_refused_with_who_has_it_and_goes_on_after_a_kill(tmp_path):
    output_dir = tmp_path / "runs" / "demo"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(output_dir)], **pipes) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError) as error:
            RunLock(output_dir, wait_s=0.2).acquire()
        pattern = (
            rf"output_dir: value '{output_dir}' is in use by another run \(process {process.pid} on \S+\); wait for it"
        )
        assert re.match(pattern, str(error.value)), error.value
        process.kill()
    lock = RunLock(output_dir)
    started = time.monotonic()
    lock.acquire()
    assert time.monotonic() - started < 10, "the kernel has released it"
    assert (output_dir / NAME).read_text().startswith(f"process {os.getpid()} on ")
    lock.release()
    assert list(output_dir.iterdir()) == []


@pytest.mark.parametrize("name", ["/proc/x", "file", "dangling"])
def test_a_folder_that_cannot_be_made_is_no_other_run(tmp_path, name):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    with pytest.raises(
        ConfigError, match=f"^output_dir: value '{tmp_path / name}' cannot be written .*; give a folder"
    ):
        RunLock(tmp_path / name).acquire()


def test_it_waits_for_a_run_that_is_about_to_end_and_leaves_nothing(tmp_path):
    output_dir = tmp_path / "runs" / "demo"
    first, second = RunLock(output_dir), RunLock(output_dir)
    first.acquire()
    threading.Timer(0.5, first.release).start()
    second.acquire()
    second.release()
    second.release()
    assert list(output_dir.iterdir()) == []


def test_never_two_at_a_time_though_each_removes_the_file(tmp_path):
    inside, most, rounds = [], [0], 20

    def work():
        for _ in range(rounds):
            lock = RunLock(tmp_path / "run", wait_s=60)
            lock.acquire()
            inside.append(lock)
            most[0] = max(most[0], len(inside))
            time.sleep(0.0005)
            inside.remove(lock)
            lock.release()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("mrl.trainers.run_lock.POLL_S", 0.0002)
        threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
        [t.start() for t in threads], [t.join(60) for t in threads]
    assert not any(t.is_alive() for t in threads) and most == [1]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_flock_is_warned_about(tmp_path, monkeypatch, caplog, number):
    def unsupported(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    lock = RunLock(tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        lock.acquire()
    lock.release()
    assert "no lock in" in caplog.text and os.strerror(number) in caplog.text


@pytest.mark.slow
def test_a_run_is_refused_on_every_rank_where_another_one_is(inputs, tmp_path):
    lock = RunLock(tmp_path / "run")
    lock.acquire()
    try:
        config = tiny_runs.make_config(inputs, tmp_path / "run")
        ended, message, _ = run_case(2, "tests.trainers.cases:train", config=config)
    finally:
        lock.release()
    assert ended == "ConfigError" and message.startswith("output_dir: ") and str(os.getpid()) in message
    assert list((tmp_path / "run").iterdir()) == []
