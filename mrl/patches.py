"""Patches other libraries, and compares what mrl patches or copies with the versions that were read.

`patches.toml` is the register: all that mrl patches, copies or reads of other libraries' private parts. It has hashes
of the functions that mrl replaces, overrides or copies, one for each version read. For another function the log gets
one line. It is an error if numbers could be wrong and nothing would show it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import inspect
import logging
import pathlib
import pkgutil
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from mrl.errors import UserError

logger = logging.getLogger(__name__)


@functools.cache
def register() -> dict[str, Any]:
    """Returns the libraries of patches.toml: the versions that were read, and the uses."""
    return tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def replace(new: Mapping[str, Any]) -> dict[str, Any]:
    """Sets attributes of libraries, each named as in the register: "module:name" or "module:Class.name".

    Returns the values before; `replace` takes them back. Raises UserError as `check` does.
    """
    found: dict[str, tuple[Any, str]] = {}
    for target in new:  # all are found before one is set
        _compare(target)
        module, _, path = target.partition(":")
        *parents, name = path.split(".")
        owner = pkgutil.resolve_name(f"{module}:{'.'.join(parents)}")
        found[target] = owner, name
    old = {target: getattr(owner, name) for target, (owner, name) in found.items()}
    for target, (owner, name) in found.items():
        setattr(owner, name, new[target])
    return old


@contextlib.contextmanager
def replaced(new: Mapping[str, Any]) -> Iterator[None]:
    """Sets attributes as `replace` does; they have their old values again afterwards."""
    old = replace(new)
    try:
        yield
    finally:
        replace(old)


@functools.cache
def check(user: str) -> None:
    """Compares the functions behind a module's overrides and copies with the versions that were read.

    user: the module's `__name__`. Raises UserError if another one could make numbers wrong and nothing would show it.
    """
    path = user.removeprefix("mrl.").replace(".", "/") + ".py"
    for library in register().values():
        for use in library["uses"]:
            if path in use["in"]:
                _compare(use["target"])


@functools.cache
def _compare(target: str) -> None:
    """Compares a function with the hashes of its row, once: after that it may be one of mrl's."""
    for name, library in register().items():
        for use in library["uses"]:
            hashes = use.get("hashes")
            is_about = target == use["target"] or target.startswith(use["target"] + ".")
            if not is_about or not hashes or fingerprint(use["target"]) in hashes:
                continue
            versions = " and ".join(library["versions"])
            version = importlib.import_module(library["package"]).__version__
            line = f"{name} {version}: {use['target']} is not the function of {versions}, which mrl {use['kind']}"
            if "refuses" in use:
                raise UserError(f"{line}: {use['refuses']}; install {name} {library['versions'][-1]}")
            logger.warning("%s: %s", line, use["warns"])


def fingerprint(target: str) -> str:
    """Returns a hash of a function's code, without docstrings and comments; "" if there is no such function."""
    try:
        function = pkgutil.resolve_name(target)
        text = inspect.getsource(inspect.unwrap(function))
    except (AttributeError, ImportError, OSError, TypeError):
        return ""
    tree = ast.parse(textwrap.dedent(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
            del node.body[0]
    # Empty lists are left out, as Python 3.13 does: some versions of Python have fields that others lack.
    code = re.sub(r"(, )?\w+=\[\]", "", ast.dump(tree)).replace("(, ", "(")
    return hashlib.sha256(code.encode()).hexdigest()[:12]
