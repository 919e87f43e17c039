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
    moments = (
        optim.new_moment(part, name, main) if (kept := part.optimizer.state.get(main, {}).get(name)) is None else kept
        for part, _, main, _ in optim.shards(optimizer) for name in optim.moment_names(part, main)
    )  # fmt: skip
    return TrainedState(
        weights=clone_tensors(_weights(chunks, optimizer)),
        moments=clone_tensors(moments),
        updates=optim_state.step_count(optimizer),
        gradients=clone_tensors(b.grad_data for b in optim.gradient_buffers(chunks)) if gradients else None,
        spent=spent,
    )


@torch.no_grad()
def restore_trained_state(chunks: Chunks, optimizer: MegatronOptimizer, state: TrainedState) -> None:
    """Restores the state. Gradients become zero if the state has none."""
    restore_tensors(_weights(chunks, optimizer), state.weights)
    moments = []
    for part, _, main, _ in optim.shards(optimizer):
        of_main = part.optimizer.state[main]
        for name in optim.moment_names(part, main):
            if name not in of_main:  # the optimizer makes moments in its first step
                of_main[name] = optim.new_moment(part, name, main)
            moments.append(of_main[name])
    restore_tensors(moments, state.moments)
    for part in optim.optimizers_of(optimizer):
        optim_state.set_step_count(part.optimizer, state.updates)
    if state.gradients is None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
    else:
        restore_tensors([b.grad_data for b in optim.gradient_buffers(chunks)], state.gradients)
    optimizer.zero_grad()


def _weights(chunks: Chunks, optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yields the trained parameters, and the masters of this rank's shards."""
    yield from (p.data for chunk in chunks for p in chunk.parameters() if p.requires_grad)
    yield from (main.data for _, _, main, _ in optim.shards(optimizer))
