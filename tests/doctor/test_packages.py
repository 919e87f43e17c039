"""Packages that break on purpose, each named with what it said; versions against tested ones; mixed installations."""

import json
import re
from pathlib import Path

import pytest

from mrl.doctor import packages
from mrl.doctor.ask import ImportResult, failure, load
from mrl.doctor.findings import Finding
from mrl.mcore_models.optional import ABSENT
from mrl.rollout.vllm_start import NEWEST
from tests.doctor.conftest import BREAKS, HANGS, by_name, package

ROOT = Path(__file__).parents[2]
VERSIONS = dict.fromkeys(packages.NEEDED_PACKAGES, "1.2.3") | packages.versions(packages.this_python())
FACTS = {"version": "2.13.0", "cuda": None, "hip": None, "cudnn": None, "nccl": None, "errors": {}}


def look(*, missing=(), broken=(), **changes):
    found = {name: ImportResult(version=VERSIONS[name]) for name in packages.NEEDED_PACKAGES if name not in missing}
    found["torch"] = ImportResult(version=VERSIONS["torch"], facts=FACTS)
    return by_name(packages.section(found | changes, broken))


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("python", packages.PYTHONS)
def test_known_versions_are_those_of_the_constraints(python):
    lines = (ROOT / f"constraints-{python}.txt").read_text().splitlines()
    pinned = {canonical(name): version for name, _, version in (line.partition("==") for line in lines) if version}
    assert {canonical(name): version for name, version in packages.versions(python).items()}.items() <= pinned.items()
    assert f"\nvllm-cpu=={NEWEST}." in (ROOT / "constraints-vllm.txt").read_text()


def test_what_is_imported_is_what_setup_asks_for():
    asked = re.search(r"install_requires=\[(.*?)\n    \]", (ROOT / "setup.py").read_text(), re.DOTALL)[1]
    names = {canonical(name) for name in re.findall(r'^\s*"([A-Za-z0-9_-]+)', asked, re.MULTILINE)}
    assert names == {canonical(name) for name in packages.NEEDED_PACKAGES}
    assert set(packages.OF_A_FEATURE) | set(packages.NEED_TORCH) <= set(packages.NEEDED_PACKAGES)


def test_a_whole_installation_is_one_line():
    found = look()
    assert {finding.level for name, finding in found.items() if name.startswith(("package", "torch"))} == {"ok"}
    assert "megatron-core" in found["packages"].what and found["packages"].data["torch"] == VERSIONS["torch"]


def test_absent_and_broken_ones_say_what_they_cost():
    broken = ImportResult("OSError: libcudart.so.12: cannot open shared object file")
    found = look(missing=packages.NEED_TORCH, jinja2=ImportResult(ABSENT), wandb=broken, torch=broken)
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


# -- imports --


@pytest.mark.parametrize("kind", BREAKS)
def test_each_way_of_breaking_is_named(site, kind):
    text, says = BREAKS[kind]
    package(site, "mrl_breaks", text)
    found = load("mrl_breaks", ["mrl_breaks"])
    line = Finding("x", "note", f"x {failure(found.error)}").what
    assert not found.works and line.startswith("x does not load (") and says in line and "\n" not in line, line


def test_one_that_loads_has_a_version_and_one_that_hangs_is_given_up(site):
    package(site, "mrl_good", "__version__ = '1.2.3'\nprint('a line that is no answer')")
    package(site, "mrl_hangs", HANGS)
    assert load("mrl_good", ["mrl_good"]).version == "1.2.3"
    assert load("mrl_hangs", ["mrl_hangs"], limit_s=0.5).error.startswith("its import did not end within 0.5 s")


def test_torch_says_what_it_is(site):
    """A torch of few words: what it cannot be asked is under `errors`."""
    package(
        site, "torch",
        "import types\n__version__ = '9.9+x'\nversion = types.SimpleNamespace(cuda='13.0', hip=None)\n"
        "def refuse(*_): raise RuntimeError('the driver is too old')\n"
        "cuda = types.SimpleNamespace(device_count=lambda: 1, is_available=lambda: False, get_device_properties=refuse, init=refuse,"
        " nccl=types.SimpleNamespace(version=lambda: (2, 27)))\n"
        "backends = types.SimpleNamespace(cudnn=types.SimpleNamespace(version=lambda: 92501))",
    )  # fmt: skip
    found = load("torch", ["torch"])
    assert found.works, found.error
    facts = json.loads(json.dumps(found.facts))
    assert facts["errors"].keys() == {"gpu 0", "init"} and "too old" in facts["errors"]["init"]
    assert (facts["count"], facts["gpus"], facts["nccl"], facts["cudnn"]) == (1, [], [2, 27], 92501)
    package(site, "torch", "import os\n__version__ = '1'\ndef __getattr__(name): os.abort()")
    assert load("torch", ["torch"]).works and load("torch", ["torch"]).facts is None
