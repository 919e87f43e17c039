"""`mrl doctor` as a whole: in broken environments it names what is broken, goes on with the rest, and exits with 2."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from mrl.commands.doctor import COMMAND
from mrl.doctor import examine, packages
from mrl.doctor.findings import LEVELS, Finding, Section, gib
from tests.doctor.conftest import BREAKS, package

ROOT = Path(__file__).parents[2]
TITLES = [
    "Python and packages", "GPUs", "Packages for GPUs and rollouts",
    "What a run will use: engine.layer_spec auto, bfloat16 (of your model: mrl sft CONFIG --dry-run)",
    "Processors, memory and limits", "Disks", "Network", "Environment variables",
]  # fmt: skip


def doctor(*arguments, python=sys.executable, path=(), root=ROOT, folder=None, **environment):
    """`mrl doctor` in a process of its own. path: folders that are looked in first for packages; root: where mrl is."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    inherited |= {"PYTHONPATH": os.pathsep.join(map(str, [*path, root])), "OMP_NUM_THREADS": "1", **environment}
    command = [str(python), "-m", "mrl", "doctor", *arguments]
    done = subprocess.run(command, env=inherited, cwd=folder, capture_output=True, text=True, timeout=600)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def findings(text):
    report = json.loads(text)
    assert [section["title"] for section in report["sections"]][: len(TITLES)] == TITLES
    found = {finding["name"]: finding for section in report["sections"] for finding in section["findings"]}
    assert len(found) == sum(report["counts"].values()), "names are unique"
    assert not [finding for name, finding in found.items() if name.startswith("unseen.")]
    assert all(finding["fix"] for finding in found.values() if finding["level"] in ("warning", "fault"))
    return found


@pytest.mark.slow
def test_where_much_is_broken(tmp_path):
    """Each in another way; torch among them, so that nothing can be said of what a run would use."""
    ways = {"torch": "OSError", "wandb": "SystemExit", "rich": "abort"}  # test_packages.py has the others
    for name, kind in ways.items():
        package(tmp_path, name, BREAKS[kind][0])
    package(tmp_path, "apex", "from pyramid.config import Configurator")
    done = doctor("--json", path=[tmp_path], folder=tmp_path)
    found = findings(done.stdout)
    assert done.returncode == 2 and done.stderr == ""
    for name, kind in ways.items():
        line = found[f"package.{name}"]["what"]
        assert " does not load (" in line and BREAKS[kind][1][:30] in line, line
    assert found["package.torch"]["level"] == "fault" and found["package.wandb"]["level"] == "warning"
    assert "torch does not load" in found["used"]["what"]
    assert {"disk.here", "memory", "network.interfaces"} <= found.keys(), "the rest goes on"


def samples_of_docs():
    """The blocks of docs/doctor.md that begin with a section, as lines without their numbers and paths."""
    blocks = re.split(r"\n(?! {4}|\n)[^\n]*", (ROOT / "docs/doctor.md").read_text())
    found = [[line[4:] for line in block.split("\n") if line.strip()] for block in blocks]
    return [as_compared(lines) for lines in found if lines and lines[0] in TITLES]


def as_compared(lines):
    """Findings, each on one line, and lines of the table; what every machine has otherwise is left out."""
    joined = re.sub(r"\n {6,}", " ", "\n".join(lines)).split("\n")
    return [re.sub(r"/[\w./-]*|\d[\d.,]*(\+\w+)?", "#", re.sub(r" +", " ", line)) for line in joined]


def of_any_machine(lines):
    """Without what is left out, and what this Python and its compilers are."""
    return [line for line in lines if not line.startswith((" ok C", " note no C", " ...", " ok Python", " ok mrl"))]


@pytest.mark.slow
def test_text_fits_a_terminal_and_is_that_of_the_docs(tmp_path):
    """As docs/doctor.md has it: a torch for another CUDA, and PyPI's apex."""
    error = "libcudart.so.12: cannot open shared object file: No such file or directory"
    package(tmp_path, "torch", f"raise OSError({error!r})")
    package(tmp_path, "apex", "from pyramid.config import Configurator")
    for name in ("transformers", "datasets", "wandb", "peft"):
        package(tmp_path, name)
    done = doctor("--collectives", path=[tmp_path], folder=tmp_path)
    assert done.returncode == 2
    lines = done.stdout.splitlines()
    assert [line for line in lines if line in TITLES] == TITLES
    assert not [line for line in lines if len(line) > 100 and " " in line.strip().removeprefix("-> ")[:80]]
    [summary] = [line for line in lines if line.startswith("2 faults, ")]
    assert summary.endswith(" s)")
    sample, printed = of_any_machine(samples_of_docs()[0]), as_compared(lines)
    assert len(sample) > 5 and not [line for line in sample if line not in printed]


def test_a_section_that_breaks_is_a_finding_and_the_others_stay(monkeypatch):
    def breaks():
        yield Finding("a", "ok", "found before")
        raise ZeroDivisionError("of our own")

    section = examine._section("Disks", breaks)
    assert [finding.level for finding in section.findings] == ["ok", "warning"]
    assert "ZeroDivisionError: of our own): a fault of mrl" in section.findings[1].what


def test_findings_say_what_to_do():
    for level in LEVELS[2:]:
        with pytest.raises(AssertionError, match="says what to do"):
            Finding("a", level, "bad")
    assert Finding("a", "note", "two\nlines").what == "two lines"
    assert [gib(size) for size in (2**50, 1.5 * 2**30, 64 * 2**20, 4096)] == ["1024 TiB", "1.5 GiB", "64 MiB", "4 KiB"]


def test_the_table_and_long_words_are_shown_whole():
    long = "/a/" + "b" * 120
    section = Section("Title", [Finding("a", "warning", f"see {long}", "do it")], [["model", "x"], ["dense", "y"]])
    lines = list(examine.text(examine.Report([section], 1.0, "host")))
    assert lines[:3] == ["Title", "  model  x", "  dense  y"] and any(long in line for line in lines)
    assert "0 faults, 1 warning (1.0 s)" in lines


def test_the_doctor_itself_imports_no_package():
    """What looks must not end by what it looks at."""
    code = "import sys, mrl.doctor.examine\nprint(sorted({name.split('.')[0] for name in sys.modules}))"
    names = ast.literal_eval(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )
    foreign = {name for name in names if name not in sys.stdlib_module_names and not name.startswith(("_", "mrl"))}
    assert not foreign - {"sitecustomize", "usercustomize", "distutils"}, foreign


EXAMPLES = [line.strip().split("   ")[0] for line in COMMAND.examples.strip().splitlines()]


@pytest.mark.nightly
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_of_the_help_on_this_machine(tmp_path, example):
    """The whole of it, with real packages: what torch, megatron-core and the functions that choose say here."""
    command = subprocess.list2cmdline([sys.executable, "-m", "mrl"])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(
        example.replace("mrl", command, 1),
        shell=True,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert shown.returncode in (0, 2) and "Traceback" not in shown.stderr, shown.stderr
    if "--json" in example:
        written = (tmp_path / "doctor.json").read_text()
        found, report = findings(written), json.loads(written)
        assert "torch.build" in found and found["used.optimizer"]["level"] == "ok", written
        assert (report["worst"] == "fault") == (shown.returncode == 2)
        assert report["sections"][3]["table"][0] == ["model", "cp", "layers", "attention", "norm", "experts"]
        assert importlib.metadata.version("megatron-core") in found["packages"]["what"]
        assert not {name for name in found if name.startswith(("package.torch", "package.megatron-core"))}
    else:
        lines = shown.stdout.splitlines()
        assert [line for line in lines if line in TITLES] == TITLES
        if "note     no GPU: " in shown.stdout:
            sample = samples_of_docs()[1]
            sample = of_any_machine(sample[: sample.index("Processors, memory and limits")])
            assert len(sample) > 15 and not [line for line in sample if line not in as_compared(lines)]
        assert ("gloo: two processes sum" in shown.stdout) == ("--collectives" in example)


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """The Python of a fresh venv: nothing is installed but click, which the command line is made with, and mrl is copied
    into it: beside its sources there may be what pip wrote of an installation."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=False)
    [site] = (folder / "lib").glob("python*/site-packages")
    (site / "click").symlink_to(Path(sysconfig.get_path("purelib"), "click"))
    (site / "mrl").symlink_to(ROOT / "mrl")
    return folder / "bin" / "python"


@pytest.mark.slow  # one process
def test_in_a_fresh_venv_without_torch(bare, tmp_path):
    done = doctor("--json", python=bare, root=tmp_path, folder=tmp_path)
    found = findings(done.stdout)
    assert done.returncode == 2 and done.stderr == ""
    absent = found["packages.absent"]
    assert absent["level"] == "fault"
    assert set(absent["data"]["absent"]) == set(packages.NEEDED_PACKAGES) - {"click", *packages.NEED_TORCH} | {"torch"}
    assert "pip install" in absent["fix"] and not [name for name in found if name.startswith("package.torch")]
    assert "click" in found["packages"]["data"], "it loads, though pip knows nothing of it"
    assert found["mrl"]["level"] == "note" and {"disk.here", "memory", "network.interfaces"} <= found.keys()
