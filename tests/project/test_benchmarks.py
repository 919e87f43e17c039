"""What `make bench-gpu` measures is measured on a CPU, but for the hand-over, which needs a server: a fault in it is not found
first on a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["numbers", "training", "decoding", "checkpoint", "ppo"])
def test_each_part_runs_on_a_cpu(part, tmp_path):
    page = tmp_path / "page.md"
    options = ["--device", "cpu", "--small", "--rounds", "1", "--steps", "2", "--warmup", "1", "--only", part]
    command = [sys.executable, "benchmarks/gpu.py", *options, "--folder", str(tmp_path), "--result", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = page.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:mrl|native).*", report, re.MULTILINE)
    assert rows and "failed" not in report, report
    if part == "numbers":
        [error] = [row.split(" | ")[2] for row in rows if row.startswith("| mrl, local layers, float32")]
        assert float(error) < 1e-6
