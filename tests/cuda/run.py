"""One rank of the Megatron engine on fake CUDA tensors: init, mini-batch, optimizer step; nothing of mrl is replaced.

What is given, because nobody else runs and nothing has a value: the shapes that pipeline stages tell each other, and how
many tokens each expert gets (as even as can be).
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tests.cuda import fake, models  # before mrl: fake.py says what torch is here
from tests.cuda.cases import Case, Result


class _Given(fake.Given):
    """Experts get tokens as evenly as can be, the same numbers on every rank."""

    def __init__(self, case: Case) -> None:
        self.micro_batches = case.micro_batches  # of every rank
        self.lengths = case.lengths * case.micro_batches
        self.shape: tuple[int, ...] = ()  # of what pipeline stages send each other
        self.dispatcher: Any = None  # the one at work
        self.tokens = 0  # that it has on this rank

    def counts(self) -> list[int]:
        """Returns this rank's tokens for each expert."""
        config = self.dispatcher.config
        each, more = divmod(self.tokens * config.moe_router_topk, config.num_moe_experts)
        return [each + (i < more) for i in range(config.num_moe_experts)]

    def here(self) -> list[int]:
        """Returns the tokens of all ranks for each of this rank's experts."""
        at = self.dispatcher
        return [self.counts()[i] * at.tp_size * at.ep_size for i in at.local_expert_indices]

    def selected(self, mask: Any) -> int:
        if self.dispatcher is None or mask.dim() != 2:
            return super().selected(mask)
        gathers = type(self.dispatcher).__name__ == "MoEAllGatherTokenDispatcher"
        return sum(self.here()) if gathers else sum(self.counts())

    def told(self, function: str) -> Any:
        if function == "from_last_stage":
            return {"loss": 1.0}, [("log_probs", (sum(self.lengths),), torch.float32)]
        return super().told(function)

    def number(self, tensor: Any, function: str) -> Any:
        return self.micro_batches if function == "most" else super().number(tensor, function)

    def numbers(self, tensor: Any, function: str) -> Any:
        if function == "_communicate_shapes":
            return list(self.shape)
        if function == "in_batch_order":
            return [0, *itertools.accumulate(self.lengths)]
        at, size = self.dispatcher, tuple(tensor.shape)
        if function == "sort_chunks_by_idxs":  # which chunks there are, of which sizes
            if tensor is at.sort_input_by_local_experts or tensor is at.restore_output_by_local_experts:
                return list(range(*size))
            return [n // (at.tp_size * at.ep_size) for n in self.here()] * (at.tp_size * at.ep_size)
        if at is not None and size == (at.num_local_experts,):
            return self.here()
        return super().numbers(tensor, function)

    def know_experts(self) -> None:
        """Puts these numbers where megatron's dispatchers bring theirs to the host."""
        from megatron.core.transformer.moe import token_dispatcher

        for kind in (token_dispatcher.MoEAlltoAllTokenDispatcher, token_dispatcher.MoEAllGatherTokenDispatcher):
            kind.dispatch_preprocess = self._noting(kind.dispatch_preprocess)
        token_dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = self._to_host

    def _noting(self, method: Any) -> Any:
        def dispatch_preprocess(at: Any, hidden: Any, routing_map: Any, probs: Any) -> Any:
            self.dispatcher, self.tokens = at, routing_map.shape[0]
            return method(at, hidden, routing_map, probs)

        return dispatch_preprocess

    @property
    def _to_host(self) -> Any:
        def _maybe_dtoh_and_synchronize(at: Any, point: str, tokens_per_expert: Any = None) -> Any:
            if point == at.cuda_dtoh_point and at.cuda_sync_point != "no_sync":
                counts, per, ranks = self.counts(), at.num_local_experts, at.tp_size * at.ep_size
                mine = [counts[i] for i in at.local_expert_indices]
                if ranks > 1:
                    at.input_splits = np.array([sum(counts[i * per : (i + 1) * per]) for i in range(at.ep_size)])
                    at.output_splits = np.array([sum(mine)] * at.ep_size)
                    at.output_splits_tp = np.array([sum(mine) * at.ep_size] * at.tp_size)
                with unset_fake_temporarily():
                    if per > 1:
                        at.num_global_tokens_per_local_expert = torch.tensor([mine] * ranks)
                    tokens_per_expert = torch.tensor(self.here())
            if point == at.cuda_sync_point:
                fake.waits("d2h_event.synchronize")
            return tokens_per_expert

        return _maybe_dtoh_and_synchronize


def run(case: Case) -> Result:
    """Builds the engine and makes one update."""
    fake.join_world(case.rank, case.world)
    from mrl.batch import Batch
    from mrl.engine.lora import identity
    from mrl.engine.megatron import inputs
    from tests.cuda import update

    folder = models.write(case.model, Path(tempfile.mkdtemp()), case.layers, **case.changes)
    if case.lora:
        models.write_zeros(folder)
    given = _Given(case)
    given.know_experts()
    prepare = inputs.prepare

    def on_the_device(batch: Any, *args: Any, device: Any, **kwargs: Any) -> Any:
        """`prepare` looks into tokens, so it has real ones; what it moves to the device becomes fake there."""
        with unset_fake_temporarily():
            made = prepare(batch, *args, device=torch.device("meta"), **kwargs)
        return _moved(made, lambda t: torch.empty(t.shape, dtype=t.dtype, device=device if t.is_meta else t.device))

    inputs.prepare = on_the_device
    Batch.select, identity.fingerprint = _on_real_tensors(Batch.select), _on_real_tensors(identity.fingerprint)
    batch = update.batch_of(case)
    with fake.Fake(given) as watched:

        def built(dims: Any, hidden: int) -> None:
            rows = sum(inputs.padded_lengths(list(case.lengths), dims, packed=True)) // dims.cp
            given.shape = (rows // (case.tp if dims.sp else 1), 1, hidden)

        return update.make(case, folder, batch, watched.memory, watched.syncs, built)


def _on_real_tensors(function: Any) -> Any:
    """What looks into the numbers of a batch or a file gets them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def _moved(made: Any, move: Any) -> Any:
    """A dataclass with every tensor in it moved."""
    found = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    changes: dict[int, Any] = {}  # one tensor in several fields stays one
    for value in found.values():
        if isinstance(value, torch.Tensor) and id(value) not in changes:
            changes[id(value)] = move(value)
        elif dataclasses.is_dataclass(value):
            changes[id(value)] = _moved(value, move)
    return dataclasses.replace(made, **{name: changes[id(v)] for name, v in found.items() if id(v) in changes})
