"""What `.ci/run` leaves out of a change that touches nothing of another program (docs/testing.md)."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GROUPS = [
    group.replace("\\\n", " ").split()
    for group in re.findall(r"unless_changed '[^']*' ((?:.*\\\n)*.*)\n", (ROOT / ".ci" / "run").read_text())
]


def test_there_are_four_programs():
    assert len(GROUPS) == 4, GROUPS


def test_a_change_of_what_all_tests_share_leaves_out_nothing():
    [names] = re.findall(r"tests/\((__init__[a-z_|]+)\)", (ROOT / ".ci" / "run").read_text())
    shared = {file.stem for file in (ROOT / "tests").glob("*.py") if not file.stem.startswith("test_")}
    assert set(names.split("|")) == shared


@pytest.mark.parametrize("paths", GROUPS, ids=lambda paths: paths[0])
def test_each_program_keeps_a_test(paths):
    files = [
        file for path in paths for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).glob("test_*.py"))
    ]
    assert files and any("pytest.mark.always" in file.read_text() for file in files)


def test_a_change_of_the_pages_alone_leaves_out_what_is_not_marked(tmp_path):
    function = re.search(r"^unchanged\(\) \{.*?^\}", (ROOT / ".ci" / "run").read_text(), re.M | re.S)[0]
    git = "git -c user.name=a -c user.email=a@b -c init.defaultBranch=main"
    script = f"""set -euo pipefail
        {git} init -q . && mkdir .ci mrl && touch a && {git} add . && {git} commit -qm one
        {function}
        echo "no file: $(unchanged)"
        git rev-parse HEAD >.ci/passed
        {git} add . && {git} commit -qm two
        echo "pages: $(unchanged)"
        mkdir mrl/report && touch mrl/report/page.py && git add .
        echo "report: $(unchanged)"
        echo {"0" * 40} >.ci/passed
        echo "of another clone: $(unchanged)"
    """
    environment = {name: value for name, value in os.environ.items() if name != "MRL_CI_BASE"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, env=environment
    )
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    every = [f"--unchanged={path}" for paths in GROUPS for path in paths]
    assert said["no file"] == said["of another clone"] == ""
    assert said["pages"].split() == every
    assert said["report"].split() == [option for option in every if "test_browser" not in option]
