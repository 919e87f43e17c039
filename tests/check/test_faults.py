"""Whole runs of `mrl check` on a copy of mrl with a fault in it: each is found, where it is, by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.check.faults import PLANTED
from tests.check.works import make_configs
from tests.tiers import slow_but
from tests.trainers.tiny_runs import REPO

SLOW = ["sharded parameter not loaded"]  # of a layout; test_measure.py has others in worlds of processes


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    make_configs(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(SLOW, PLANTED, pytest.mark.nightly))
def test_a_planted_fault_is_found_by_name(place, tmp_path, name):
    fault = PLANTED[name]
    shutil.copytree(REPO / "mrl", tmp_path / "mrl")  # with its bytecode
    file = tmp_path / "mrl" / fault.file
    source = file.read_text(encoding="utf-8")
    for text, replacement in fault.changes:
        assert source.count(text) == 1, text
        source = source.replace(text, replacement)
    file.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mrl", "check", "sft.yaml", *fault.words.split(), "--json", "--save", "check.json"],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}, cwd=place, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    found = json.loads(done.stdout)
    assert json.loads((place / "check.json").read_text())["check"] == found
    verdicts = {row["layout"]: row for row in found["rows"]}
    assert [row for row in fault.same if verdicts[row]["verdict"] != "same"] == []
    if fault.row:
        assert fault.row in found["different"]
        row = verdicts[fault.row]
        assert row["problems"] and row["problems"][0]["quantity"] == fault.quantity, row
        assert fault.says in f"{row['problems']} {row['clue']}", row
    else:
        assert any(line.startswith(f"{fault.quantity}: ") and fault.says in line for line in found["batch"]), found
