"""A mutant: a small fault that a test must catch.

It replaces `text`, which stands once in `file`, by `replacement`; at least one of `tests` must fail then. Name few and cheap ones. A
mutant whose text is gone, because the line was rewritten, gets the new line's text.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """file: under mrl/. tests: what pytest is given, under tests/."""

    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.text.strip()!r} -> {self.replacement.strip()!r}"


def of(file: str, tests: str | tuple[str, ...], *changes: tuple[str, str]) -> tuple[Mutant, ...]:
    """Mutants of one file that the same tests catch."""
    named = (tests,) if isinstance(tests, str) else tests
    return tuple(Mutant(file, text, replacement, named) for text, replacement in changes)
