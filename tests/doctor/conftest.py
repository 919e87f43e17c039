"""Parts of machines for the doctor to look at: packages that break as real ones do, and programs that answer as real ones."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder at the head of the import path, of this process and of those that the doctor starts."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    return folder


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder that is all of the PATH, with a shell's few words in it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("cat", "sleep"):
        (folder / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    return folder


def by_name(findings):
    """Findings by their names, which are each of one."""
    found = list(findings)
    assert len({finding.name for finding in found}) == len(found), [finding.name for finding in found]
    return {finding.name: finding for finding in found}


ABORTS = "import os, sys\nprint('terminate called after throwing an instance of std::bad_alloc', file=sys.stderr, flush=True)\nos.abort()"
HANGS = "import time\nprint('waiting for a lock')\ntime.sleep(600)"

BREAKS = {
    # how a package breaks: its __init__.py, and what the doctor says of it
    "ImportError": ("raise ImportError('x.so: undefined symbol: _ZN3c104cuda9SetDeviceEab')", "undefined symbol"),
    "OSError": (
        "raise OSError('libcudart.so.12: cannot open shared object file: No such file')",
        "OSError: libcudart.so.12: cannot open shared object file: No such file)",
    ),
    "RuntimeError": ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    "SystemExit": ("raise SystemExit('licence not found')", "SystemExit: licence not found"),
    "abort": (ABORTS, "its import ended by SIGABRT: terminate called after throwing"),
    "exit": ("import os\nos._exit(3)", "its import ended with exit code 3"),
}


def package(folder: Path, name: str, text: str = "", **modules: str) -> Path:
    """A package of one file, or of more: `modules` by name."""
    at = folder / name
    at.mkdir(parents=True, exist_ok=True)
    (at / "__init__.py").write_text(text + "\n", encoding="utf-8")
    for module, content in modules.items():
        (at / f"{module}.py").write_text(content + "\n", encoding="utf-8")
    return at


def distribution(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
    """What pip writes about an installed package."""
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")


def program(folder: Path, name: str, script: str) -> None:
    """A program of the shell."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def printing(text: str) -> str:
    """A script that prints `text`."""
    return f"cat <<'END'\n{text}\nEND"
