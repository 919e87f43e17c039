"""A folder of packages that are found first, and one of the only programs that are found."""

import importlib

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
