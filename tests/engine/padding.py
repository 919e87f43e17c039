"""Engines whose micro-batches are padded as FP8 or userbuffers take them, beside the same ones that are not: for worlds of
processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from mrl.config.schema import RoleConfig
from mrl.engine.base import PLAIN_CTX, BaseEngine
from mrl.errors import ConfigError
from tests.engine import contract, tiny


def compare(config: RoleConfig, padding: dict[str, Any]) -> dict[str, Any]:
    """Returns how far a step of the padded engine is from that of the other, in all numbers that it has: loss, metrics,
    log-probs and entropies, gradients (the worst tensor's), norm, weights, and an evaluation; and whether the tokens of a
    layer's linears are what they are padded to, in the one and the other.

    padding: of the engine's setup, `multiple`, or `places` and `fixed`."""
    plain, padded = contract.make_engine(config), contract.make_engine(config)
    padded.setup = dataclasses.replace(padded.setup, **padding)
    results = [_step(engine) for engine in (plain, padded)]
    tokens = [found.pop("tokens") for found in results]
    ours, theirs = results
    assert ours.keys() == theirs.keys()
    far = {name: tiny.relative_l2(theirs[name], ours[name]) for name in ours}
    dims, multiple, places = plain.setup.dims, padding.get("multiple", 1), padding.get("places")
    each = None if places is None else places // dims.cp // (dims.tp if dims.sp else 1)
    fits = [[count % multiple == 0 and each in (None, count) for count in counts] for counts in tokens]
    return {"far": far, "padded": [bool(counts) and all(counts) for counts in fits]}


def refused(config: RoleConfig, places: int) -> str:
    """Returns what is said of a batch whose longest sequence has more places."""
    engine = contract.make_engine(config)
    engine.setup = dataclasses.replace(engine.setup, places=places)
    try:
        with engine.eval_mode():
            engine.forward_backward_step(engine.shard_data(tiny.uneven_batch()), PLAIN_CTX, forward_only=True)
    except ConfigError as error:
        return str(error)
    return ""


def with_keys(config: RoleConfig, keys: dict[str, Any]) -> dict[str, float]:
    """As `compare`'s distances, of an engine with these of engine.megatron."""
    engine = dataclasses.replace(config.engine, megatron=keys)
    results = [_step(contract.make_engine(each)) for each in (config, dataclasses.replace(config, engine=engine))]
    ours, theirs = results
    assert ours.pop("tokens") == theirs.pop("tokens") and ours.keys() == theirs.keys()
    return {name: tiny.relative_l2(theirs[name], ours[name]) for name in ours}


def every_field(config: RoleConfig, values: dict[str, Any]) -> dict[str, str]:
    """What is said of each of these fields of engine.megatron, by itself in a step: nothing where it ran."""
    said = {}
    for name, value in values.items():
        engine = dataclasses.replace(config.engine, megatron={name: value})
        try:
            _step(contract.make_engine(dataclasses.replace(config, engine=engine)))
            said[name] = ""
        except ConfigError as error:
            said[name] = str(error)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def _step(engine: BaseEngine) -> dict[str, Any]:
    batch = tiny.uneven_batch()
    ctx = PLAIN_CTX | {"entropy": "detached"}
    with _tokens() as tokens:
        with engine.eval_mode():
            evaluated, of_eval = engine.forward_backward_step(engine.shard_data(batch), ctx, forward_only=True)
        found = contract.numbers_of_step(engine, batch, ctx)
    found |= {f"evaluated {name}": t for name, t in evaluated.items()}
    return found | {"eval loss": torch.tensor(of_eval["loss"]), "tokens": tokens}


@contextlib.contextmanager
def _tokens() -> Iterator[list[int]]:
    """The tokens of every call of a layer, as this rank has them."""
    seen: list[int] = []

    def see(module: Any, args: Any, kwargs: Any = None) -> None:
        if type(module).__name__ in ("RotarySelfAttention", "LatentAttention"):
            seen.append(args[0].shape[0])

    handle = register_module_forward_pre_hook(see)
    try:
        yield seen
    finally:
        handle.remove()
