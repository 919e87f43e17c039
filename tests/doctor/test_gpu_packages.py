"""transformer-engine, apex, flash-attn, DeepEP, vLLM: absent, broken, whole, and PyPI's apex, which is another program."""

import os
import subprocess
import sys

import pytest

from mrl.doctor import gpu_packages
from mrl.mcore_models import optional
from tests.doctor.conftest import BREAKS, by_name, distribution, package

NAMES = ["transformer-engine", "apex", "flash-attn-2", "flash-attn-3", "flash-attn-4", "deepep", "vllm"]


def look(gpu=True):
    """The whole way: what is there, imported in a process, in words."""
    here = [package for package in gpu_packages.PACKAGES if package.is_present]
    loaded = {package.module: package.load() for package in here}
    found = by_name(gpu_packages.section(loaded, gpu=gpu))
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
    assert found["apex"].what.startswith("apex is not installed") and found["vllm"].level == "note"
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
    make = ["gcc", "-shared", "-x", "c", os.devnull, "-Wl,-soname,libcudnn_graph.so.9", "-o"]
    subprocess.run([*make, folder / "libcudnn_graph.so.9"], check=True)
    package(tmp_path, "transformer_engine")
    asks = "import ctypes, os\nhome = os.environ.get('CUDNN_HOME')\ntry:\n    ctypes.CDLL('libcudnn_graph.so.9')\n    found = True\nexcept OSError:\n    found = False\n"
    package(tmp_path / "transformer_engine", "pytorch", asks)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUDNN_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])} | (
        {named: "/elsewhere"} if named else {}
    )
    done = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, env=environment, check=True)
    found = ["True", str(folder.parent), "None", f"['{folder}/libcudnn_graph.so.9']"]
    assert done.stdout.split() == (["False", "None", "None", "[]"] if named else found)


def test_pypis_apex_is_told_from_nvidias(site, torch):
    """Both are called apex; NVIDIA's has the folder multi_tensor_apply, whether its kernels were built or not."""
    package(site, "apex", "from pyramid.config import Configurator")
    distribution(site, "apex", "0.9.10.dev0")
    for gpu in (True, False):
        found = look(gpu)["apex"]
        assert found.level == "warning" and found.what.startswith("apex 0.9.10.dev0 is another package of that")
        assert "pip uninstall apex" in found.fix


def test_broken_ones_are_named(site, torch):
    text, says = BREAKS["OSError"]
    package(site, "transformer_engine", text)
    package(site, "flash_attn", text)
    found = look()
    assert found["transformer-engine"].level == "fault" and says.split(")")[0] in found["transformer-engine"].what
    assert found["flash-attn-2"].level == look(gpu=False)["flash-attn-2"].level == "fault"
    assert "no run with it starts" in found["flash-attn-2"].what
    package(site, "flash_attn", BREAKS["ImportError"][0])
    assert look()["flash-attn-2"].level == "warning" and look(gpu=False)["flash-attn-2"].level == "note"
    assert look(gpu=False)["transformer-engine"].level == "note"


def test_whole_ones(site, torch):
    """flash-attn 4 is found by what pip knows, as transformer-engine finds it: it lies in the folder of flash-attn 2."""
    distributions = {"transformer-engine": "2.20.9", "flash-attn-4": "4.0.0b11", "vllm": "0.20.0"}
    for name, version in distributions.items():
        distribution(site, name, version)
    package(site, "transformer_engine", pytorch="")
    package(site / "flash_attn", "cute", interface="")
    package(site, "vllm")
    found = look()
    assert found["transformer-engine"].what == "transformer-engine 2.20.9 loads"
    assert found["flash-attn-4"].what == "flash-attn 4 4.0.0b11 loads"
    assert found["flash-attn-2"].what.startswith("flash-attn 2 is not installed")
    assert found["vllm"].level == "note" and "tested with vLLM 0.26 to 0.32" in found["vllm"].what
