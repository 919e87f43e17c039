"""A model's weights or gradients, gathered one by one on rank 0 under the names of Hugging Face's and peft's files.

`value` picks what is streamed of a parameter: its data, or its gradient. One tensor exists whole at a time. Other ranks
take part and yield nothing, unless `stream` is asked for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.converters.rules import Owned, Rule, chunk_plans, export_order
from mrl.converters.stacks import restacked
from mrl.engine.collective import from_main
from mrl.engine.lora.shapes import SCORE
from mrl.engine.megatron.lora import AdapterRule, rules_of
from mrl.engine.megatron.model import Model
from mrl.engine.megatron.weights import tensors_of
from mrl.mcore_models import lora
from mrl.parallel import ParallelDims

HEAD = "output_layer.weight"


def stream(
    model: Model, value: Callable[[Tensor], Tensor], *, buffers: bool, sent_over: torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name in Hugging Face's files, whole tensor on the host) of every parameter, in one order.

    buffers: with the stored buffers, which have data and no gradient. sent_over: the device over which rank 0 sends
    them to every rank; None where it alone yields them.
    """
    return restacked(_by_rule(model, value, buffers=buffers, sent_over=sent_over), model.family, model.hf)


def _by_rule(
    model: Model, value: Callable[[Tensor], Tensor], *, buffers: bool, sent_over: torch.device | None
) -> Iterator[tuple[str, Tensor]]:
    """(name in the tables, whole tensor) as `stream` says."""
    of_chunks = [tensors_of(chunk) for chunk in model.chunks]
    for owned in _owned(model):
        if owned.rule.buffer and not buffers:
            continue
        shards = _gathered(model, of_chunks, value, owned)
        found = list(owned.rule.merge(shards).items()) if dist.get_rank() == 0 else None
        # At each rule, and not after all of them: every rank is at the same place of the stream here.
        yield from (found or ()) if sent_over is None else from_main(found, sent_over)


def _owned(model: Model) -> Iterator[Owned]:
    """Yields the rules of the whole model in the order of an export, and who holds what they are of."""
    chunks = chunk_plans(model.hf["num_hidden_layers"], model.dims.pp, model.dims.vpp, model.mtp)
    return export_order(
        model.family, model.hf, layout=model.dims, chunks=chunks, spec=model.spec, head=model.config.head
    )


def merged(model: Model) -> Callable[[Tensor], Tensor]:
    """From a parameter to its values with its adapter added in: a new tensor, for as long as it is used."""
    of_parameter: dict[int, lora.Adapter] = {}
    for chunk, of_chunk in zip(model.chunks, model.rules, strict=True):
        parameters = dict(chunk.named_parameters())
        for rule in of_chunk.values():
            if isinstance(rule, AdapterRule):
                continue
            module, _, name = rule.mcore.rpartition(".")
            adapter = lora.adapter_of(chunk.get_submodule(module), name)
            if adapter is not None:
                of_parameter[id(parameters[rule.mcore])] = adapter

    def value(parameter: Tensor) -> Tensor:
        adapter = of_parameter.get(id(parameter))
        return parameter.data if adapter is None or not adapter.enabled else adapter.added_to(parameter.data)

    return value


def stream_trained(model: Model, value: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name in peft's file, whole tensor on the host) of what trains of a model with adapters."""
    return _joined(_of_adapters(model, value))


def _of_adapters(model: Model, value: Callable[[Tensor], Tensor]) -> Iterator[tuple[Rule, Tensor]]:
    of_chunks = [dict(chunk.named_parameters()) for chunk in model.chunks]
    for owned in _owned(model):
        rules: list[Rule] = list(rules_of(owned.rule, model.adapters, model.family))
        if model.config.head == "value" and owned.rule.mcore == HEAD:
            rules.append(owned.rule)
        for rule in rules:
            shards = _gathered(model, of_chunks, value, dataclasses.replace(owned, rule=rule))
            if dist.get_rank() == 0:
                yield rule, rule.merge(shards)[rule.hf[0]]


def _joined(pairs: Iterable[tuple[AdapterRule | Rule, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as peft's file has them, from (rule, A or B of one expert) in any order."""
    waiting: dict[str, dict[int, Tensor]] = {}
    for rule, tensor in pairs:
        if not isinstance(rule, AdapterRule):
            yield SCORE, tensor
            continue
        parts = waiting.setdefault(rule.file_name, {})
        parts[rule.expert or 0] = tensor
        if len(parts) == max(rule.of.experts, 1):
            yield rule.file_name, rule.to_file([part for _, part in sorted(waiting.pop(rule.file_name).items())])
    assert not waiting, f"parts are missing of {sorted(waiting)}"


def _gathered(
    model: Model, of_chunks: Sequence[Mapping[str, Tensor]], value: Callable[[Tensor], Tensor], owned: Owned
) -> list[Tensor]:
    """Returns the shards of `owned.rule` on the host of rank 0, in order; [] elsewhere. of_chunks: their tensors, by
    name."""
    rule, coords = owned.rule, model.coords
    holders = _holders(model.dims, owned.pp_rank, owned.ep_rank, rule.axis, rule.degree)
    mine = coords.pp_rank == owned.pp_rank and dist.get_rank() in holders
    here = mine and 0 not in rule.shape(holders.index(dist.get_rank()))
    return _to_rank_0(value(of_chunks[owned.chunk][rule.mcore]).detach() if here else None, holders, rule)


def _holders(dims: ParallelDims, pp_rank: int, ep_rank: int | None, axis: str | None, degree: int) -> list[int]:
    """Returns the lowest global rank for each shard of a parameter."""
    holders: dict[int, int] = {}
    for rank in range(dims.world_size):
        at = dims.coordinates(rank)
        if at.pp_rank != pp_rank or (ep_rank is not None and at.ep_rank != ep_rank):
            continue
        place = {"tp": at.tp_rank, "etp": at.etp_rank, None: 0}[axis]
        holders.setdefault(place, rank)
    return [holders[place] for place in range(degree)]


def _to_rank_0(shard: Tensor | None, holders: Sequence[int], rule: Rule) -> list[Tensor]:
    """Returns the shards on the host of rank 0, in order; [] elsewhere. Point to point, over gloo."""
    rank = dist.get_rank()
    if rank != 0:
        for place, holder in enumerate(holders):
            if holder == rank and 0 not in rule.shape(place):
                assert shard is not None
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
            assert shard is not None
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
