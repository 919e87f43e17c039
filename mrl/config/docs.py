"""The reference of every config key, as markdown (docs/config.md) and as text (`mrl config`).

`python -m mrl.config.docs > docs/config.md` brings the file up to date; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrl.config.keys import Key, expected, section_keys
from mrl.config.roots import ROOTS

_HEADER = """\
# Config keys

Made from `mrl/config/schema.py` and `mrl/config/ppo.py` by `make docs`; `mrl config sft` and `mrl config ppo` print the same. A
config is a YAML file; any key can be set on the command line too, as in
`mrl sft config.yaml train.steps=10 data.columns='{question: prompt}'`.
Values there are YAML. An unknown key, a wrong type or keys that contradict each other stop the run before it starts, and so
do missing files, a layout that does not fit, and an architecture in config.json that the engine does not know: `--dry-run`
checks these and starts nothing. Weights, tokenizer, rows and checkpoints are looked at by the run, before its first step.
"""


def default_text(key: Key) -> str:
    """The default as YAML would write it; `required` where there is none."""
    if key.required:
        return "required"
    return _yaml(key.default)


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return str(value)


def sections(section: type, path: str = "", help: str = "") -> Iterator[tuple[str, str, list[Key]]]:
    """(dotted path, meaning, keys that hold a value) of `section` and each section below it, those that may be null too."""
    keys = list(section_keys(section, path))
    yield path, help, [key for key in keys if key.section is None]
    for key in keys:
        if key.section is not None:
            yield from sections(key.section, key.path, f"{key.help} (default null)" if key.nullable else key.help)


def markdown() -> str:
    """docs/config.md."""
    return _HEADER + "".join(f"\n# mrl {command}\n\n{tables(root)}" for command, root in ROOTS.items())


def tables(root: type) -> str:
    """The keys of one command, a table a section."""
    lines: list[str] = []
    for path, help, keys in sections(root):
        if not keys:
            continue
        lines += [f"## {path}: {help}" if path else "## Top level", "", "| key | accepts | default | meaning |", "|---|---|---|---|"]  # fmt: skip
        for key in keys:
            cells = (f"`{key.path}`", expected(key.annotation, key.bounds), f"`{default_text(key)}`", key.help)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def text(root: type) -> str:
    """Every key for a terminal: its default and type on one line, its meaning below."""
    lines: list[str] = []
    for path, help, keys in sections(root):
        if not keys:
            continue
        lines += [f"{path}: {help}" if path else "top level", ""]
        for key in keys:
            default = "required" if key.required else f"default {default_text(key)}"
            lines += [f"  {key.path}  ({default}; {expected(key.annotation, key.bounds)})", f"      {key.help}"]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
