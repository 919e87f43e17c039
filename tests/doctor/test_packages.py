"""Versions against those that are known to work, and installations that are mixed up."""

import re
from pathlib import Path

import pytest

from mrl.doctor import known, packages
from mrl.doctor.imports import ImportResult
from mrl.mcore_models.optional import ABSENT
from mrl.rollout.vllm_start import NEWEST
from tests.doctor.conftest import by_name

ROOT = Path(__file__).parents[2]
VERSIONS = dict.fromkeys(known.NEEDED_PACKAGES, "1.2.3") | known.versions(known.this_python())
FACTS = {"version": "2.13.0", "cuda": None, "hip": None, "cudnn": None, "nccl": None, "errors": {}}


def look(*, missing=(), broken=(), **changes):
    found = {name: ImportResult(version=VERSIONS[name]) for name in known.NEEDED_PACKAGES if name not in missing}
    found["torch"] = ImportResult(version=VERSIONS["torch"], facts=FACTS)
    return by_name(packages.section(found | changes, broken))


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("python", known.PYTHONS)
def test_known_versions_are_those_of_the_constraints(python):
    lines = (ROOT / f"constraints-{python}.txt").read_text().splitlines()
    pinned = {canonical(name): version for name, _, version in (line.partition("==") for line in lines) if version}
    assert {canonical(name): version for name, version in known.versions(python).items()}.items() <= pinned.items()
    assert f"\nvllm-cpu=={NEWEST}." in (ROOT / "constraints-vllm.txt").read_text()


def test_what_is_imported_is_what_setup_asks_for():
    asked = re.search(r"install_requires=\[(.*?)\n    \]", (ROOT / "setup.py").read_text(), re.DOTALL)[1]
    names = {canonical(name) for name in re.findall(r'^\s*"([A-Za-z0-9_-]+)', asked, re.MULTILINE)}
    assert names == {canonical(name) for name in known.NEEDED_PACKAGES}
    assert set(known.OF_A_FEATURE) | set(known.NEED_TORCH) <= set(known.NEEDED_PACKAGES)


def test_a_whole_installation_is_one_line():
    found = look()
    assert {finding.level for name, finding in found.items() if name.startswith(("package", "torch"))} == {"ok"}
    assert "megatron-core" in found["packages"].what and found["packages"].data["torch"] == VERSIONS["torch"]


def test_absent_and_broken_ones_say_what_they_cost():
    broken = ImportResult("OSError: libcudart.so.12: cannot open shared object file")
    found = look(missing=known.NEED_TORCH, jinja2=ImportResult(ABSENT), wandb=broken, torch=broken)
    assert found["packages.absent"].what == "not installed, so no run starts: jinja2"
    torch = found["package.torch"]
    assert torch.level == "fault" and torch.what.endswith("cannot open shared object file): a run does not work")
    assert torch.fix == f"pip install --force-reinstall 'torch=={VERSIONS['torch']}'"
    assert found["package.wandb"].level == "warning" and "log.wandb does not work" in found["package.wandb"].what
    assert not {"torch", "megatron-core"} & found["packages"].data.keys() and "torch.build" not in found
    assert found["packages.without_torch"].what == "not looked at without torch: safetensors, peft, megatron-core"
    alone = look(wandb=ImportResult(ABSENT))["packages.absent"]
    assert alone.what == "not installed, so log.wandb does not work: wandb"


def test_a_broken_megatron_names_what_may_have_broken_it():
    broken = {"megatron-core": ImportResult("ImportError: cannot import name 'x'")}
    found = look(broken=["transformer-engine"], **broken)["package.megatron-core"]
    assert found.level == "fault" and found.fix.startswith("mend or uninstall transformer-engine first")


def test_other_versions_than_the_known():
    """A build of the known version is the known version, and so is a post release."""
    post, build = VERSIONS["transformers"] + ".post1", VERSIONS["megatron-core"] + "+cu130"
    others = {"transformers": ImportResult(version=post), "megatron-core": ImportResult(version=build)}
    found = look(rich=ImportResult(version="13.0"), torch=ImportResult(version="2.99.1+cu130", facts=FACTS), **others)
    assert found["package.torch.version"].level == "warning"
    assert "2.99.1+cu130 is untried" in found["package.torch.version"].what
    assert [name for name in found if name.endswith(".version")] == ["package.torch.version"]
    assert "rich 13.0" in found["packages"].what


def test_what_torch_is_built_for():
    facts = FACTS | {"cuda": "13.0", "nccl": [2, 27, 3], "cudnn": 92501}
    found = look(torch=ImportResult(version="2.13.0", facts=facts))
    assert found["torch.build"].what == "torch 2.13.0 is built for CUDA 13.0, NCCL 2.27.3, cuDNN 9.25.1"
    assert look(torch=ImportResult(version="2.13.0"))["torch.build"].level == "fault"
