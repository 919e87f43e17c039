"""Numbers in lines for people: with their nouns, and of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LAUNCHED_RANK = "MRL_LAUNCHED_RANK"
"""Variable with a process's rank among all that were launched, where RANK is the one in a world of some of them."""


def launched_rank(environ: Mapping[str, str]) -> str:
    """Returns the rank of this process as messages name it."""
    return next((environ[name] for name in (LAUNCHED_RANK, "RANK", "SLURM_PROCID") if environ.get(name)), "0")


def pluralize(count: float, noun: str, several: str | None = None) -> str:
    """Returns "1 rank", "16,384 ranks", "1 epoch" or "0.5 epochs"."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun}" if count == 1 else f"{number} {several or noun + 's'}"


def shorten_list(items: Sequence[object], limit: int = 3) -> str:
    """Returns a list for a message: the first few, and how many more."""
    shown = ", ".join(map(str, items[:limit]))
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
