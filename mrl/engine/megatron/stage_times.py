"""Times one rank of a pipeline stage on real tensors, in a process that sends nothing to other ranks.

The process says that it is a rank of the layout's world, as a plan does (meta.py). Shards have their sizes in the run,
weights are random, and each expert gets as many tokens on average. A collective only copies on this rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mrl.config.schema import RoleConfig
from mrl.engine.megatron import meta
from mrl.engine.megatron.chunk_run import ChunkRun
from mrl.mcore_models import cpu_stand_in
from mrl.ops import devices
from mrl.parallel import ParallelDims
from mrl.weights.random_weights import RandomWeights
from mrl.weights.rules import expected_hf_names
from mrl.weights.stacks import unstacking_read
from mrl.words import pluralize

if TYPE_CHECKING:
    from mrl.engine.megatron.engine import MegatronEngine

WARM_UP, TIMED = 3, 9
"""Passes of a chunk, and optimizer steps."""


@dataclasses.dataclass(frozen=True)
class StageTimes:
    """Seconds of one rank of a pipeline stage, without communication."""

    forward: tuple[float, ...]  # of a micro-batch in each chunk
    backward: tuple[float, ...]
    optimizer: float  # of a step


@contextlib.contextmanager
def engine_of_rank(config: RoleConfig, dims: ParallelDims, rank: int) -> Iterator[MegatronEngine]:
    """Makes this process one rank of the layout inside, and gives its engine."""
    cpu_stand_in.prepare()
    from mrl.engine.megatron.engine import MegatronEngine

    with meta.as_rank(rank, dims):
        engine = MegatronEngine(dataclasses.replace(config, model=dataclasses.replace(config.model, init="random")))
        model = engine.model
        model.transformer.moe_router_force_load_balancing = True
        shapes = expected_hf_names(model.family, model.hf, head=config.head, mtp=model.mtp)
        weights = RandomWeights(shapes, seed=0, std=0.02, device=engine.device)
        engine.init_model(unstacking_read(weights, model.family))
        yield engine


def time_stage(
    config: RoleConfig, dims: ParallelDims, rank: int, lengths: Sequence[int], entropy: str
) -> tuple[StageTimes, str]:
    """Returns the medians of a rank's passes and steps, and the device and layer spec in words.

    lengths: of the sequences of a micro-batch.
    """
    with engine_of_rank(config, dims, rank) as engine:
        model = engine.model
        with engine.train_mode():
            run = ChunkRun(config, model, lengths, entropy)
            chunks = zip(model.wrapped, model.chunks, strict=True)
            forward, backward = zip(*(_pass_seconds(run, *chunk) for chunk in chunks), strict=True)

        def step() -> None:
            engine.optimizer_zero_grad()  # so every norm is finite, and no step is skipped
            engine.optimizer_step()

        threads = pluralize(torch.get_num_threads(), "thread")
        where = torch.cuda.get_device_name() if devices.has_gpu() else f"the CPU with {threads}"
        return StageTimes(forward, backward, _medians(step)[0]), f"{where}, layers of {model.spec}"


def _pass_seconds(run: ChunkRun, chunk: Any, inner: Any) -> list[float]:
    """Returns the seconds of a forward pass of a chunk, and of a backward pass."""
    micro_batch = run.micro_batch()
    given = run.hidden(micro_batch, inner)
    outputs: list[torch.Tensor] = []
    gradients: list[torch.Tensor | None] = []

    def forward() -> None:
        hidden = None if given is None else given.detach().requires_grad_()
        outputs[:] = [run.forward(micro_batch, chunk, inner, hidden)]

    def backward() -> None:
        if not gradients:
            gradients.append(None if inner.post_process else torch.randn_like(outputs[0]))
        torch.autograd.backward(outputs.pop(), gradients[0])

    with chunk.no_sync():  # DDP's hooks would reduce gradients
        return _medians(forward, backward)


def _medians(*parts: Callable[[], None]) -> list[float]:
    """Returns the median seconds of each part. They are called in order, and the host waits for no GPU between."""
    marks = []
    for _ in range(WARM_UP + TIMED):
        marks.append([_mark()])
        for part in parts:
            part()
            marks[-1].append(_mark())
    torch.cuda.synchronize()
    return [statistics.median(_seconds(at[i], at[i + 1]) for at in marks[WARM_UP:]) for i in range(len(parts))]


def _mark() -> Any:
    """Returns this moment; on a GPU the one at which it has done what it was given."""
    if not devices.has_gpu():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
