"""Makes the process groups of a layout, and keeps megatron's process-wide state per engine.

megatron-core keeps its groups, its RNG tracker and some counters in module globals. An engine owns a `MegatronState`
and works inside `with state.installed():`, so engines with different layouts share a process.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from mrl.engine.collective import TIMEOUT
from mrl.parallel import Coordinates, ParallelDims

_groups_of_layout: dict[ParallelDims, dict[str, Any]] = {}
"""Engines of one layout share its groups, because groups cost file descriptors and seconds. They hold no state."""


class MegatronState:
    """Holds one engine's share of megatron's globals: parallel_state, RNG states."""

    def __init__(self, dims: ParallelDims, seed: int) -> None:
        self.dims = dims
        self.coords: Coordinates = dims.coordinates(dist.get_rank())
        self._globals = self._layout_globals(dims)
        self._rng: tuple[dict[str, Any], torch.Tensor, torch.Tensor] | None = None
        self._depth = 0
        with self.installed():
            # Ranks with other layers, positions or sequences draw different numbers. Ranks of one tensor-parallel group
            # draw different ones in tensor-parallel regions and the same elsewhere. megatron adds the tp rank to the
            # seed of these regions (0.16.1 and 0.19.2, tensor_parallel/random.model_parallel_cuda_manual_seed). So
            # streams are 100 apart.
            at, d = self.coords, dims
            stream = seed + 100 * (at.pp_rank + d.pp * (at.cp_rank + d.cp * at.dp_rank))
            torch.manual_seed(stream)
            tensor_parallel.model_parallel_cuda_manual_seed(stream)

    @staticmethod
    def _layout_globals(dims: ParallelDims) -> dict[str, Any]:
        if dims not in _groups_of_layout:
            before = _snapshot()
            _restore(_pristine)
            # _host_dp_group sends Python objects over the gloo group, because over NCCL they would go through a GPU.
            # DistributedOptimizer also takes it (get_data_parallel_group_gloo).
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=dims.tp, pipeline_model_parallel_size=dims.pp,
                virtual_pipeline_model_parallel_size=dims.vpp if dims.vpp > 1 else None,
                context_parallel_size=dims.cp, expert_model_parallel_size=dims.ep,
                expert_tensor_parallel_size=dims.etp, create_gloo_process_groups=True,
                distributed_timeout_minutes=int(TIMEOUT.total_seconds() // 60),
            )  # fmt: skip
            _groups_of_layout[dims] = _snapshot()
            _restore(before)
        return dict(_groups_of_layout[dims])

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Sets megatron's globals to this engine's inside. May be nested."""
        if self._depth:
            yield
            return
        outside, outside_rng = _snapshot(), rng_state()
        _restore(self._globals)
        if self._rng is not None:
            set_rng_state(self._rng)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._globals, self._rng = _snapshot(), rng_state()
            _restore(outside)
            set_rng_state(outside_rng)

    def check(self) -> None:
        """Asserts that the groups are laid out as `mrl.parallel` computes. Otherwise a run would train on scrambled
        shards."""
        have = Coordinates(
            parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank(),
            parallel_state.get_data_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_data_parallel_rank(),
        )  # fmt: skip
        assert have == self.coords, f"megatron places rank {dist.get_rank()} at {have}, mrl.parallel at {self.coords}"


def forget_groups() -> None:
    """Drops all layouts' groups, and megatron's, for a process that leaves its world and joins another (meta.py)."""
    _groups_of_layout.clear()
    _restore(_pristine)


def _snapshot() -> dict[str, Any]:
    skip = (types.ModuleType, types.FunctionType, type)
    return {
        k: v
        for k, v in vars(parallel_state).items()
        if k.startswith("_") and not k.startswith("__") and not isinstance(v, skip)
    }


def _restore(state: dict[str, Any]) -> None:
    vars(parallel_state).update(state)


_pristine = _snapshot()


def rng_state() -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Returns megatron's (tracker states, default CPU generator, default device generator).

    They are an engine's inside `MegatronState.installed`.
    """
    tracker = tensor_parallel.get_cuda_rng_tracker()
    return dict(tracker.get_states()), torch.get_rng_state(), torch.cuda.get_rng_state()


def set_rng_state(state: tuple[dict[str, Any], torch.Tensor, torch.Tensor]) -> None:
    tracker, host, device = state
    tensor_parallel.get_cuda_rng_tracker().set_states(dict(tracker))
    torch.set_rng_state(host)
    torch.cuda.set_rng_state(device)
