"""Dockerfile, setup.py, constraints and pages on GPUs name the same versions, and the Dockerfile's filter keeps the image's torch.

No image is pulled: what `pip list` prints in one is put in its place.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from mrl.mcore_models.te_limits import GENERATIONS, AttentionShape, Gpu, kernels
from mrl.mcore_models.versions import NOT_INSTALLED

ROOT = Path(__file__).parents[2]
SETUP, DOCKERFILE, INSTALL, PAGE = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("setup.py", "Dockerfile", "docs/gpu-install.md", "docs/gpu.md")
)
IN_THE_IMAGE = """\
apex==0.1
filelock==3.16.1
flash_attn==2.7.4.post1+0
numpy==2.1.0
torch==2.13.0a0+9186a08b2c.nv26.7.1
torchvision==0.28.0a0+0
transformer_engine==2.17.0+0
triton==3.8.0+0
"""


def requirement(name: str) -> str:
    """What setup.py asks of a package."""
    [found] = re.findall(rf'"({name}[\[>=<~!][^"]*)"', SETUP)
    return found


def pinned(python: str) -> dict[str, str]:
    """The versions of a constraints file, by package."""
    text = (ROOT / f"constraints-{python}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


def steps() -> list[str]:
    """The Dockerfile's RUN lines, as the shell gets them."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    return [line.removeprefix("RUN ") for line in joined.splitlines() if line.startswith("RUN ")]


def step_in(folder: Path, command: str, packages: str) -> subprocess.CompletedProcess:
    """Runs a step in a folder whose python3 answers any call with a list of packages; mrl is `true`."""
    (folder / "packages").write_text(packages)
    (folder / "bin").mkdir(exist_ok=True)
    for name, body in (("python3", f"cat {folder}/packages"), ("mrl", "true")):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    return subprocess.run(["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def constrained(tmp_path) -> Path:
    """A folder after the step that makes the constraints."""
    (tmp_path / "constraints-3.12.txt").write_text((ROOT / "constraints-3.12.txt").read_text(encoding="utf-8"))
    done = step_in(tmp_path, steps()[1], IN_THE_IMAGE)
    assert done.returncode == 0, done.stderr
    return tmp_path


def test_the_page_names_what_is_installed():
    extra = requirement("transformer-engine")
    [engine] = set(re.findall(r"transformer_engine(?:_cu13|_torch)? (\d[\d.]*\d)", INSTALL))
    assert f"`{extra}`" in INSTALL and Requirement(extra).specifier.contains(engine)
    for python in ("3.11", "3.12"):
        assert f"torch {pinned(python)['torch']}" in INSTALL and f"`constraints-{python}.txt`" in INSTALL
        assert pinned(python)["megatron-core"] in INSTALL
        assert pinned(python)["transformer-engine"] == engine
    assert f"megatron-core {pinned('3.12')['megatron-core']} (`constraints-3.12.txt`)" in " ".join(INSTALL.split())


def test_the_page_has_the_kernels_of_each_generation():
    """The table of attention under transformer-engine is what runs are refused by."""
    rows = re.findall(r"^\| (\d+\.0 .+) \| (.+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    plain = AttentionShape(
        heads=32, groups=8, query_size=128, value_size=128, windowed=False, sinks=False, dropout=False, cp=1
    )
    shown = {}
    for generations, *cells in rows:
        for number in re.findall(r"(\d+)\.(\d) \(", generations):
            shown[tuple(map(int, number))] = [() if cell == "none" else tuple(cell.split(", ")) for cell in cells]
    for capability in GENERATIONS:
        found = [
            kernels(dataclasses.replace(plain, cp=cp), Gpu(capability, flash_attn), torch.bfloat16)
            for flash_attn, cp in ((Version("2.8.3"), 1), (NOT_INSTALLED, 1), (NOT_INSTALLED, 2))
        ]
        assert shown[capability] == found
    assert sorted(shown) == sorted(GENERATIONS)


def test_the_image_is_one_of_the_page_and_its_torch_is_taken():
    [image] = re.findall(r"^ARG IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    [torch] = re.findall(rf"^\| {image.split(':')[1]} \| (\S+) \|", INSTALL, re.MULTILINE)
    asked = Requirement(requirement("torch")).specifier
    assert image in INSTALL and asked.contains(torch, prereleases=True) and torch.startswith(pinned("3.12")["torch"])
    assert asked.contains(pinned("3.12")["torch"]) and not asked.contains("2.12.1")


def test_pages_name_the_interpreter_of_the_image():
    [venv] = re.findall(r"-m venv .*?(/\S+)", steps()[0])
    for page in (INSTALL, (ROOT / "docs/slurm.md").read_text(encoding="utf-8")):
        assert f"--python {venv}/bin/python3" in page
    assert f"PATH={venv}/bin:$PATH" in DOCKERFILE


def test_the_venv_has_the_images_packages_and_its_pip_needs_no_ensurepip(tmp_path):
    """Ubuntu's python3 has ensurepip in a package of its own, and without it venv makes no pip. Here: the pip of tests."""
    made, _, pips = steps()[0].replace("/opt/mrl/venv", f"{tmp_path}/venv").partition("&&")
    base = f'"{sys.executable}"'
    subprocess.run(["sh", "-c", made.replace("python3", base, 1)], check=True)
    assert not list(tmp_path.glob("venv/bin/pip*")), "ensurepip made it"
    assert "include-system-site-packages = true" in (tmp_path / "venv/pyvenv.cfg").read_text()
    assert re.fullmatch(rf" {tmp_path}/venv/bin/python3 -m pip install --ignore-installed pip", pips)


def test_what_is_copied_is_there_and_not_ignored():
    let_in = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")
    }
    copied = {name for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]}
    assert copied == let_in and all((ROOT / name).exists() for name in copied)
    assert {"setup.py", "README.md", "mrl"} <= copied


def test_constraints_are_mrls_but_for_what_the_image_built(constrained):
    pairs = re.findall(r"^([\w.-]+)==(\S+)$", (constrained / "constraints.txt").read_text(), re.MULTILINE)
    made = {canonicalize_name(name): version for name, version in pairs}
    image = {canonicalize_name(name): version for name, version in re.findall("(.+)==(.+)", IN_THE_IMAGE)}
    ours = {canonicalize_name(name): version for name, version in pinned("3.12").items()}
    assert len(made) == len(pairs), "a package has two versions"
    assert made == ours | {name: version for name, version in image.items() if name != "filelock"}
    assert made["filelock"] == ours["filelock"] != image["filelock"] and made["torch"] == image["torch"]


def test_a_torch_that_was_replaced_fails_the_build(constrained):
    last = steps()[-1]
    assert step_in(constrained, last, IN_THE_IMAGE + "wandb==0.31.0\n").returncode == 0
    for changed in (
        IN_THE_IMAGE.replace("2.13.0a0+9186a08b2c.nv26.7.1", "2.13.0"),
        IN_THE_IMAGE.replace("apex==0.1\n", ""),
    ):
        assert step_in(constrained, last, changed).returncode != 0
