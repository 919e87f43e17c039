"""Runs mutants: each in a copy of the tree, by the tests that the table names, in a fork of a process that has imported torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant

REPO = Path(__file__).parents[2]
COPIED = ("mrl", "tests", "examples", "docs", "pyproject.toml")
TIMEOUT_S = 300.0
CAUGHT, SURVIVED, TIMED_OUT = "caught", "survived", "timed out"
"""What became of a mutant; anything else is what went wrong with its tests. One that timed out may be a starved machine's."""


def run(mutants: Sequence[Mutant], say: Callable[[str], None] = lambda line: None) -> dict[Mutant, str]:
    """What became of each mutant. Raises AssertionError where the tests that they name fail without any of them.

    say: is told of each mutant when it is done.
    """
    _import_what_is_slow()
    outcomes: dict[Mutant, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants") as name:
        tree = Path(name, "tree")
        _copy(tree)
        named = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        code, output = _tested(tree, named, write_bytecode=True)
        assert code == pytest.ExitCode.OK, f"without any mutant the tests exit with {code}:\n{output}"
        for number, mutant in enumerate(mutants, start=1):
            began_s = time.monotonic()
            with _mutated(tree / "mrl" / mutant.file, mutant):
                code, output = _tested(tree, mutant.tests)
            known = {pytest.ExitCode.OK: SURVIVED, pytest.ExitCode.TESTS_FAILED: CAUGHT, None: TIMED_OUT}
            outcomes[mutant] = known.get(code, f"pytest exits with {code}: {output[-2000:]}")
            say(f"{number}/{len(mutants)} {time.monotonic() - began_s:.1f} s {outcomes[mutant]}: {mutant}")
    return outcomes


def survivors(outcomes: dict[Mutant, str]) -> list[str]:
    """A line for each mutant that no test has caught, also where its tests did not end."""
    return [f"{outcome}: {m}" for m, outcome in outcomes.items() if outcome != CAUGHT]


def _import_what_is_slow() -> None:
    """What no mutant changes: a fork has it already."""
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported, as in tests/conftest.py
    import megatron.core.models.gpt  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401
    import transformers.models.auto  # noqa: F401


def _copy(tree: Path) -> None:
    tree.mkdir()
    for name in COPIED:
        source = REPO / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "runs", "wandb"))
        else:
            shutil.copy2(source, tree / name)


@contextlib.contextmanager
def _mutated(file: Path, mutant: Mutant) -> Iterator[None]:
    """Inside, `file` has the fault. Its time changes with it, so that no bytecode of the right file is taken for it."""
    right, before = file.read_text(encoding="utf-8"), file.stat()
    assert right.count(mutant.text) == 1, f"{mutant}: the text is there {right.count(mutant.text)} times"
    file.write_text(right.replace(mutant.text, mutant.replacement), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(right, encoding="utf-8")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _tested(tree: Path, tests: Sequence[str], *, write_bytecode: bool = False) -> tuple[int | None, str]:
    """(pytest's exit code, or None where it was ended for its time, what it printed) of tests of the copy `tree`."""
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            _become_pytest(tree, tests, output.fileno(), write_bytecode=write_bytecode)
        code = _waited(pid, TIMEOUT_S * (10 if write_bytecode else 1))
        output.seek(0)
        return code, output.read()


def _waited(pid: int, timeout_s: float) -> int | None:
    """The exit code of a child, which leads a group of its own; None where the group was ended for its time."""
    end, code, ended = time.monotonic() + timeout_s, None, False
    try:
        while time.monotonic() < end and not ended:
            done, status = os.waitpid(pid, os.WNOHANG)
            ended = done == pid
            code = os.waitstatus_to_exitcode(status) if ended else None
            time.sleep(0.05)
    finally:  # also where this process is interrupted
        if not ended:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return code


def _become_pytest(tree: Path, tests: Sequence[str], output: int, *, write_bytecode: bool) -> None:
    """Does not return."""
    code = -1
    try:
        os.setsid()
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.dont_write_bytecode = not write_bytecode
        if not write_bytecode:
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        for name in [name for name in sys.modules if name.split(".")[0] in ("mrl", "tests")]:
            del sys.modules[name]
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(REPO)))]
        options = ["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
        code = int(pytest.main([*options, *(f"tests/{test}" for test in tests)]))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code % 256)
