"""Steps with and without `overlap_grad_reduce` and `overlap_param_gather`, on every rank of a world."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mrl.batch import Batch
from mrl.config.schema import RoleConfig
from mrl.engine.base import PLAIN_CTX, BaseEngine
from mrl.engine.requests import GenerateRequest
from tests.engine import tiny
from tests.engine.lora import make_engine

OFF = {"overlap_grad_reduce": False, "overlap_param_gather": False}  # which a GPU has on by default
KEYS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 2000}  # several buckets
LAST = PLAIN_CTX | {"last": True}


def compare(config: RoleConfig, again: bool = False) -> dict[str, Any]:
    """Returns what differs between the two, and how often a reduction began within a backward pass. again: with what differs between
    two runs without, which kernels of a GPU that add in no fixed order make."""
    # a norm sums the squares of other shards; below it, what is reduced is the same to the bit
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, clip_grad=1e9))
    plain, _ = _run(with_keys(config, OFF))
    found, begun = _run(with_keys(config, KEYS))
    differ = _largest(found, plain)
    if again:
        differ["again"] = _largest(_run(with_keys(config, OFF))[0], plain)["others"]
    return differ | begun


def _largest(found: dict[str, dict[Any, Tensor]], plain: dict[str, dict[Any, Tensor]]) -> dict[str, float]:
    for name in plain:
        assert found[name].keys() == plain[name].keys()
    return {
        name: max((float((found[name][key] - value).abs().max()) for key, value in plain[name].items()), default=0.0)
        for name in plain
    }


def with_keys(config: RoleConfig, keys: dict[str, Any]) -> RoleConfig:
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, megatron=keys))


def gradients(engine: BaseEngine, batch: Batch, step: int) -> tuple[Any, float, Any]:
    """Makes the gradients of a step, of which the third has two calls. No call of the fourth says that it is the last."""
    engine.optimizer_zero_grad()
    share = engine.shard_data(batch)
    with engine.train_mode():
        if step == 2:
            engine.forward_backward_step(share, PLAIN_CTX)
        return engine.forward_backward_step(share, PLAIN_CTX if step == 3 else LAST)


def _run(config: RoleConfig) -> tuple[dict[str, dict[Any, Tensor]], dict[str, int]]:
    """Returns norms; losses, gradients, weights and completions; and how often reductions and gathers overlapped.

    Between the steps are those who read gradients or parameters at once, and steps of two calls, of which no first may
    reduce anything.
    """
    engine, batches = make_engine(config), [tiny.uneven_batch(seed) for seed in range(5)]
    norms: dict[Any, Tensor] = {}
    others: dict[Any, Tensor] = {}
    with _watched() as begun:
        for i, batch in enumerate(batches):
            _, loss, _ = gradients(engine, batch, i)
            others["loss", i] = torch.tensor(loss)
            if i == 1:
                others |= {("gradient", name): value.clone() for name, value in engine.hf_gradients()}
            norms[i] = torch.tensor(engine.optimizer_step())
            engine.lr_scheduler_step()
            if i in (0, 3):
                others["evaluated", i] = torch.tensor(_evaluated(engine, batch))
                others |= {(i, name): value.clone() for name, value in engine.hf_weights()}
            if i == 1 and config.head == "lm":
                [done] = engine.generate([GenerateRequest(tuple(range(3, 8)), max_new_tokens=4)])
                others["generated", i] = torch.tensor(done.log_probs)
    others |= {("end", name): value.clone() for name, value in engine.hf_weights()}
    return {"norms": norms, "others": others}, begun


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

    with mock.patch.multiple(Group, start_grad_sync=start_grad_sync, start_param_sync=start_param_sync):
        yield begun
