"""Which of a test's parameters run in `make test`, and which in CI's slow tier (docs/testing.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def nightly_but(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """As `slow_but`, with the others in the nightly tier."""
    return slow_but(fast, values, pytest.mark.nightly)


def in_tiers(fast: Collection[Any], slow: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """As `slow_but`, where of the others those in `slow` are in CI's slow tier and the rest in the nightly one."""
    values = list(values)
    assert all(value in values for value in slow), f"not among the values: {[v for v in slow if v not in values]}"
    rest = [value for value in values if value not in fast and value not in slow]
    kept = [value for value in values if value not in rest]
    return [*slow_but(fast, kept), *slow_but([], rest, pytest.mark.nightly)]


def slow_but(fast: Collection[Any], values: Iterable[Any], other: Any = pytest.mark.slow) -> list[Any]:
    """The values as parameters of a test; those that are not in `fast` are marked `slow`. A tuple is several arguments."""
    values = list(values)
    assert all(value in values for value in fast), f"not among the values: {[v for v in fast if v not in values]}"
    marks = [() if value in fast else other for value in values]
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
        for value, mark in zip(values, marks, strict=True)
    ]
