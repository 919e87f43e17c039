"""Engines whose experts multiply by grouped products, on every rank of a world."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from mrl.config.schema import MoEConfig, RoleConfig
from mrl.mcore_models import decoder, grouped
from tests.engine import generation, overlap, parity, te_like
from tests.engine.contract import make_engine


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


def decodes_in_fixed_shapes(config: RoleConfig) -> dict[str, float]:
    """Holds layers of experts of a decoding step, by grouped products of one rank, to every expert on every token.

    Batches are odd. Rows beyond the last sequence hold zeros or no numbers, and all rows may have the same experts.
    """
    engine = make_engine(with_key(config))
    [chunk] = engine.model.chunks
    layers = [layer.experts for layer in decoder.Decoder(chunk).layers if layer.experts is not None]
    found = {"layers": float(len(layers)), "worst": 0.0, "idle": 0.0}
    for layer in layers:
        assert layer.counts_stay, "the layer's experts are not grouped"
        for rows, alike in ((1, False), (3, False), (17, False), (17, True), (0, False)):
            real = torch.randn(rows, engine.model.hf["hidden_size"], generator=torch.Generator().manual_seed(rows))
            if alike:
                real[:] = real[:1].clone()
            for beyond in (0.0, math.nan):
                x = torch.cat([real, torch.full((2, real.shape[1]), beyond)])
                with torch.no_grad(), counted() as count:
                    with mock.patch.object(layer, "counts_stay", False):
                        expected = layer(x, True)
                    assert not count[0], "every expert is to compute every token"
                    got = layer(x, True)
                    assert count[0] == 2 and got.shape == x.shape
                    idle = layer.mlp.router(x[:rows, None])[1].sum(0) == 0 if rows else torch.zeros(1)
                found["idle"] = max(found["idle"], float(idle.sum()))
                torch.testing.assert_close(got[:rows], expected[:rows], rtol=2e-6, atol=2e-6)
    return found


def samples_in_fixed_shapes(config: RoleConfig) -> None:
    """Completions of steps in fixed shapes are those of other steps, and of a model without the key.

    Where a grouped product would ask the host, every expert computes every token of such a step."""
    engines = [make_engine(of) for of in (config, with_key(config))]
    requests = generation.sampled_requests()
    expected = engines[0].generate(requests)
    activated = decoder._Experts._activated
    every = mock.patch.object(decoder._Experts, "_activated", side_effect=AssertionError("every expert computed"))
    with counted() as count, every:
        found = engines[1].generate(requests, cuda_graphs=True)
    assert count[0], "no product was grouped"
    generation.assert_alike(found, expected)
    every = mock.patch.object(decoder._Experts, "_activated", autospec=True, side_effect=activated)
    with mock.patch.object(grouped, "works_on_device", return_value=False), every as computed:
        found = engines[1].generate(requests, cuda_graphs=True)
    assert computed.called, "a step whose products ask the host is captured"
    generation.assert_alike(found, expected)
