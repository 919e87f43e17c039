"""Copies and restores the trained state of a megatron model (`mrl.engine.trained_state`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from mrl.engine.megatron import optim, optim_state
from mrl.engine.trained_state import TrainedState, clone_tensors, restore_tensors

Chunks = Sequence[DistributedDataParallel]


def copy_trained_state(chunks: Chunks, optimizer: MegatronOptimizer, *, gradients: bool, spent: bool) -> TrainedState:
    """Returns this rank's trained state. gradients: some have accumulated and are not reduced."""
    return TrainedState(
        weights=clone_tensors(_weights(chunks, optimizer)),
        moments=clone_tensors(_moments(optimizer)),
        updates=optim_state.step_count(optimizer),
        gradients=clone_tensors(b.grad_data for b in optim.gradient_buffers(chunks)) if gradients else None,
        spent=spent,
    )


@torch.no_grad()
def restore_trained_state(chunks: Chunks, optimizer: MegatronOptimizer, state: TrainedState) -> None:
    """Restores the state. Gradients become zero if the state has none."""
    restore_tensors(_weights(chunks, optimizer), state.weights)
    restore_tensors(_moments(optimizer, make=True), state.moments)
    for part in optim.optimizers_of(optimizer):
        optim_state.set_step_count(part.optimizer, state.updates)
    if state.gradients is None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
    else:
        restore_tensors([b.grad_data for b in optim.gradient_buffers(chunks)], state.gradients)
    optimizer.zero_grad()


def _moments(optimizer: MegatronOptimizer, *, make: bool = False) -> Iterator[Tensor]:
    for part, _, main, _ in optim.shards(optimizer):
        yield from (moment for _, moment in optim.moments(part, main, make=make))


def _weights(chunks: Chunks, optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yields the trained parameters, and the masters of this rank's shards."""
    yield from (p.data for chunk in chunks for p in chunk.parameters() if p.requires_grad)
    yield from (main.data for _, _, main, _ in optim.shards(optimizer))
