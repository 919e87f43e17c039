"""Memory of a long run stays what it is."""

from __future__ import annotations

import pathlib
import platform
import statistics
import subprocess
import sys

import psutil
import pytest
import yaml

from mrl.trainers.throughput import FreedMemory
from tests.engine.harness import run_case
from tests.trainers.rl import tiny_policies
from tests.trainers.tiny_runs import REPO

STEPS = 3000
GLIBC = platform.libc_ver()[0] == "glibc"


@pytest.mark.skipif(not GLIBC, reason="another C library, of which nothing is asked")
def test_freed_memory_goes_back_to_the_system():
    """Every fiftieth block stays in use, so that the holes between them are what glibc keeps."""
    rss = psutil.Process().memory_info
    memory = FreedMemory()
    memory.EVERY_S = 0.0
    memory.give_back()  # what other tests in this process have freed
    del memory.EVERY_S
    before = rss().rss
    blocks = [bytearray(b"x" * 60_000) for _ in range(4_000)]
    blocks = blocks[::50]
    held = rss().rss - before
    memory._last_s -= 10
    memory.give_back()
    assert rss().rss - before > 0.9 * held > 100e6, "not so soon after the last time"
    memory.EVERY_S = 0.0
    memory.give_back()
    assert rss().rss - before < 40e6 and len(blocks) == 80


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_models_end_with_the_run(inputs, backend, tmp_path):
    """The garbage collector counts objects, and not the memory of a GPU."""
    parts = {"train": {"steps": 2}, "checkpoint": {"export_hf": False}, "actor": {"engine": {"backend": backend}}}
    config = tiny_policies.make_config(inputs, tmp_path / "run", **parts)
    assert run_case(1, "tests.trainers.rl.cases:held_after", config=config) == []


@pytest.mark.nightly
@pytest.mark.skipif(not GLIBC, reason="another C library, of which nothing is asked")
def test_the_last_quarter_of_3000_steps_takes_what_the_second_took(inputs, tmp_path):
    config = tiny_policies.make_config(
        inputs, tmp_path / "run", train={"steps": STEPS}, checkpoint={"export_hf": False}
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    run = subprocess.Popen(
        [sys.executable, "-m", "mrl", "ppo", "config.yaml"], cwd=tmp_path, stdout=subprocess.DEVNULL,
        env={**psutil.Process().environ(), "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    seen: list[tuple[int, float]] = []
    process = psutil.Process(run.pid)
    while run.poll() is None:
        seen.append((_steps(tmp_path / "run" / "metrics.jsonl"), process.memory_info().rss / 1e6))
        try:
            run.wait(timeout=1)
        except subprocess.TimeoutExpired:
            continue
    assert run.returncode == 0
    second, last = (
        statistics.fmean(mb for step, mb in seen if at <= step < at + STEPS // 4) for at in (STEPS // 4, STEPS * 3 // 4)
    )
    assert last < 1.02 * second, f"{second:.0f} MB, then {last:.0f} MB"


def _steps(log: pathlib.Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0
