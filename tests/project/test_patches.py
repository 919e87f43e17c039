"""What mrl patches, copies or reads of other libraries' private parts is in mrl/patches.toml, and is what was read.

A version that changes such a function would train on wrong numbers elsewhere, and nobody would see it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest

from mrl import patches
from mrl.errors import UserError
from tools import patches as tool

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "developers" / "patches.md"
HASHED = {"replaces", "overrides", "copies"}


def names(target: str) -> set[str]:
    return {*re.split(r"[^\w*]+", target)}


def covered(file: str, name: str, kinds: set[str] | None = None) -> bool:
    """Whether a row has a name in its target or its reason, and is about the file."""
    return any(
        file in use["in"]
        and name in names(use["target"] + " " + use["why"])
        and (kinds is None or use["kind"] in kinds)
        for _, use in tool.rows()
    )


@pytest.mark.slow
def test_each_private_name_is_in_the_register():
    missing = {f"mrl/{file}:{line} {name}" for file, line, name in tool.private_names() if not covered(file, name)}
    assert not missing, "give these a row in mrl/patches.toml:\n" + "\n".join(sorted(missing))


def test_libraries_are_patched_in_one_place():
    found = [
        f"mrl/{file}:{line} {target}"
        for file, line, target in tool.assignments()
        if file != "patches.py" and not covered(file, target.rpartition(".")[2], {"sets"})
    ]
    assert not found, "use patches.replace:\n" + "\n".join(found)


def test_a_row_is_about_what_there_is():
    for library, use in tool.rows():
        about = f"{library}: {use['target']}"
        assert (ROOT / use["test"]).exists(), about
        for file in use["in"]:
            text = (ROOT / "mrl" / file).read_text(encoding="utf-8")
            named = names(use["target"].partition(":")[2]) - {"", "*"}
            said = use["kind"] in ("copies", "reads") and not any(map(tool.private, named))
            said = said or "*" in use["target"] or any(name in text for name in named)
            assert said, f"{about} is not in mrl/{file}"
        if use["kind"] in HASHED and "hashes" not in use:
            assert "No hash, because" in use["why"], about
        if "hashes" in use:
            assert ("warns" in use) != ("refuses" in use), about


def test_the_page_is_the_register():
    assert PAGE.read_text(encoding="utf-8") == tool.table(), "run make docs"


@functools.cache
def unread() -> dict[str, str]:
    """Functions whose hash the register lacks -> what there is instead, as the tool prints them of what is installed.

    In a process of its own, for all libraries: here some may be patched already."""
    libraries = [name for name, library in patches.register().items() if is_installed(library)]
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "patches.py", "hashes", *libraries],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


def is_installed(library: Mapping[str, str]) -> bool:
    return importlib.util.find_spec(library["package"].partition(".")[0]) is not None


@pytest.mark.slow
@pytest.mark.parametrize("library", patches.register())
def test_functions_are_those_that_were_read(library):
    if not is_installed(patches.register()[library]):
        pytest.skip(f"{library} is not installed")
    targets = {use["target"] for name, use in tool.rows() if name == library}
    found = [f"{target} {there}" for target, there in unread().items() if target in targets]
    assert not found, "read these functions, then add their hashes to mrl/patches.toml:\n" + "\n".join(found)


PATCHED = """
import sys
from mrl.mcore_models import cpu_stand_in
cpu_stand_in.prepare()
from mrl.engine import collective
from mrl.engine.megatron import engine
collective.share_device()
libraries = ("torch", "megatron", "transformers", "peft")
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] not in libraries:
        continue
    classes = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == name]
    for owner in (module, *classes):
        for key, value in list(vars(owner).items()):
            if not callable(value):
                continue  # objects of torch.backends ask for a GPU
            code = getattr(getattr(value, "__wrapped__", value), "__code__", None) or getattr(value, "__code__", None)
            files = [getattr(f, "co_filename", "") for f in (getattr(value, "__code__", None), code) if f]
            if any("/mrl/" in file for file in files):
                where = f"{name}:{owner.__qualname__}." if owner is not module else f"{name}:"
                print(where + key, id(code))
"""


def test_what_is_patched_in_a_process_is_in_the_register():
    """Loops over names escape a reading of the code. Here libraries are asked which of their functions are mrl's."""
    done = subprocess.run([sys.executable, "-c", PATCHED], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    found = dict(line.split() for line in done.stdout.splitlines())
    assert len(found) > 30, "nothing was found"
    known = {name for _, use in tool.rows() if use["kind"] not in ("reads", "copies") for name in names(use["target"])}
    known |= {"jit_fuser"}  # megatron's name for torch.compile, which is replaced while megatron is imported
    modules = tuple(use["target"][:-1] for _, use in tool.rows() if use["target"].endswith(":*"))
    named = {t for t in found if t.startswith(modules) or t.rpartition(".")[2].rpartition(":")[2] in known}
    codes = {found[t] for t in named}  # a library may have imported a function under other names
    unknown = [t for t in found if found[t] not in codes]
    assert not unknown, "give these a row in mrl/patches.toml:\n" + "\n".join(sorted(unknown))


def row(monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    """A register with one row, of a function that is not the one that was read."""
    use = {"target": "json:dumps", "kind": "replaces", "in": ["here.py"], "hashes": ["0" * 12], **more}
    register = {"a-library": {"package": "json", "versions": ["1.0", "1.1"], "uses": [use]}}
    monkeypatch.setattr(patches, "register", lambda: register)
    for name in ("check", "_compare"):  # the caches of this process know what was there before its patches
        monkeypatch.setattr(patches, name, functools.cache(getattr(patches, name).__wrapped__))


def test_another_function_that_may_be_wrong_silently_is_refused(monkeypatch):
    row(monkeypatch, refuses="rows could be others'")
    with pytest.raises(UserError) as told:
        patches.check("mrl.here")
    with pytest.raises(UserError):
        patches.replace({"json:dumps": None})
    assert str(told.value) == (
        "a-library 2.0.9: json:dumps is not the function of 1.0 and 1.1, which mrl replaces: rows could be others'; "
        "install a-library 1.1"
    )


def test_another_function_is_one_line_of_the_log(monkeypatch, caplog):
    row(monkeypatch, warns="it may be slow")
    with caplog.at_level(logging.WARNING):
        patches.check("mrl.here")
        patches.check("mrl.here")
    assert caplog.messages == [
        "a-library 2.0.9: json:dumps is not the function of 1.0 and 1.1, which mrl replaces: it may be slow"
    ]


def test_a_patch_is_taken_back(monkeypatch):
    import json

    row(monkeypatch, hashes=[])
    own = json.dumps
    with patches.replaced({"json:dumps": "other", "json:JSONEncoder.encode": "method"}):
        assert json.dumps == "other" and json.JSONEncoder.encode == "method"
    assert json.dumps is own and callable(json.JSONEncoder.encode)
    with pytest.raises(AttributeError):
        patches.replace({"json:no_such_name": None})


@pytest.mark.parametrize("change", ["", "# comment", '"""Docstring."""', "value = 2"])
def test_a_hash_is_of_the_code_alone(tmp_path, monkeypatch, change):
    for name, line in (("some_library", change), ("read_library", "")):
        (tmp_path / f"{name}.py").write_text(f"def f(x, y=1):\n    {line}\n    return x + y\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    read = patches.fingerprint("read_library:f")
    assert read == "b5467f24342e"  # the same in Python 3.11, 3.12 and 3.13
    assert (patches.fingerprint("some_library:f") == read) == (change != "value = 2")
    assert patches.fingerprint("some_library:g") == patches.fingerprint("no_library:f") == ""
