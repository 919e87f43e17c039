"""Local shapes of a rank that is timed alone, and of the same rank in a real run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mrl.config.checks import parallel_dims
from mrl.config.schema import RoleConfig
from mrl.engine.megatron import optim, stage_times
from mrl.engine.megatron.chunk_run import ChunkRun
from mrl.parallel import ParallelDims
from tests.cuda import models, update
from tests.cuda.cases import Case

Shapes = dict[str, Any]


def layout_of(case: Case, folder: str) -> tuple[RoleConfig, ParallelDims]:
    config = update.config_of(case, models.write(case.model, Path(folder), case.layers, **case.changes))
    return config, parallel_dims(config.engine.parallel, case.world)


def alone(case: Case) -> list[Shapes]:
    """Shapes of every rank, one after the other in this process."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        config, dims = layout_of(case, folder)
        for rank in range(case.world):
            with stage_times.engine_of_rank(config, dims, rank) as engine, engine.train_mode():
                shapes = watch(engine)
                run = ChunkRun(config, engine.model, case.lengths, "none")
                for wrapped, inner in zip(engine.model.wrapped, engine.model.chunks, strict=True):
                    micro_batch = run.micro_batch()
                    run.forward(micro_batch, wrapped, inner, run.hidden(micro_batch, inner))
                found.append(shapes)
    return found


def tokens_of_experts(case: Case) -> list[list[int]]:
    """Returns the tokens of each expert in each layer of a rank that is timed, of a router that would choose the same
    experts for all tokens."""
    found: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        config, dims = layout_of(case, folder)
        with stage_times.engine_of_rank(config, dims, 0) as engine, engine.train_mode():
            [wrapped], [inner] = engine.model.wrapped, engine.model.chunks
            for router in (module for name, module in inner.named_modules() if name.endswith(".router")):
                torch.nn.init.zeros_(router.weight)
                router.register_forward_hook(lambda _, given, output: found.append(output[1].sum(0).tolist()))
            run = ChunkRun(config, engine.model, case.lengths, "none")
            run.forward(run.micro_batch(), wrapped, inner, None)
    return found


def real(case: Case) -> list[Shapes]:
    """Shapes of every rank of a world. A case of the test harness."""
    from mrl.engine.megatron.engine import MegatronEngine

    with tempfile.TemporaryDirectory() as folder:
        config, _ = layout_of(case, folder)
        engine = MegatronEngine(config)
        engine.init_model()
    shapes, each = watch(engine), len(case.lengths)
    engine.set_loss_fn(lambda data, predictions, ctx: (update._loss(data, predictions), ctx))
    engine._plan = lambda batch: [[i * each + j for j in range(each)] for i in range(case.micro_batches)]
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(update.batch_of(case))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, shapes)
    return everyone


def watch(engine: Any) -> Shapes:
    """Returns shapes of what an engine holds, and of what its modules then give first. An expert's go by its router."""
    model = engine.model
    shapes: Shapes = {
        "buffers": [buffer.grad_data.numel() for buffer in optim.gradient_buffers(model.wrapped)],
        "masters": [tuple(main.shape) for _, _, main, _ in optim.shards(model.optimizer)],
    }
    for number, chunk in enumerate(model.chunks):
        shapes |= {f"{number} {name}": (tuple(p.shape), p.dtype) for name, p in chunk.named_parameters()}
        for name, module in chunk.named_modules():

            def note(
                module: Any, given: Any, output: Any, shapes: Shapes = shapes, place: str = f"{number} {name} gives"
            ):
                first = output[0] if isinstance(output, tuple) else output
                if isinstance(first, torch.Tensor) and ".experts" not in place:
                    shapes.setdefault(place, (tuple(first.shape), first.dtype))

            module.register_forward_hook(note)
    return shapes
