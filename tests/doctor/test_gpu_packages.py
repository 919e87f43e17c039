"""transformer-engine, apex, flash-attn, DeepEP, vLLM: absent, broken, whole, and PyPI's apex, which is another program."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys

import pytest

from mrl.doctor import gpu_packages
from mrl.doctor.imports import ImportResult, imports
from mrl.mcore_models import optional, versions
from tests.doctor.conftest import by_name
from tests.doctor.machines import BREAKS, distribution, package

NAMES = ["transformer-engine", "apex", "flash-attn-2", "flash-attn-3", "flash-attn-4", "deepep", "vllm"]


def look(gpu=True):
    """The whole way: what is there, imported in a process, in words."""
    here = gpu_packages.present()
    found = by_name(gpu_packages.section(imports(gpu_packages.steps(here)) if here else {}, gpu=gpu))
    assert list(found) == [f"package.{name}" for name in NAMES]
    return {name.removeprefix("package."): finding for name, finding in found.items()}


@pytest.fixture
def torch(site):
    package(site, "torch")


def test_absent_ones_cost_what_they_cost():
    on_gpu, on_cpu = look(gpu=True), look(gpu=False)
    assert on_gpu["transformer-engine"].level == "warning"
    assert (
        "one by one but for bfloat16 on H100 and B200" in on_gpu["transformer-engine"].what
        and "transformer-engine[pytorch]" in on_gpu["transformer-engine"].fix
    )
    assert {finding.level for finding in on_cpu.values()} == {"note"}
    assert "nothing is lost" in on_gpu["apex"].what and "all-to-all" in on_gpu["deepep"].what


def test_folders_of_a_packages_name_are_no_packages(site, torch):
    """A clone that was not installed, or anything else that a folder holds: Python imports it as a namespace."""
    package(site / "apex", "apex")
    (site / "vllm").mkdir()
    (site / "transformer_engine" / "pytorch").mkdir(parents=True)
    found = look()
    assert found["apex"].level == "note"
    assert found["apex"].what.startswith("apex (NVIDIA's) is not installed") and found["vllm"].level == "note"
    assert found["transformer-engine"].level == "warning"
    assert optional.fault_of("apex") == optional.fault_of("transformer_engine") == optional.ABSENT


ASKS = """
import os
from mrl.mcore_models import optional
assert optional.fault_of("transformer_engine") is None
from transformer_engine.pytorch import found, home
print(found, home, os.environ.get("CUDNN_HOME"), [l.split()[-1] for l in open("/proc/self/maps") if "libcudnn" in l][-1:])
"""


@pytest.mark.parametrize("named", [None, "CUDNN_PATH"])
def test_transformer_engine_finds_the_cudnn_that_came_with_torch(tmp_path, named):
    """As on a machine whose system has another: what transformer-engine asks for by name is there before it asks."""
    folder = tmp_path / "nvidia" / "cudnn" / "lib"
    folder.mkdir(parents=True)
    make = [
        "gcc",
        "-shared",
        "-x",
        "c",
        os.devnull,
        "-Wl,-soname,libcudnn_graph.so.9",
        "-o",
        folder / "libcudnn_graph.so.9",
    ]
    subprocess.run(make, check=True)
    (tmp_path / "transformer_engine" / "pytorch").mkdir(parents=True)
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    asks = "import ctypes, os\nhome = os.environ.get('CUDNN_HOME')\ntry:\n    ctypes.CDLL('libcudnn_graph.so.9')\n    found = True\nexcept OSError:\n    found = False\n"
    (tmp_path / "transformer_engine" / "pytorch" / "__init__.py").write_text(asks)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUDNN_")} | (
        {named: "/elsewhere"} if named else {}
    )
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    said = subprocess.run(
        [sys.executable, "-c", ASKS], capture_output=True, text=True, env=environment, check=True
    ).stdout
    home = str(folder.parent)
    assert said.split() == (
        ["False", "None", "None", "[]"] if named else ["True", home, "None", f"['{folder}/libcudnn_graph.so.9']"]
    )


def test_an_installation_that_broke_off_and_a_finder_that_raises(site, monkeypatch):
    """pip's folder without METADATA has no version; an editable install's finder may raise anything."""
    package(site, "flash_attn")
    (site / "flash_attn-2.8.3.dist-info").mkdir()
    assert "flash_attn" in [one.module for one in gpu_packages.present()]
    said = by_name(gpu_packages.section({"flash_attn": ImportResult()}, gpu=True))["package.flash-attn-2"]
    assert said.what == "flash-attn 2 loads, and is not used without transformer-engine"
    assert versions.version_of("flash-attn") == versions.NOT_INSTALLED

    class Finder:
        def find_spec(self, name, path=None, target=None):
            raise RuntimeError(name)

    monkeypatch.setattr("sys.meta_path", [Finder()])
    assert gpu_packages.present() == []


def test_an_apex_that_is_neither_is_named_by_its_place(site, torch):
    package(site, "apex", "def climb(): ...")
    found = look()["apex"]
    assert found.level == "warning" and found.what.startswith(f"apex at {site}/apex/__init__.py is a package of that")
    assert "PyPI" not in found.what and "rename it" in found.fix


def test_pypis_apex_is_told_from_nvidias(site, torch):
    """Both are called apex; NVIDIA's has the folder multi_tensor_apply, whether its kernels were built or not."""
    package(site, "apex", "from pyramid.config import Configurator")
    distribution(site, "apex", "0.9.10.dev0")
    for gpu in (True, False):
        found = look(gpu)["apex"]
        assert found.level == "warning" and found.what.startswith("apex 0.9.10.dev0 is PyPI's package of that name")
        assert "pip uninstall apex" in found.fix


def test_nvidias_apex_without_its_kernels_is_nvidias(site, torch):
    package(site, "apex", optimizers="")
    package(site / "apex", "multi_tensor_apply")
    found = look()["apex"]
    assert found.level == "warning" and "No module named 'amp_C'" in found.what and "PyPI" not in found.what
    assert "APEX_CUDA_EXT=1" in found.fix
    package(site, "amp_C")
    found = look()["apex"]
    assert found.level == "ok" and "is NVIDIA's and loads; its FusedAdam is used" in found.what
    package(site, "transformer_engine", pytorch="")
    assert "not used beside transformer-engine" in look()["apex"].what
    assert "not used without a GPU" in look(gpu=False)["apex"].what


@pytest.mark.parametrize("kind", ["ImportError", "OSError", "abort"])
def test_broken_ones_are_named_and_the_others_looked_at(site, torch, kind):
    text, says = BREAKS[kind]
    for name in ("transformer_engine", "flash_attn", "flash_attn_interface", "deep_ep"):
        package(site, name, text)
    package(site, "vllm", "__version__ = '1'")
    distribution(site, "vllm", "0.32.0+cpu")
    found = look()
    assert found["transformer-engine"].level == "fault"
    assert found["flash-attn-3"].level == "warning"
    if kind == "ImportError":
        assert found["flash-attn-2"].level == "warning" and "nothing is lost" in found["deepep"].what
    else:  # megatron-core catches no other
        assert {found[name].level for name in ("flash-attn-2", "deepep")} == {"fault"}
        assert "no run with it starts" in found["deepep"].what
    assert says.split(")")[0] in found["deepep"].what
    assert found["vllm"].level == "ok" and found["vllm"].what == "vLLM 0.32.0+cpu loads"
    assert ("engine.layer_spec=local" in found["transformer-engine"].fix) == (kind != "abort")
    if kind == "abort":
        assert "every run that sees a GPU" in found["transformer-engine"].what, "also one of engine.layer_spec local"
    without_gpu = look(gpu=False)
    assert (
        without_gpu["transformer-engine"].level == "note"
        and "not looked at without a GPU" in without_gpu["transformer-engine"].what
    )


def test_whole_ones(site, torch):
    for name, version in (
        ("transformer-engine", "2.20.9"),
        ("flash-attn", "2.8.3"),
        ("vllm", "0.20.0"),
        ("deep-ep", "1.2"),
    ):
        distribution(site, name, version)
    package(site, "transformer_engine", pytorch="")
    for name in ("flash_attn", "vllm", "deep_ep"):
        package(site, name)
    found = look()
    assert {name: found[name].level for name in ("transformer-engine", "flash-attn-2", "deepep")} == dict.fromkeys(
        ("transformer-engine", "flash-attn-2", "deepep"), "ok"
    )
    assert found["flash-attn-2"].what == "flash-attn 2 2.8.3 loads"
    assert found["vllm"].level == "note" and "tested with vLLM 0.26 to 0.32" in found["vllm"].what
    distribution(site, "transformer_engine", "2.17.0")
    shutil.rmtree(site / "transformer_engine-2.20.9.dist-info")
    assert look()["transformer-engine"].level == "note"


def test_flash_attn_4_lies_in_a_folder_without_flash_attn_2(site, torch):
    """As its wheel has it, and as transformer-engine finds it: by what pip knows, as flash_attn.cute."""
    package(site, "transformer_engine", pytorch="")
    distribution(site, "flash-attn-4", "4.0.0b11")
    assert "No module named 'flash_attn'" in look()["flash-attn-4"].what
    package(site / "flash_attn", "cute", interface="raise OSError('libcute.so')")
    found = look()
    assert found["flash-attn-4"].level == "fault" and "where that is an ImportError alone" in found["flash-attn-4"].what
    assert "flash-attn 2 is not installed" in found["flash-attn-2"].what
    package(site / "flash_attn", "cute", interface="raise ImportError('cutlass')")
    assert look()["flash-attn-4"].level == "warning" and look(gpu=False)["flash-attn-4"].level == "note"
    package(site / "flash_attn", "cute", interface="")
    assert look()["flash-attn-4"].what == "flash-attn 4 4.0.0b11 loads"


@pytest.mark.parametrize(
    ("beside", "level", "says"),
    [
        ({}, "note", "nothing is lost without transformer-engine"),
        ({"transformer_engine": ImportResult()}, "warning", "leaves it out"),
        ({"transformer_engine": ImportResult(error="ImportError: x.so")}, "warning", "and does not load either"),
    ],
)
def test_a_broken_flash_attn_costs_what_transformer_engine_makes_of_it(beside, level, says):
    """It imports flash-attn 3, and a flash-attn 2 of a version that it takes, and does not load where one of them fails
    (transformer-engine 2.20.2, pytorch/attention/dot_product_attention/backends.py)."""
    broken = {"flash_attn_interface": ImportResult(error="OSError: y.so"), **beside}
    found = by_name(gpu_packages.section(broken, gpu=True))["package.flash-attn-3"]
    assert found.level == level and found.what.endswith(says) is (level == "warning") and says in found.what


def test_nothing_is_looked_at_without_torch(site):
    package(site, "torch", "raise OSError('libtorch_cpu.so: no such file')")
    package(site, "transformer_engine", "1 / 0")
    package(site, "vllm")
    found = look()
    assert "was not looked at, as torch does not load" in found["transformer-engine"].what
    assert found["vllm"].level == "note"


def test_finders_that_raise_hide_a_package(site, monkeypatch):
    def find_spec(name, *_):
        if name == "vllm":
            raise AttributeError("a finder of an editable installation")

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert gpu_packages.present() == []
