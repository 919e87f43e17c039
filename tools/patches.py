"""Reads the register of patches (mrl/patches.toml), and finds what of other libraries' private parts mrl uses.

python tools/patches.py table      print docs/developers/patches.md
python tools/patches.py hashes [LIBRARY]    print the hashes of the installed versions that the register lacks
python tools/patches.py found      print each private name, and each assignment to a library, by file
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import sys
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from mrl import patches

PACKAGE = pathlib.Path(__file__).parents[1] / "mrl"
STANDARD_LIBRARY = {"_exit", "_getframe", "_replace", "_run_exitfuncs", "_fileobj", "_file_size", "_multiprocessing",
                    "_dir_candidates", "_crc"}  # fmt: skip
"""Names of Python's own that begin with an underscore."""
PYTHONS = {*sys.stdlib_module_names}
OWN_DATA = {"weights/quantized.py", "check/folder.py", "config/translate.py", "serve/ledger.py", "trainers/console.py",
            "rollout/environment.py", "data/dataset.py", "weights/table.py",
            "engine/torch_dist/data_files.py"}  # fmt: skip
"""Files whose strings with an underscore are ends of tensor names, of columns or of config keys."""

HEADER = """\
# Patches and private parts

mrl replaces some functions of other libraries, copies others, and reads private names. `mrl/patches.toml` lists them
all, and this page shows it. `mrl/patches.py` applies the patches.

A function that mrl replaces, overrides or copies has a hash for each version that was read. The hash is of the code
without docstrings and comments. Another function is found when mrl applies the patch:

- **Warns**: the log has one line that names the function and what may be wrong. The run goes on.
- **Refuses**: the run does not start, because numbers could be wrong and nothing would show it.

To support a new version:

1. Install it, and run `python tools/patches.py hashes`.
2. Read each function that is printed, and change mrl if it must.
3. Add the version and the hashes to `mrl/patches.toml`, then run `make docs`.

`tests/project/test_patches.py` finds patches and private names that the register lacks.
"""


def private(name: str) -> bool:
    return bool(re.fullmatch(r"_[A-Za-z]\w{2,}", name))


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The code of each file of mrl."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {p.relative_to(PACKAGE).as_posix(): ast.parse(p.read_text(encoding="utf-8")) for p in files}


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    return [*ast.walk(tree)]


def own_names(tree: ast.Module) -> Iterator[str]:
    """The names that a file of mrl defines."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node.value):
            yield node.attr


def of_self(node: ast.expr) -> bool:
    """Whether it is self, cls or super()."""
    name = node.func if isinstance(node, ast.Call) and not node.args else node
    return isinstance(name, ast.Name) and name.id in (("super",) if name is not node else ("self", "cls"))


def imports_module(node: ast.AST) -> bool:
    """Whether import_module is called in it."""
    calls = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
    return any("import_module" in (getattr(f, "id", ""), getattr(f, "attr", "")) for f in calls)


@functools.cache
def imported(tree: ast.Module) -> dict[str, str]:
    """The names that a file imports from libraries, and what they are."""
    found: dict[str, str] = {}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.partition(".")[0]: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and imports_module(node.value or node):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found |= {name.id: "a module" for name in ast.walk(target) if isinstance(name, ast.Name)}
    return {name: path for name, path in found.items() if path.partition(".")[0] not in {"mrl", *PYTHONS}}


def private_names() -> Iterator[tuple[str, int, str]]:
    """File, line and name of each use of a private name that is not mrl's own."""
    files = trees()
    own = {name for tree in files.values() for name in own_names(tree)}
    for file, tree in files.items():
        here = {*own_names(tree)}
        inherited = {n for node in nodes(tree) if isinstance(node, ast.ClassDef) for n in _overridden(node, tree)}
        for node in nodes(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [part for a in node.names for part in a.name.split(".")]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] != "mrl":
                names = [*(node.module or "").split("."), *(a.name for a in node.names)]
            elif isinstance(node, ast.Attribute):
                known = own if of_self(node.value) else here
                names = [node.attr] if node.attr not in known or node.attr in inherited else []
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and file not in OWN_DATA:
                names = re.split(r"[:.]", node.value) if re.fullmatch(r"[\w.:]+", node.value) else []
                names = [name for name in names if name not in own]
            elif isinstance(node, ast.FunctionDef) and node.name in inherited:
                names = [node.name]
            yield from ((file, node.lineno, n) for n in names if private(n) and n not in STANDARD_LIBRARY | OTHER_FILES)


def _overridden(node: ast.ClassDef, tree: ast.Module) -> Iterator[str]:
    """The private methods of a class whose base is a library's: some may be the base's."""
    libraries = imported(tree)
    if any(ast.unparse(base).partition(".")[0] in libraries for base in node.bases):
        methods = (m.name for m in node.body if isinstance(m, ast.FunctionDef))
        yield from (name for name in methods if private(name) and name in KNOWN)


OTHER_FILES = {"_forward_step"}
"""Private names of mrl that another file of it uses."""
KNOWN = {
    name
    for library in patches.register().values()
    for use in library["uses"]
    if use["kind"] == "overrides"
    for name in re.split(r"\W+", use["target"])
}
"""Names that the register says are overridden."""


def assignments() -> Iterator[tuple[str, int, str]]:
    """File, line and target of each assignment to an attribute of a library, which `patches.replace` should make."""
    for file, tree in trees().items():
        libraries = imported(tree)
        for node in nodes(tree):
            target = node if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) else None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                target = node.args[0]
            root = target
            while isinstance(root, ast.Attribute):
                root = root.value
            if target is not None and isinstance(root, ast.Name) and root.id in libraries:
                yield file, target.lineno, ast.unparse(target)


def rows() -> Iterator[tuple[str, dict]]:
    for library, entry in patches.register().items():
        yield from ((library, use) for use in entry["uses"])


def table() -> str:
    """The page of the register."""
    lines = [HEADER]
    for library, entry in patches.register().items():
        lines += [f"\n## {library}\n", f"Versions that were read: {', '.join(entry['versions'])}.\n"]
        lines += ["| what | kind | in `mrl/` | why, and what may go wrong | test |", "|---|---|---|---|---|"]
        for use in sorted(entry["uses"], key=lambda use: use["in"]):
            end = next((f"**{word.capitalize()}**: {use[word]}" for word in ("warns", "refuses") if word in use), "")
            why = f"{use['why'].rstrip('.')}. {end}".strip()
            files = "<br>".join(f"`{file}`" for file in use["in"])
            what = use["target"].replace("|", "\\|")
            lines.append(f"| `{what}` | {use['kind']} | {files} | {why} | `{use['test']}` |")
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:] == ["table"]:
        print(table(), end="")
    elif sys.argv[1:] == ["found"]:
        for file, line, name in sorted({*private_names(), *assignments()}):
            print(f"{file}:{line} {name}")
    else:
        for library, use in rows():
            if library not in (sys.argv[2:] or [library]) or "hashes" not in use:
                continue
            found = patches.fingerprint(use["target"])
            if found not in use["hashes"]:
                print(f"{use['target']} {found or 'is not there'}")


if __name__ == "__main__":
    main()
