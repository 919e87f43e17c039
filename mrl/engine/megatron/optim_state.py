"""Takes the optimizer's state out of an engine and puts it back, for checkpoints and as `TrainedState`.

A checkpoint has masters and moments, with the names and splits of their parameters. A data-parallel
rank writes and reads the entries that it updates, as boxes of the whole tensors. Nothing is gathered.

megatron has a format with the same idea ("fully_reshardable"). It writes wrong state if a gradient buffer has several
buckets and one of them is padded, as with tied embeddings, an odd vocabulary and pipeline parallelism. In megatron-core
0.16.1 distrib_optimizer.get_parameter_state_dp_zero drops the padding and sharded_param_state_fully_reshardable counts
it. So the state is put together here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from mrl.engine.megatron.muon import MOMENTUM, Muon
from mrl.engine.megatron.optim import gradient_buffers, moments, optimizers_of, shards
from mrl.engine.torch_dist.boxes import Box, PlacedTensor
from mrl.engine.trained_state import TrainedState, clone_tensors, restore_tensors


def step_count(optimizer: MegatronOptimizer) -> int:
    """Returns how many updates AdamW has made.

    torch's counts them for each tensor, the fused ones of transformer-engine and apex for a group of tensors.
    """
    inner = [part.optimizer for part in optimizers_of(optimizer)]
    counted = [*(s for adam in inner for s in adam.state.values()), *(g for adam in inner for g in adam.param_groups)]
    return max((int(place["step"]) for place in counted if "step" in place), default=0)


def set_step_count(adam: torch.optim.Optimizer, steps: int) -> None:
    """Sets the count of updates at the place of this AdamW; Muon counts none."""
    adam = adam.adamw if isinstance(adam, Muon) else adam
    if isinstance(adam, torch.optim.AdamW):
        for main, state in adam.state.items():
            if MOMENTUM in state:
                continue
            state["step"] = torch.tensor(float(steps), device=main.device)  # fused kernels read it on the device
    else:
        for group in adam.param_groups:
            group["step"] = steps


def boxes(optimizer: MegatronOptimizer, placed: Iterable[PlacedTensor], *, to_read: bool) -> Iterator[Box]:
    """Yields the boxes of this rank's state that it writes, or all of them to read into.

    placed: the model's parameters. Data-parallel ranks have different entries of one. Among other ranks with the same
    entries, one writes. Moments are zero before the first step; those to read into are made.
    """
    of_parameter = {id(each.tensor): each for each in placed}
    for part, parameter, main, span in shards(optimizer):
        place = of_parameter[id(parameter)]
        if any(place.replica[:-1]) and not to_read:
            continue
        for name, values in itertools.chain([("master", main)], moments(part, main, make=to_read)):
            yield from place.of_entries(span, values.detach().view(-1), f"optimizer.{name}.")


Chunks = Sequence[DistributedDataParallel]


def copy_trained_state(chunks: Chunks, optimizer: MegatronOptimizer, *, gradients: bool, spent: bool) -> TrainedState:
    """Returns this rank's trained state. gradients: some have accumulated and are not reduced."""
    return TrainedState(
        weights=clone_tensors(_weights(chunks, optimizer)),
        moments=clone_tensors(_moments(optimizer)),
        updates=step_count(optimizer),
        gradients=clone_tensors(b.grad_data for b in gradient_buffers(chunks)) if gradients else None,
        spent=spent,
    )


@torch.no_grad()
def restore_trained_state(chunks: Chunks, optimizer: MegatronOptimizer, state: TrainedState) -> None:
    """Restores the state. Gradients become zero if the state has none."""
    restore_tensors(_weights(chunks, optimizer), state.weights)
    restore_tensors(_moments(optimizer, make=True), state.moments)
    for part in optimizers_of(optimizer):
        set_step_count(part.optimizer, state.updates)
    if state.gradients is None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
    else:
        restore_tensors([b.grad_data for b in gradient_buffers(chunks)], state.gradients)
    optimizer.zero_grad()


def _moments(optimizer: MegatronOptimizer, *, make: bool = False) -> Iterator[Tensor]:
    for part, _, main, _ in shards(optimizer):
        yield from (moment for _, moment in moments(part, main, make=make))


def _weights(chunks: Chunks, optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yields the trained parameters, and the masters of this rank's shards."""
    yield from (p.data for chunk in chunks for p in chunk.parameters() if p.requires_grad)
    yield from (main.data for _, _, main, _ in shards(optimizer))
