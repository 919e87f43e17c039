"""The wheel works outside of the repository: it is built, installed into a bare venv, and trains from another folder.

What mrl depends on is not installed again: a .pth file in the venv names the packages of the environment that runs the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import build
import pytest

from tests.trainers import tiny_runs

BUILT_FROM = ("mrl", "setup.py", "pyproject.toml", "README.md", "LICENSE")
ON_CPUS = ("--gpus-per-node", "0", "--processes-per-node", "2")


def run(*command: object, folder: Path) -> str:
    """What a command prints, without this tree on the import path; fails with its output where it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, capture_output=True, text=True, timeout=600,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, through the source distribution, as `python -m build` does."""
    tree = tmp_path_factory.mktemp("tree")
    for name in BUILT_FROM:
        source = tiny_runs.REPO / name
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, tree / name, **({"ignore": shutil.ignore_patterns("__pycache__")} if source.is_dir() else {}))
    environment = os.environ | {"PYTHONPATH": str(Path(build.__file__).parents[1])}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tree / "dist"), "."]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    [made] = (tree / "dist").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def binaries(wheel, tmp_path_factory) -> Path:
    """The folder of a bare venv's commands, `mrl` among them."""
    venv = tmp_path_factory.mktemp("bare") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, folder=wheel.parent)
    install = ("install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-compile", wheel)
    run(sys.executable, "-m", "pip", "--python", venv / "bin" / "python", *install, folder=wheel.parent)
    [packages] = (venv / "lib").glob("python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"


@pytest.mark.slow
def test_every_file_of_the_package_is_in_the_wheel(wheel):
    files = {p.relative_to(tiny_runs.REPO).as_posix() for p in (tiny_runs.REPO / "mrl").rglob("*") if p.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("mrl/")}
    assert any(name.endswith(".sbatch") for name in packed) and packed == files


@pytest.mark.nightly
def test_a_run_from_elsewhere(binaries, tmp_path):
    tiny_runs.make_inputs(tmp_path)
    config = tiny_runs.make_config(tmp_path, tmp_path / "run", train={"steps": 2}, engine={"backend": "megatron"})
    tiny_runs.write_config(tmp_path / "sft.yaml", config)
    where = run(binaries / "python", "-c", "import mrl; print(mrl.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(binaries.parent)
    run(binaries / "mrl", "sft", "sft.yaml", folder=tmp_path)
    assert [row["step"] for row in tiny_runs.steps(tmp_path / "run")] == [1, 2]
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


@pytest.mark.nightly
def test_a_job_script_from_elsewhere(binaries, tmp_path):
    """Its templates are data of the package."""
    tiny_runs.make_inputs(tmp_path)
    tiny_runs.write_config(tmp_path / "sft.yaml", tiny_runs.make_config(tmp_path, tmp_path / "run"))
    script = run(binaries / "mrl", "slurm", "render", "sft", "sft.yaml", "--time", "1:00:00", *ON_CPUS, folder=tmp_path)
    assert script.startswith("#!") and "#SBATCH --time=1:00:00" in script
