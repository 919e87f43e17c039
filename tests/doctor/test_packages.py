"""Versions against those that are known to work, and installations that are mixed up."""

import re
from pathlib import Path

import pytest

from mrl.doctor import known, packages
from mrl.doctor.imports import ImportResult
from mrl.doctor.probe import FACTS as FACTS_STEP
from mrl.rollout.vllm_start import TESTED
from tests.doctor.conftest import by_name
from tests.doctor.machines import distribution

ROOT = Path(__file__).parents[2]
HERE = dict.fromkeys((p.name for p in known.NEEDED_PACKAGES), "1.2.3") | known.versions(known.this_python())
FACTS = {
    "version": "2.13.0", "cuda": None, "hip": None, "cudnn": None, "nccl": None,
    "errors": {},
}  # fmt: skip


def imported(**changes):
    """All that is needed, as it should be; `changes` by name."""
    found = {
        p.name: ImportResult(version=HERE[p.name], file=f"/site/{p.name}/__init__.py") for p in known.NEEDED_PACKAGES
    }
    return (
        found
        | {FACTS_STEP: ImportResult(facts=FACTS)}
        | {name.replace("torch_facts", FACTS_STEP): one for name, one in changes.items()}
    )


LOADS = ImportResult()


def said(megatron=LOADS, **changes):
    return by_name(packages.section(imported(**changes), megatron))


@pytest.mark.parametrize("python", known.PYTHONS)
def test_known_versions_are_those_of_the_constraints(python):
    lines = (ROOT / f"constraints-{python}.txt").read_text().splitlines()
    pinned = {
        packages.canonical(name): version for name, _, version in (line.partition("==") for line in lines) if version
    }
    assert {
        packages.canonical(name): version for name, version in known.versions(python).items()
    }.items() <= pinned.items()
    assert f"\nvllm-cpu=={TESTED[1]}." in (ROOT / "constraints-vllm.txt").read_text()


def test_what_is_imported_is_what_setup_asks_for():
    asked = re.search(r"install_requires=\[(.*?)\n    \]", (ROOT / "setup.py").read_text(), re.DOTALL)[1]
    names = {packages.canonical(name) for name in re.findall(r'^\s*"([A-Za-z0-9_-]+)', asked, re.MULTILINE)}
    assert names == {packages.canonical(p.name) for p in known.NEEDED_PACKAGES} | {known.MEGATRON}


def test_a_whole_installation_is_one_line(monkeypatch):
    monkeypatch.setattr(packages, "installed", lambda: dict(HERE))
    found = said()
    assert {finding.level for name, finding in found.items() if name.startswith(("package", "torch"))} == {"ok"}
    assert "megatron-core" in found["packages"].what and found["packages"].data["torch"] == HERE["torch"]


def test_absent_and_broken_ones_say_what_they_cost(monkeypatch):
    have = {name: version for name, version in HERE.items() if name != "jinja2"}
    monkeypatch.setattr(packages, "installed", lambda: have)
    broken = ImportResult(error="OSError: libcudart.so.12: cannot open shared object file")
    gone = ImportResult(error="ModuleNotFoundError: No module named 'jinja2'")
    blocked = ImportResult(blocked_by="torch")
    found = said(blocked, jinja2=gone, wandb=broken, torch=broken, torch_facts=blocked)
    assert found["package.jinja2"].what == "jinja2 is not installed: no chat template is rendered"
    assert found["package.jinja2"].fix == f"pip install -c constraints-{packages.known.this_python()}.txt jinja2"
    torch = found["package.torch"]
    assert torch.level == "fault" and torch.what.endswith(
        "it is built for another CUDA than is here: nothing trains, generates or converts"
    )
    assert torch.fix == f"pip install --force-reinstall 'torch=={HERE['torch']}'"
    assert found["package.wandb"].level == "warning" and "log.wandb does not work" in found["package.wandb"].what
    assert not {"torch", "megatron-core"} & found["packages"].data.keys() and "torch.build" not in found


def test_megatron_core_that_is_absent_or_does_not_load(monkeypatch):
    name = "package.megatron-core"
    without = {n: v for n, v in HERE.items() if n != known.MEGATRON}
    monkeypatch.setattr(packages, "installed", lambda: without)
    assert name not in said() and "megatron-core of an unknown version" in said()["packages"].what, (
        "not by pip, but here"
    )
    assert "constraints" not in said()["packages"].what, "what is not known is not the tried one"
    monkeypatch.setattr(packages, "is_found", lambda module: module != "megatron")
    for came_to in (
        ImportResult(error="ModuleNotFoundError: No module named 'megatron'"),
        ImportResult(blocked_by="torch"),
    ):
        absent = said(came_to)[name]
        assert absent.level == "fault"
        assert absent.what.startswith("megatron-core is not installed: engine.backend: megatron")
    monkeypatch.setattr(packages, "installed", lambda: HERE)
    found = said(ImportResult(error="ImportError: cannot import name 'x'"))
    assert found[name].level == "fault" and "megatron-core" not in found["packages"].what
    assert f"megatron-core {HERE[known.MEGATRON]} does not load (ImportError" in found[name].what


def test_megatron_core_that_was_not_come_to_is_not_listed_as_loading(monkeypatch):
    monkeypatch.setattr(packages, "installed", lambda: HERE)
    found = said(ImportResult(blocked_by="what a run will use"))
    assert "megatron-core" not in found["packages"].what and "megatron-core" not in found["packages"].data
    assert found["package.megatron-core"].what == (
        f"megatron-core {HERE[known.MEGATRON]} was not looked at, as what a run will use cannot be told"
    )
    monkeypatch.setattr(packages, "installed", lambda: {n: v for n, v in HERE.items() if n != known.MEGATRON})
    clone = said(ImportResult(blocked_by="what a run will use"))["package.megatron-core"]  # on PYTHONPATH alone
    assert clone.what.startswith("megatron-core of an unknown version was not looked at")
    torch = said(
        ImportResult(blocked_by="torch"), torch=ImportResult(error="x"), torch_facts=ImportResult(blocked_by="torch")
    )
    assert torch["packages.without_torch"].what == "not looked at, as torch does not load: megatron-core"


def test_other_versions_than_the_known(monkeypatch):
    have = HERE | {"torch": "2.99.1+cu130", "transformers": HERE["transformers"] + ".post1", "rich": "13.0"}
    monkeypatch.setattr(packages, "installed", lambda: have)
    found = said(
        torch=ImportResult(version=have["torch"]), rich=ImportResult(version="13.0"), transformers=ImportResult()
    )
    assert found["package.torch.version"].level == "warning"
    assert "2.99.1+cu130 is untried" in found["package.torch.version"].what
    assert not {"package.transformers.version", "package.rich.version"} & found.keys()
    assert "rich 13.0" in found["packages"].what


def test_a_build_of_the_known_version_is_the_known_version(monkeypatch):
    monkeypatch.setattr(packages, "installed", lambda: HERE | {"torch": HERE["torch"] + "+cu130"})
    assert "package.torch.version" not in said(torch=ImportResult(version=HERE["torch"] + "+cu130"))


def test_a_python_that_nothing_is_known_of(monkeypatch):
    monkeypatch.setattr(known, "this_python", lambda: "3.99")
    monkeypatch.setattr(packages, "installed", lambda: HERE)
    found = said()
    assert found["python"].level == "warning" and "3.11 and 3.12" in found["python"].what
    assert found["packages"].what.startswith("these load: ")


def test_what_torch_is_built_for(monkeypatch):
    monkeypatch.setattr(packages, "installed", lambda: HERE)
    facts = FACTS | {"cuda": "13.0", "nccl": [2, 27, 3], "cudnn": 92501}
    found = said(torch_facts=ImportResult(facts=facts))
    assert found["torch.build"].what == "torch 2.13.0 is built for CUDA 13.0, NCCL 2.27.3, cuDNN 9.25.1"


def test_torch_that_cannot_be_asked(monkeypatch):
    monkeypatch.setattr(packages, "installed", lambda: HERE)
    found = said(torch_facts=ImportResult(error="its import ends the process (ended by SIGSEGV)"))
    assert found["torch.build"].level == "fault" and "cannot be asked" in found["torch.build"].what


def test_places_that_are_wrong(monkeypatch):
    monkeypatch.setattr(packages, "installed", lambda: HERE)
    found = said(fsspec=ImportResult(version="1.0", file="/mine/fsspec.py"), datasets=ImportResult(is_package=False))
    assert (
        found["package.fsspec.place"].what
        == f"fsspec is 1.0 at /mine/fsspec.py, and pip has installed {HERE['fsspec']}"
    )
    assert found["package.datasets.place"].level == "fault"


def test_mrl_that_is_installed_in_another_version(site):
    distribution(site, "mrl", "0.0.1")
    found = packages._mrl()
    assert found.level == "warning" and found.what.endswith("runs, and 0.0.1 is installed")
