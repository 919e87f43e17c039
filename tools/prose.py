"""Measures the prose of pages, docstrings and messages.

    python tools/prose.py                 a line for each page and each package
    python tools/prose.py docs/data.md    the page's worst ten sentences, too
    python tools/prose.py --check         exit 1 if a page or a package is above its ceiling in tools/prose.json
    python tools/prose.py --lower         lower the ceilings to what is measured

A line has the number of sentences, the mean and the 90th percentile of their words, and how many are tangled.
A tangled sentence begins with Of, What, Where or As, or has two of which, that, where and whose.
The rule of CONTRIBUTING.md is the ceiling of all but those that tools/prose.json lists, which are above it still.
"""

from __future__ import annotations

import argparse
import ast
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Iterator

import markdown_it

ROOT = pathlib.Path(__file__).parents[1]
CEILINGS = ROOT / "tools" / "prose.json"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "benchmarks/*.md", "examples/**/*.md")
GENERATED = ("docs/config.md", "docs/coming-from.md")  # their sentences are docstrings and messages
RULE = (16, 28)  # mean and 90th percentile of words (CONTRIBUTING.md)
SHARE = 20  # one sentence in so many may be tangled
TANGLED = re.compile(r"^(Of|What|Where|As)\b|\b(which|that|where|whose)\b.*\b(which|that|where|whose)\b")
WORST = 10
CELLS, LABEL = ("td_open", "th_open"), 8  # a cell of fewer words is a label, no sentence

END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9`])")
WORD = re.compile(r"[^\W_]+(?:[-'./_:=][^\W_]+)*")


def sentences_of_text(text: str) -> list[str]:
    """The sentences of a paragraph: what lies between full stops."""
    text = re.sub(r"\b(e\.g|i\.e|etc|vs|cf|et al|Fig|Eq|No)\.", r"\1", text)
    return [part.strip() for part in END.split(" ".join(text.split())) if len(WORD.findall(part)) > 2]


def words(sentence: str) -> int:
    """Words of a sentence: a path, a key or a piece of code is one."""
    return len(WORD.findall(sentence))


def sentences_of_page(text: str) -> Iterator[str]:
    """The sentences of a page of Markdown: of paragraphs, list items and table cells."""
    tokens = markdown_it.MarkdownIt("commonmark").enable("table").parse(text)
    for before, token in zip(tokens, tokens[1:], strict=False):
        if token.type == "inline" and before.type != "heading_open":
            parts = [
                "`code`" if child.type == "code_inline" else " " if child.type.endswith("break") else child.content
                for child in token.children or []
            ]
            found = sentences_of_text("".join(parts))
            yield from found if before.type not in CELLS else [one for one in found if words(one) >= LABEL]


def sentences_of_code(path: pathlib.Path) -> tuple[list[str], list[str]]:
    """The sentences of a module's docstrings, and those of the messages that it raises."""
    docs: list[str] = []
    messages: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                if not paragraph.startswith("    "):
                    docs += sentences_of_text(re.sub(r"`[^`]*`", "`code`", paragraph))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                messages += sentences_of_text(message_of(argument))
    return docs, messages


def message_of(node: ast.expr) -> str:
    """The text of a string or an f-string, with a word for each value; empty for what is neither."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(message_of(part) if isinstance(part, ast.Constant) else "value" for part in node.values)
    return ""


def measured() -> dict[str, list[str]]:
    """The sentences of each page, and of the docstrings and messages of each package, by name."""
    found: dict[str, list[str]] = {}
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            name = str(path.relative_to(ROOT))
            if name not in GENERATED:
                found[name] = list(sentences_of_page(path.read_text(encoding="utf-8")))
    for path in sorted((ROOT / "mrl").rglob("*.py")):
        inside = path.relative_to(ROOT / "mrl")
        package = f"mrl/{inside.parts[0]}" if len(inside.parts) > 1 else "mrl"
        docs, messages = sentences_of_code(path)
        found.setdefault(f"{package} docstrings", []).extend(docs)
        found.setdefault(f"{package} messages", []).extend(messages)
    return {name: sentences for name, sentences in found.items() if sentences}


def figures(sentences: list[str]) -> list[float]:
    """Mean and 90th percentile of the words of a sentence, and the number of tangled sentences."""
    lengths = sorted(words(sentence) for sentence in sentences)
    tangled = sum(1 for sentence in sentences if TANGLED.search(sentence))
    return [round(statistics.mean(lengths), 1), lengths[min(len(lengths) - 1, len(lengths) * 9 // 10)], tangled]


def worst(sentences: list[str]) -> list[str]:
    """The longest sentences, then the tangled ones."""
    by_length = sorted(sentences, key=words, reverse=True)
    return by_length[:WORST] + [sentence for sentence in by_length[WORST:] if TANGLED.search(sentence)][:WORST]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help="pages, or packages as in mrl/data")
    parser.add_argument("--check", action="store_true", help="exit 1 if something is above its ceiling")
    parser.add_argument("--lower", action="store_true", help="lower the ceilings")
    options = parser.parse_args()
    ceilings: dict[str, list[float]] = json.loads(CEILINGS.read_text()) if CEILINGS.exists() else {}
    lowered: dict[str, list[float]] = {}
    failed = False
    for name, sentences in measured().items():
        now = figures(sentences)
        rule = [*RULE, max(1, len(sentences) // SHARE)]
        ceiling = ceilings.get(name, rule)
        above = any(figure > limit for figure, limit in zip(now, ceiling, strict=True))
        failed |= above
        lower = [max(least, min(pair)) for least, *pair in zip(rule, now, ceiling, strict=True)]
        if lower != rule:
            lowered[name] = lower
        wanted = not options.names or name.removesuffix(" docstrings").removesuffix(" messages") in options.names
        if wanted and (above or not options.check):
            print(
                f"{name:36} {len(sentences):4} sentences, mean {now[0]:4}, p90 {now[1]:3}, tangled {now[2]:3}", end=""
            )
            print("; ceiling: {}, {}, {}".format(*ceiling) if above else "")
        if wanted and options.names:
            for sentence in worst(sentences):
                print(f"    {words(sentence):3}  {sentence}")
    if options.lower:
        lines = [f"  {json.dumps(name)}: {json.dumps(limits)}" for name, limits in sorted(lowered.items())]
        CEILINGS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return int(failed and options.check)


if __name__ == "__main__":
    sys.exit(main())
