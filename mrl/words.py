"""Numbers with their nouns, in lines for people."""

from __future__ import annotations


def pluralize(count: float, noun: str, several: str | None = None) -> str:
    """Returns "1 rank", "16,384 ranks", "1 epoch" or "0.5 epochs"."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun}" if count == 1 else f"{number} {several or noun + 's'}"
