"""Steps with and without `overlap_grad_reduce` and `overlap_param_gather`, on every rank of a world."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mrl.config.schema import RoleConfig
from mrl.engine.base import PLAIN_CTX, BaseEngine
from mrl.engine.requests import GenerateRequest
from tests.engine import tiny
from tests.engine.lora import make_engine

KEYS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 2000}  # several buckets
LAST = PLAIN_CTX | {"last": True}


def compare(config: RoleConfig) -> dict[str, Any]:
    """Returns what differs between the two, and how often a reduction began within a backward pass."""
    plain, _ = _run(config)
    engine = dataclasses.replace(config.engine, megatron=KEYS)
    found, begun = _run(dataclasses.replace(config, engine=engine))
    numbers = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(found[0], plain[0], strict=True))
    tensors = max((float((found[1][name] - value).abs().max()) for name, value in plain[1].items()), default=0.0)
    assert found[1].keys() == plain[1].keys() and found[2] == plain[2]
    return {"numbers": numbers, "tensors": tensors, **begun}


def _run(config: RoleConfig) -> tuple[tuple[list[float], dict[str, Tensor], list[Any]], dict[str, int]]:
    """Returns losses and gradient norms, gradients and weights, completions; and where reductions and gathers began.

    Between the steps are those who read gradients or parameters at once, and steps of two calls, of which no first may
    reduce anything.
    """
    engine, batches = make_engine(config), [tiny.uneven_batch(seed) for seed in range(5)]
    numbers: list[float] = []
    tensors: dict[str, Tensor] = {}
    completions: list[Any] = []
    with _watched() as begun:
        for i, batch in enumerate(batches):
            engine.optimizer_zero_grad()
            share = engine.shard_data(batch)
            with engine.train_mode():
                if i == 2:
                    engine.forward_backward_step(share, PLAIN_CTX)
                _, loss, _ = engine.forward_backward_step(share, PLAIN_CTX if i == 3 else LAST)
            if i == 1:
                tensors |= {f"gradient {name}": value.clone() for name, value in engine.hf_gradients()}
            numbers += [loss, float(engine.optimizer_step())]
            engine.lr_scheduler_step()
            if i in (0, 3):
                numbers.append(_evaluated(engine, batch))
                tensors |= {f"{i} {name}": value.clone() for name, value in engine.hf_weights()}
            if i == 1 and config.model.lora is None and config.engine.parallel.cp == 1:
                request = GenerateRequest(tuple(range(3, 8)), max_new_tokens=4, temperature=0.0)
                completions += [tuple(c.tokens) for c in engine.generate([request])]
    tensors |= {f"end {name}": value.clone() for name, value in engine.hf_weights()}
    return (numbers, tensors, completions), begun


def _evaluated(engine: BaseEngine, batch: Any) -> float:
    with engine.eval_mode():
        _, ctx = engine.forward_backward_step(engine.shard_data(batch), PLAIN_CTX, forward_only=True)
    return ctx["loss"]


@contextlib.contextmanager
def _watched() -> Iterator[dict[str, int]]:
    """Counts the reductions that begin within a backward pass, and the gathers that are begun by a module's forward."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    begun = {"reduced": 0, "gathered": 0}
    reduce, gather = Group.start_grad_sync, Group.start_param_sync

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun["reduced"] += torch._C._current_graph_task_id() != -1
        return reduce(self, *args, **kwargs)

    def start_param_sync(self: Any, *args: Any, force_sync: bool = False) -> Any:
        begun["gathered"] += not force_sync and self.ddp_config.overlap_param_gather
        return gather(self, *args, force_sync=force_sync)

    Group.start_grad_sync, Group.start_param_sync = start_grad_sync, start_param_sync
    try:
        yield begun
    finally:
        Group.start_grad_sync, Group.start_param_sync = reduce, gather
