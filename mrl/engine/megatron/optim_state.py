"""AdamW's state in a checkpoint: master weights and moments, keyed and split like the parameters they belong to.

megatron has a format with the same idea ("fully_reshardable"), which loses its place where a gradient buffer has
several buckets and one of them is padded: state is written that belongs to other parameters (megatron-core 0.16.1,
distrib_optimizer.get_parameter_state_dp_zero drops the padding, sharded_param_state_fully_reshardable counts it). Tied
embeddings with an odd vocabulary under pipeline parallelism are enough. So the state is put together here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from mrl.engine.megatron.optim import optimizers_of, shards
from mrl.mcore_models import platform

PARTS = ("master", "exp_avg", "exp_avg_sq")


def step_count(optimizer: MegatronOptimizer) -> int:
    """Updates that AdamW has made: torch's counts them for each tensor, the fused ones of transformer-engine and apex
    for a group of tensors."""
    inner = [part.optimizer for part in optimizers_of(optimizer)]
    counted = [*(s for adam in inner for s in adam.state.values()), *(g for adam in inner for g in adam.param_groups)]
    return max((int(place["step"]) for place in counted if "step" in place), default=0)


def set_step_count(adam: torch.optim.Optimizer, steps: int) -> None:
    """The other way: puts the count where this AdamW keeps it."""
    if isinstance(adam, torch.optim.AdamW):
        for state in adam.state.values():
            state["step"] = torch.tensor(float(steps))
    else:
        for group in adam.param_groups:
            group["step"] = steps


def sharded(optimizer: MegatronOptimizer, model_state: Mapping[str, Any], *, loading: bool) -> dict[str, Any]:
    """Sharded tensors of the whole state, for dist_checkpointing to save or to load into. Collective.

    model_state: the model chunks' sharded state dict, whose entries say how each parameter is split. Each
    parameter's state is gathered over its data-parallel ranks, on the host; when `loading`, it is left empty.
    """
    placed, _ = extract_sharded_tensors_and_factories(dict(model_state))
    of_parameter = {id(entry.data): entry for entry in nested_values(placed)}
    mine = {id(parameter): (part, main, span) for part, parameter, main, span in shards(optimizer)}
    result: dict[str, Any] = {}
    for part in optimizers_of(optimizer):
        for buffer in part.buffers:
            for parameter in buffer.param_index_map:
                entry = of_parameter[id(parameter)]
                for name in PARTS:
                    whole = torch.empty(parameter.numel(), dtype=torch.float32)
                    if not loading:
                        whole = _gather(
                            _local(name, mine.get(id(parameter))), parameter.numel(), part.data_parallel_group
                        )
                    data = whole.view(parameter.shape)
                    key = f"optimizer.{name}.{entry.key}"
                    changes = {"key": key, "data": data} | (
                        {} if isinstance(entry, ShardedTensorFactory) else {"dtype": data.dtype}
                    )
                    result[f"{len(result)}"] = dataclasses.replace(entry, **changes)
    return result


def restore(optimizer: MegatronOptimizer, loaded: Mapping[str, Tensor], steps: int) -> None:
    """Puts what `sharded(..., loading=True)` described, now filled, into this rank's shards."""
    mine = {id(parameter): (part, main, span) for part, parameter, main, span in shards(optimizer)}
    entries = iter(loaded[str(i)] for i in range(len(loaded)))
    for part in optimizers_of(optimizer):
        for buffer in part.buffers:
            for parameter in buffer.param_index_map:
                whole = {name: next(entries).reshape(-1) for name in PARTS}
                if id(parameter) not in mine:
                    continue
                _, main, span = mine[id(parameter)]
                main.data.copy_(whole["master"][span].view(main.shape))
                part.optimizer.state[main] = {
                    name: whole[name][span].to(main.device).view(main.shape).clone() for name in PARTS[1:]
                }
    for part in optimizers_of(optimizer):
        set_step_count(part.optimizer, steps)


def _local(name: str, shard: tuple | None) -> tuple[Tensor, slice] | None:
    """This rank's part of one kind of state of a parameter; moments are zero before the first step."""
    if shard is None:
        return None
    part, main, span = shard
    if name == "master":
        return main.detach().view(-1), span
    moments = part.optimizer.state.get(main, {}).get(name)
    return (torch.zeros_like(main) if moments is None else moments).view(-1), span


def _gather(local: tuple[Tensor, slice] | None, size: int, group: dist.ProcessGroup) -> Tensor:
    """[size] fp32 on the host, bit for bit what the ranks of the group hold: bit patterns are summed as integers."""
    if group.size() == 1:
        assert local is not None, "one rank has the whole"
        return local[0].cpu().clone()
    bits = torch.zeros(size, dtype=torch.int32, device=platform.device())
    if local is not None:
        bits[local[1]] = local[0].contiguous().view(torch.int32)
    dist.all_reduce(bits, group=group)
    return bits.cpu().view(torch.float32)
