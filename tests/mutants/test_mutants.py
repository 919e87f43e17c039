"""The table of mutants fits the tree, and no mutant of it lives."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.runner import REPO, SURVIVED, run, survivors
from tests.mutants.table import MUTANTS


@functools.cache
def code(file: str) -> str:
    """What a file of mrl says, without its comments."""
    return ast.dump(ast.parse(Path(REPO, "mrl", file).read_text(encoding="utf-8")))


@pytest.mark.slow
def test_every_mutant_is_a_change_of_the_source_that_can_be_run():
    assert len(MUTANTS) >= 60 and len(set(MUTANTS)) == len(MUTANTS)
    for mutant in MUTANTS:
        text = Path(REPO, "mrl", mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.text) == 1, f"{mutant}: the text is there {text.count(mutant.text)} times"
        changed = text.replace(mutant.text, mutant.replacement)
        assert ast.dump(ast.parse(changed)) != code(mutant.file), f"{mutant}: changes nothing"


def test_every_mutant_names_tests_that_exist():
    for mutant in MUTANTS:
        assert mutant.tests
        for test in mutant.tests:
            path, *function = test.split("::")
            file = Path(REPO, "tests", path)
            assert file.exists(), f"{mutant}: {test}"
            assert not function or re.search(rf"def {re.escape(function[0].split('[')[0])}\(", file.read_text()), test


@pytest.mark.nightly
def test_no_mutant_lives():
    """In a process of its own: the runner forks, and a fork of this one would have the fork server of its worlds, but not
    as a child."""
    ran = subprocess.run([sys.executable, "-m", "tests.mutants"], cwd=REPO, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert f"{len(MUTANTS)} of {len(MUTANTS)} mutants are caught" in ran.stdout


@pytest.mark.nightly
def test_a_mutant_that_no_test_catches_is_a_survivor():
    harmless = Mutant(
        "algorithms/sft.py", "nll_T = -log_probs_T", "nll_T = -1 * log_probs_T", ("algorithms/test_sft.py",)
    )
    outcomes = run([harmless])
    assert outcomes == {harmless: SURVIVED} and survivors(outcomes)
