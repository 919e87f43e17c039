"""Packages that break on purpose: each is named with what it said, and those after it are imported all the same."""

import json

import pytest

from mrl.doctor.findings import Finding
from mrl.doctor.imports import Step, hint, imports
from mrl.doctor.probe import FACTS
from tests.doctor.machines import BREAKS, HANGS, package


def test_each_way_of_breaking_is_named_and_the_rest_goes_on(site):
    package(site, "mrl_good", "__version__ = '1.2.3'\nprint('a line that is no answer')")
    names = [f"mrl_{number}" for number in range(len(BREAKS))]
    for name, (text, _) in zip(names, BREAKS.values(), strict=True):
        package(site, name, text)
    steps = [
        Step("first", ("mrl_good",)),
        *(Step(n, (n,)) for n in names),
        Step("last", ("mrl_good",)),
        Step("gone", ("mrl_gone",)),
    ]
    found = imports(steps)
    assert list(found) == ["first", *names, "last", "gone"]
    for name, (kind, (_, says)) in zip(names, BREAKS.items(), strict=True):
        error = found[name].error
        assert error is not None and not found[name].works, kind
        line = Finding("x", "note", f"x does not load ({error}){hint(error)}").what
        assert says in line and "\n" not in line, (kind, line)
    assert found["first"].works and found["last"].version == "1.2.3" and found["last"].file.startswith(str(site))
    assert found["gone"].error == "ModuleNotFoundError: No module named 'mrl_gone'"


def test_one_that_hangs_is_given_up(site):
    package(site, "mrl_hangs", HANGS)
    package(site, "mrl_good")
    found = imports([Step("a", ("mrl_hangs",)), Step("b", ("mrl_good",))], limit_s=0.5)
    assert found["a"].error == "its import is not done after 0.5 s"
    assert found["b"].works


@pytest.mark.parametrize("kind", ["OSError", "abort"])
def test_what_needs_a_broken_one_is_not_tried(site, kind):
    package(site, "mrl_below", BREAKS[kind][0])
    package(site, "mrl_above", "1 / 0")
    steps = [
        Step("below", ("mrl_below",)),
        Step("above", ("mrl_above",), "below"),
        Step("top", ("mrl_above",), "above"),
    ]
    found = imports(steps)
    assert found["above"].blocked_by == "below" and found["above"].error is None and not found["above"].works
    assert found["top"].blocked_by == "above"


def test_who_imports_one_that_ended_a_process_finds_none(site):
    """Or each of them would end one, too, and be blamed for it."""
    package(site, "mrl_crashes", BREAKS["segmentation fault"][0])
    package(site, "mrl_user", "try:\n    import mrl_crashes\nexcept ImportError:\n    pass")
    found = imports([Step("one", ("mrl_crashes",)), Step("other", ("mrl_user",))])
    assert "SIGSEGV" in found["one"].error and found["other"].works


def test_a_folder_of_that_name_is_no_package(site):
    (site / "mrl_folder").mkdir()
    assert imports([Step("a", ("mrl_folder",))])["a"].is_package is False


def test_a_python_that_does_not_start(site):
    (site / "json.py").write_text("raise ImportError('my own json')")
    found = imports([Step("a", ("mrl_a",)), Step("b", ("mrl_b",))])
    assert {name: "Python does not start" in one.error and "my own json" in one.error for name, one in found.items()} == {
        "a": True, "b": True,
    }  # fmt: skip


def test_what_prints_as_python_starts_is_not_taken_for_an_answer(site):
    for name in ("usercustomize.py", "sitecustomize.py"):
        (site / name).write_text(
            "print('hello'); print('[1]'); print('{\"a\": '); print('{\"name\": 1, \"device\": []}')"
        )
    package(site, "mrl_good")
    assert imports([Step("a", ("mrl_good",))])["a"].works


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
    found = imports([Step("torch", ("torch",)), Step(FACTS, needs="torch")])[FACTS]
    assert found.works, found.error
    facts = json.loads(json.dumps(found.facts))
    assert facts["errors"].keys() == {"gpu 0", "init"} and "too old" in facts["errors"]["init"]
    assert (facts["count"], facts["gpus"], facts["nccl"], facts["cudnn"]) == (1, [], [2, 27], 92501)
