"""The rows that a run takes of each source, computed from its length before a row is read.

`Mixer` (mrl/data/mixture.py) keeps each source within a row of its share, so its shares without the roundings are those
of the run to within a row for each source that ends.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class SourceSupply:
    """A source as its share needs it."""

    weight: float
    rows: int | None  # that can be used in one pass; None where not known, as of streams
    most: float | None  # rows that its `epochs` give; None for no bound
    tokens: float  # of a row, on average


@dataclasses.dataclass(frozen=True)
class SourceShare:
    """The rows that a run takes of a source."""

    rows: float
    passes: float | None  # over the source's rows; None where their number is not known
    ends_after: float | None  # rows of all sources after which it gives no more; None where it does not end


def shares_of_run(supplies: Sequence[SourceSupply], rows: int, *, by_tokens: bool) -> list[SourceShare]:
    """Returns what a run of `rows` rows takes of each source. by_tokens: whether weights are shares of tokens."""
    rates = [one.weight / (one.tokens if by_tokens else 1) for one in supplies]
    given, ends = [0.0] * len(supplies), [None] * len(supplies)  # type: list[float], list[float | None]
    taken, open_ = 0.0, list(range(len(supplies)))
    while open_ and taken < rows:
        total = sum(rates[i] for i in open_)
        until = {}  # rows of all until a source is over
        for i in open_:
            most = supplies[i].most
            until[i] = math.inf if most is None else (most - given[i]) * total / rates[i]
        passed = min(rows - taken, *until.values())
        for i in open_:
            given[i] += passed * rates[i] / total
        over = [i for i in open_ if until[i] <= passed]
        taken = taken + passed if over else float(rows)
        for i in over:
            ends[i] = taken
        open_ = [i for i in open_ if i not in over]
    return [
        SourceShare(number, number / one.rows if one.rows else None, end)
        for one, number, end in zip(supplies, given, ends, strict=True)
    ]
