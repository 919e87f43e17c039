"""vLLM inside the trainer: an absent or old one ends a run before anything is loaded, an unknown one is a line."""

from __future__ import annotations

import pathlib

import pytest
from click.testing import CliRunner

from mrl import cli
from mrl.errors import ConfigError
from mrl.launch import start
from mrl.rollout import vllm_start
from tests.bad_input.mistakes import Workspace


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    Workspace(tmp_path).make()
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def install(monkeypatch, folder: pathlib.Path, version: str | None) -> None:
    """Puts a package vllm of a version where Python looks first. None: without metadata."""
    (folder / "site" / "vllm").mkdir(parents=True)
    (folder / "site" / "vllm" / "__init__.py").write_text("raise ImportError('libcudart.so.13 is not there')\n")
    if version is not None:
        metadata = folder / "site" / f"vllm-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder / "site"))


def run(monkeypatch, *overrides: str) -> tuple[bool, str, int]:
    """Whether the trainer is loaded, the last line, and the exit code."""
    loaded: list[object] = []
    monkeypatch.setattr(start, "trainer_of", lambda command: lambda config, line: loaded.append(config))
    made = CliRunner().invoke(cli.main, ["ppo", "ppo.yaml", "rollout.backend=vllm", *overrides])
    return bool(loaded), (made.stdout + made.stderr).splitlines()[-1], made.exit_code


@pytest.mark.parametrize(
    "version, words",
    [
        ("none", "needs vLLM beside mrl, and it is not installed; install it here, or start a server and give its url"),
        ("0.25.0", "is vLLM 0.25.0 here, and mrl needs 0.26 or newer; install 0.32, or set it to native"),
    ],
)
def test_a_run_without_it_ends_before_anything_is_loaded(folder, monkeypatch, version, words):
    if version != "none":
        install(monkeypatch, folder, version)
    loaded, line, code = run(monkeypatch)
    assert (loaded, code) == (False, 2) and line.endswith(words)


def test_a_run_with_it_or_with_servers_starts(folder, monkeypatch):
    assert run(monkeypatch, "rollout.server.urls=['http://a:1']")[0]
    install(monkeypatch, folder, "0.32.0")
    assert run(monkeypatch)[0]


@pytest.mark.parametrize("version", ["0.1.dev1+gabc1234", None])
def test_an_unknown_version_is_one_line(folder, monkeypatch, version):
    install(monkeypatch, folder, version)
    line = vllm_start.check_version(vllm_start.installed())
    assert line is not None and line.endswith(f"the one here is {version or 'of an unknown version'}")


def test_a_broken_one_is_named_with_its_error(folder, monkeypatch):
    install(monkeypatch, folder, "0.32.0+cu130")
    with pytest.raises(ConfigError, match=r"imported \(ImportError: libcudart.so.13 is not there\)"):
        vllm_start.import_vllm(gpu=True)
