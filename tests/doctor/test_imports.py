"""Packages that break on purpose: each is named with what it said."""

import json

import pytest

from mrl.doctor.findings import Finding
from mrl.doctor.imports import failure, load
from tests.doctor.machines import BREAKS, HANGS, package


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
