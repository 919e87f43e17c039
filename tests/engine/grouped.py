"""Engines whose experts multiply by grouped products, on every rank of a world."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

from mrl.config.schema import MoEConfig, RoleConfig
from mrl.mcore_models import grouped
from tests.engine import overlap, parity, te_like


def with_key(config: RoleConfig) -> RoleConfig:
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, moe=MoEConfig(grouped_mm=True)))


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Counts the products."""
    count, product = [0], grouped.grouped_product

    def counting(*args: Any) -> Any:
        count[0] += 1
        return product(*args)

    with mock.patch.object(grouped, "grouped_product", counting):
        yield count


def measure(te: bool, **arguments: Any) -> parity.Outcome | None:
    """`parity.measure` with the key, of modules of the local spec or of those like transformer-engine's."""
    config_of = parity.config_of
    keyed = mock.patch.object(parity, "config_of", lambda *given: with_key(config_of(*given)))
    with keyed, counted() as count:
        outcome = te_like.measure(**arguments) if te else parity.measure(**arguments)
    expected = te or not arguments["row"].lora  # local experts with adapters are multiplied one by one
    assert bool(count[0]) == expected, f"{count[0]} products were grouped"
    return outcome


def overlapped(config: RoleConfig) -> dict[str, float]:
    """`overlap.compare` with the key."""
    with counted() as count:
        found = overlap.compare(with_key(config))
    assert count[0], "no product was grouped"
    return found
