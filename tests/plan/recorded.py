"""What megatron's schedules do, noted while they run. A case of the test harness."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.cuda import models, update
from tests.cuda.cases import Case


def order(case: Case) -> list[list[tuple[bool, int]]]:
    """Returns the passes of every stage, in order: whether it is a forward pass, and of which chunk; of a backward pass
    -1, as megatron's function is not told."""
    from megatron.core.pipeline_parallel import schedules

    from mrl.engine.megatron.engine import MegatronEngine

    found: list[tuple[bool, int]] = []
    forward, backward = schedules.forward_step, schedules.backward_step
    with tempfile.TemporaryDirectory() as folder:
        path = models.write(case.model, Path(folder), case.layers, **case.changes)
        engine = MegatronEngine(update.config_of(case, path))
        engine.init_model()

    def noted_forward(function: Any, iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        found.append((True, list(engine.model.wrapped).index(model)))
        return forward(function, iterator, model, *args, **kwargs)

    def noted_backward(*args: Any, **kwargs: Any) -> Any:
        found.append((False, -1))
        return backward(*args, **kwargs)

    engine.set_loss_fn(lambda data, predictions, ctx: (update._loss(data, predictions), ctx))
    each = len(case.lengths)
    engine._plan = lambda batch: [[i * each + j for j in range(each)] for i in range(case.micro_batches)]
    engine.optimizer_zero_grad()
    schedules.forward_step, schedules.backward_step = noted_forward, noted_backward
    try:
        with engine.train_mode():
            engine.forward_backward_step(update.batch_of(case))
    finally:
        schedules.forward_step, schedules.backward_step = forward, backward
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return everyone


def sharded(config: Any) -> list[dict[str, int]]:
    """Bytes of the weights, gradients and moments that an FSDP engine holds after a backward pass, of every rank."""
    from tests.engine import tiny
    from tests.engine.contract import make_engine

    engine = make_engine(config)
    share = engine.shard_data(tiny.uneven_batch())
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(share)
    found = {}
    for kind, tensors in engine._state().items():
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors()}
        found[kind] = sum(storages.values())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return everyone
