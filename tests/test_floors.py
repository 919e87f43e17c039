"""The shape of the code: which module may import which, where fenced packages live, and how long things get.

A module imports only from its own floor or floors below it. Neither modules nor parts import each other in a circle, at any time:
an import in a function or for type checkers is one, too.
"""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterable, Mapping

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "mrl"

FLOORS = {
    "config": 0, "batch": 0, "parallel": 0, "metrics": 0, "metric_names": 0, "errors": 0, "words": 0, "patches": 0, "__init__": 0,
    "algorithms": 1, "data": 1, "rewards": 1, "weights": 1, "ops": 1, "kernels": 1,
    "mcore_models": 2,
    "engine": 3,
    "trainers": 4, "roles": 4, "rollout": 4, "convert": 4, "report": 4, "plan": 4, "inference": 4, "serve": 4,
    "cli": 5, "commands": 5, "doctor": 5, "check": 5, "launch": 5, "__main__": 5,
}  # fmt: skip

FENCES = {
    "click": ("cli.py",),
    "wandb": ("metrics.py", "metrics/"),
    "megatron": ("engine/", "mcore_models/"),
    "transformer_engine": ("mcore_models/",),
    "apex": ("mcore_models/",),
    "triton": ("kernels/",),
    "plotly": ("report/",),
    "matplotlib": ("report/",),
    "starlette": ("serve/",),
    "uvicorn": ("serve/",),
}
ONE_FILE = ("transformer_engine", "apex")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: pathlib.Path) -> str:
    """`mrl/engine/base.py` -> `mrl.engine.base`; a package's __init__ is the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def unit_of(module: str) -> str:
    """The word that FLOORS lists: `mrl.engine.base` -> `engine`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: pathlib.Path) -> frozenset[tuple[str, int]]:
    """(module, line) that a file imports, wherever it does: also in functions and for type checkers alone.

    `from mrl.x import y` is `mrl.x.y` where that is a module.
    """
    found: set[tuple[str, int]] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {(alias.name, node.lineno) for alias in node.names}
        if not isinstance(node, ast.ImportFrom):
            continue
        base = node.module or ""
        if node.level:
            package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, base]).rstrip(".")
        for alias in node.names:
            dotted = f"{base}.{alias.name}"
            found.add((dotted if dotted in MODULES else base, node.lineno))
    return frozenset(found)


def test_every_part_has_a_floor():
    unknown = sorted({unit_of(module) for module in MODULES} - set(FLOORS))
    assert not unknown, f"give {unknown} a floor in FLOORS"


@pytest.mark.slow
def test_imports_run_down():
    up = []
    for module, path in MODULES.items():
        for target, line in imports(path):
            if target.split(".")[0] == "mrl" and FLOORS[unit_of(target)] > FLOORS[unit_of(module)]:
                up.append(f"{path.relative_to(ROOT)}:{line} (floor {FLOORS[unit_of(module)]}) imports {target}")
    assert not up, "imports that run up:\n" + "\n".join(sorted(up))


def test_the_engine_knows_no_algorithm():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {target}"
        for module, path in MODULES.items()
        if unit_of(module) == "engine"
        for target, line in imports(path)
        if target.startswith("mrl.algorithms")
    ]
    assert not wrong, "a loss arrives as a callable:\n" + "\n".join(wrong)


def check_no_circle(graph: Mapping[str, Iterable[str]]) -> None:
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, "circle: " + " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def imported_modules() -> dict[str, set[str]]:
    """Module -> the modules of mrl that it imports."""
    return {m: {t for t, _ in imports(path) if t in MODULES and t != m} for m, path in MODULES.items()}


def test_no_circle_of_modules():
    check_no_circle(imported_modules())


def test_no_circle_of_parts():
    """Also between parts of one floor."""
    graph: dict[str, set[str]] = {unit_of(module): set() for module in MODULES}
    for module, targets in imported_modules().items():
        graph[unit_of(module)] |= {unit_of(target) for target in targets} - {unit_of(module)}
    check_no_circle(graph)


@pytest.mark.parametrize("package", FENCES)
def test_fenced_packages_stay_in_their_place(package):
    users = {
        path.relative_to(PACKAGE).as_posix(): line
        for path in FILES
        for target, line in imports(path)
        if target.split(".")[0] == package
    }
    outside = [f"mrl/{name}:{line}" for name, line in users.items() if not name.startswith(FENCES[package])]
    assert not outside, f"{package} belongs in {FENCES[package]}: {outside}"
    if package in ONE_FILE:
        assert len(users) <= 1, f"{package} belongs in one file: {sorted(users)}"


def test_process_groups_stay_in_the_engine():
    """No torch.distributed in floors 0, 1 and above 3 (the launcher's own agent aside)."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {target}"
        for module, path in MODULES.items()
        if FLOORS[unit_of(module)] not in (2, 3) and unit_of(module) != "launch"
        for target, line in imports(path)
        if target.startswith("torch.distributed")
    ]
    assert not wrong, "\n".join(wrong)


def test_files_are_short():
    long = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for path in sorted([*FILES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    ]
    assert not long, f"files over {MAX_FILE_LINES} lines:\n" + "\n".join(long)


def test_functions_are_short():
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long, f"functions over {MAX_FUNCTION_LINES} lines:\n" + "\n".join(long)


def test_a_docstring_stands_where_python_takes_it():
    """First in its module, class or function, or behind the field or constant that it is about."""
    lost = []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            body = getattr(node, "body", None)
            for before, after in zip(body, body[1:], strict=False) if isinstance(body, list) else ():
                text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if text and isinstance(after.value.value, str) and not isinstance(before, ast.Assign | ast.AnnAssign):
                    lost.append(f"{path.relative_to(ROOT)}:{after.lineno}")
    assert not lost
