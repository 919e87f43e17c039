"""Weights and gradients between Hugging Face names and this rank's shards, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.converters.rules import ChunkPlan, Owned, Rule, chunk_plans, export_order, param_map
from mrl.converters.stacks import restacked
from mrl.converters.table import Family
from mrl.engine.megatron.optim import shards
from mrl.mcore_models.build import Model
from mrl.parallel import Coordinates, ParallelDims


def load(models: Sequence[Model], rules: Sequence[Mapping[str, Rule]], read: Callable[[str], Any]) -> None:
    """Fills the model chunks from `read` (HF name -> tensor or lazy slice); each rank reads its own entries."""
    for model, of_chunk in zip(models, rules, strict=True):
        parameters = tensors_of(model)
        unknown, unfilled = sorted(set(of_chunk) - set(parameters)), sorted(set(parameters) - set(of_chunk))
        assert not unknown and not unfilled, f"the model has no {unknown}; the table does not fill {unfilled}"
        with torch.no_grad():
            for name, rule in of_chunk.items():
                parameters[name].copy_(rule.load(read))


def tensors_of(model: Model) -> dict[str, Tensor]:
    """Parameters and stored buffers of a chunk, by name."""
    buffers = dict(model.named_buffers())
    stored = model.state_dict(keep_vars=True).keys() & buffers.keys()
    return dict(model.named_parameters()) | {name: buffers[name] for name in sorted(stored)}


def load_masters(
    optimizer: Any, models: Sequence[Model], rules: Sequence[Mapping[str, Rule]], read: Callable[[str], Any]
) -> None:
    """Sets fp32 master weights from `read`, where they are no views of the model's own."""
    rule_of = {
        id(p): of_chunk[name]
        for model, of_chunk in zip(models, rules, strict=True)
        for name, p in model.named_parameters()
    }
    for _, parameter, main, span in shards(optimizer):
        if parameter.dtype != main.dtype:
            whole = rule_of[id(parameter)].load(read)
            main.data.copy_(whole.reshape(-1)[span].view(main.shape))


def rules_here(
    family: Family, hf: Mapping[str, Any], dims: ParallelDims, coords: Coordinates, *, spec: str, head: str
) -> list[dict[str, Rule]]:
    """The rules of this rank's chunks, by parameter name."""
    plans = plans_here(hf, dims, coords)
    return [param_map(family, hf, layout=dims, coords=coords, chunk=plan, spec=spec, head=head) for plan in plans]


def plans_here(hf: Mapping[str, Any], dims: ParallelDims, coords: Coordinates) -> list[ChunkPlan]:
    plans = chunk_plans(hf["num_hidden_layers"], dims.pp, dims.vpp)
    return [plans[coords.pp_rank, v] for v in range(dims.vpp)]


def stream(
    models: Sequence[Model],
    value: Callable[[torch.nn.Parameter], Tensor],
    family: Family,
    hf: Mapping[str, Any],
    dims: ParallelDims,
    coords: Coordinates,
    *,
    spec: str,
    head: str,
    buffers: bool,
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor on the host) of every parameter, in one order, on rank 0; other ranks yield nothing.

    `value` picks what is streamed of a parameter: its data, or its gradient. One tensor exists whole at a time.
    buffers: with the stored buffers, which have data and no gradient.
    """
    pairs = _by_rule(models, value, family, hf, dims, coords, spec=spec, head=head, buffers=buffers)
    return restacked(pairs, family, hf)


def _by_rule(
    models: Sequence[Model],
    value: Callable[[torch.nn.Parameter], Tensor],
    family: Family,
    hf: Mapping[str, Any],
    dims: ParallelDims,
    coords: Coordinates,
    *,
    spec: str,
    head: str,
    buffers: bool,
) -> Iterator[tuple[str, Tensor]]:
    """(HF name of the tables, whole tensor) as `stream` says."""
    parameters = [tensors_of(model) for model in models]
    for owned in export_order(
        family, hf, layout=dims, chunks=chunk_plans(hf["num_hidden_layers"], dims.pp, dims.vpp), spec=spec, head=head
    ):
        if owned.rule.buffer and not buffers:
            continue
        shards = gathered(parameters, value, owned, dims, coords)
        if dist.get_rank() == 0:
            yield from owned.rule.merge(shards).items()


def gathered(
    parameters: Sequence[Mapping[str, Tensor]], value: Callable[[Tensor], Tensor], owned: Owned, dims: ParallelDims,
    coords: Coordinates,
) -> list[Tensor]:  # fmt: skip
    """The shards of `owned.rule` on the host of rank 0, in order; [] elsewhere. parameters: those of each chunk here, by name."""
    rule = owned.rule
    holders = _holders(dims, owned.pp_rank, owned.ep_rank, rule.axis, rule.degree)
    mine = coords.pp_rank == owned.pp_rank and dist.get_rank() in holders
    here = mine and 0 not in rule.shape(holders.index(dist.get_rank()))
    return _to_rank_0(value(parameters[owned.chunk][rule.mcore]).detach() if here else None, holders, rule)


def _holders(dims: ParallelDims, pp_rank: int, ep_rank: int | None, axis: str | None, degree: int) -> list[int]:
    """The lowest global rank for each shard of a parameter."""
    holders: list[int | None] = [None] * degree
    for rank in range(dims.world_size):
        at = dims.coordinates(rank)
        if at.pp_rank != pp_rank or (ep_rank is not None and at.ep_rank != ep_rank):
            continue
        place = {"tp": at.tp_rank, "etp": at.etp_rank, None: 0}[axis]
        if holders[place] is None:
            holders[place] = rank
    return holders


def _to_rank_0(shard: Tensor | None, holders: Sequence[int], rule: Rule) -> list[Tensor]:
    """The shards on the host of rank 0, in order; [] elsewhere. Point to point, over gloo."""
    rank = dist.get_rank()
    if rank != 0:
        for place, holder in enumerate(holders):
            if holder == rank and 0 not in rule.shape(place):
                header = torch.tensor([_DTYPES.index(shard.dtype)])
                dist.send(header, 0)
                dist.send(shard.cpu().contiguous(), 0)
        return []
    shards: list[Tensor | None] = []
    for place, holder in enumerate(holders):
        if 0 in rule.shape(place):  # an adapter of which the rank has no row
            shards.append(None)
            continue
        if holder == 0:
            shards.append(shard.cpu())
            continue
        header = torch.zeros(1, dtype=torch.int64)
        dist.recv(header, holder)
        tensor = torch.empty(rule.shape(place), dtype=_DTYPES[int(header)])
        dist.recv(tensor, holder)
        shards.append(tensor)
    some = next(found for found in shards if found is not None)
    return [some.new_empty(rule.shape(place)) if found is None else found for place, found in enumerate(shards)]


_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
