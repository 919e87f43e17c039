"""Every mistake in the tables: exit code 2, one line that names the key or file:line, nothing written but a log.

To add cases, write a module with CASES beside this one and list it in TABLES.
"""

from __future__ import annotations

import pytest

from tests.bad_input import config_cases
from tests.bad_input.kit import Case, Workspace, check, run_mrl

TABLES = {"config": config_cases.CASES}
ALL = [(f"{table}: {case.name}", case) for table, cases in TABLES.items() for case in cases]


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    made = Workspace(tmp_path)
    made.make()
    return made


@pytest.mark.parametrize("case", [case for _, case in ALL], ids=[name for name, _ in ALL])
def test_is_refused(case: Case, workspace: Workspace):
    check(case, workspace)


def test_names_are_unique():
    names = [name for name, _ in ALL]
    assert len(set(names)) == len(names)


def test_what_the_cases_break_works(workspace: Workspace):
    before = workspace.snapshot()
    code, out, err = run_mrl(workspace, "--dry-run")
    assert (code, err) == (0, "")
    assert "# layout: dp1 on 1 process" in out
    assert workspace.snapshot() == before
