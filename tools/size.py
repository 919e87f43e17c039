"""Measures the size of the code: `python tools/size.py [FOLDER ...]`, by default mrl and tests.

Tokens are names, operators, numbers and strings without docstrings; an f-string is one. They tell two trees apart that
lines do not: the same code has the same tokens however it is wrapped.
"""

from __future__ import annotations

import ast
import collections
import pathlib
import sys
import tokenize
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).parents[1]
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
FSTRING_START, FSTRING_END = (getattr(tokenize, f"FSTRING_{end}", -1) for end in ("START", "END"))  # Python 3.12
NODES: dict[str, tuple[type[ast.AST], ...]] = {
    "statements": (ast.stmt,),
    "comprehensions": (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    "ternaries": (ast.IfExp,),
    "raises": (ast.Raise,),
}


def size_of(folder: pathlib.Path) -> collections.Counter[str]:
    """The counts of the Python files below a folder, by what is counted."""
    counts: collections.Counter[str] = collections.Counter()
    for path in folder.rglob("*.py"):
        with tokenize.open(path) as file:
            tokens = list(without_insides(tokenize.generate_tokens(file.readline)))
        text = path.read_text(encoding="utf-8")
        kinds = collections.Counter(token.type for token in tokens)
        counts["files"] += 1
        counts["lines"] += text.count("\n")
        counts["code lines"] += len({token.start[0] for token in tokens if token.type in COUNTED})
        counts["comments"] += kinds[tokenize.COMMENT]
        counts["tokens"] += sum(kinds[kind] for kind in COUNTED)
        for node in ast.walk(ast.parse(text)):
            counts["tokens"] -= isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)  # a docstring
            for name, types in NODES.items():
                counts[name] += isinstance(node, types)
    return counts


def without_insides(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """Yields an f-string as one token, as Python before 3.12 does."""
    depth = 0
    for token in tokens:
        if token.type == FSTRING_START:
            depth += 1
            if depth == 1:
                yield token._replace(type=tokenize.STRING)
        elif token.type == FSTRING_END:
            depth -= 1
        elif not depth:
            yield token


def main() -> None:
    for name in sys.argv[1:] or ("mrl", "tests"):
        counts = size_of(ROOT / name)
        print(f"{name}: {counts['files']} files, {counts['lines']:,} lines, {counts['tokens']:,} tokens")
        code = counts["code lines"] or 1  # of a folder without any
        print(f"    {code:,} lines have code; {counts['tokens'] / code:.1f} tokens each")
        for kind in ("statements", "comments", "comprehensions", "ternaries", "raises"):
            print(f"    {counts[kind]:,} {kind}, {1000 * counts[kind] / code:.0f} a thousand lines of code")


if __name__ == "__main__":
    main()
