"""Streams a model's weights or gradients to rank 0, one by one, under the names of Hugging Face's and peft's files.

Shards travel from device to device (NCCL on GPUs, gloo on CPUs) in batches of `BATCH_BYTES`, and are merged there.
Beside the model rank 0 holds one batch and the tensor being merged, or the stacked experts of a layer. Shapes and
dtypes follow from the rules, so they are not sent. Other ranks take part and yield nothing, unless `stream` is asked
for it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.engine.collective import TensorStream, from_main
from mrl.engine.lora.shapes import SCORE
from mrl.engine.megatron.lora import AdapterRule, rules_of
from mrl.engine.megatron.model import Model
from mrl.engine.megatron.weights import tensors_of
from mrl.mcore_models import lora
from mrl.ops import devices
from mrl.parallel import ParallelDims
from mrl.weights.algebra import Shape
from mrl.weights.rules import OwnedRule, Rule, chunk_plans, export_order
from mrl.weights.stacks import restack

HEAD = "output_layer.weight"

ValueOf = Callable[[Tensor], Tensor]
"""Picks the streamed tensor of a parameter: its data, or its gradient."""

BATCH_BYTES = 128 * 2**20
"""Bytes of shards that are sent to rank 0 at the same time; a larger one is sent alone."""

MIN_BATCH_BYTES = 2**20
"""Bytes that the smallest shard counts for, so that a batch has no more than 128 of them."""


def stream(
    model: Model, value: ValueOf, *, dtype: torch.dtype, buffers: bool, everywhere: bool = False
) -> TensorStream:
    """Yields (name in Hugging Face's files, whole tensor on the engine's device) of every parameter, in one order.

    dtype: of the tensors of `value`. buffers: with the stored buffers, which are fp32 and have no gradient. everywhere:
    rank 0 sends the tensors to all ranks, and all yield them.
    """
    return restack(_by_rule(model, value, dtype, buffers=buffers, everywhere=everywhere), model.family, model.hf)


def _by_rule(model: Model, value: ValueOf, dtype: torch.dtype, *, buffers: bool, everywhere: bool) -> TensorStream:
    """Yields (name in the tables, whole tensor); see `stream`."""
    of_chunks = [tensors_of(chunk) for chunk in model.chunks]
    owned = [each for each in _owned(model) if buffers or not each.rule.buffer]
    for rule, whole in _whole_tensors(owned, _shards(model, of_chunks, value, owned, dtype)):
        if everywhere:
            # at each rule, because all ranks are at the same point of the stream only here
            infos = {name: (shape, _dtype_of(rule, dtype)) for name, shape in zip(rule.hf, rule.hf_shapes, strict=True)}
            yield from from_main(whole, infos, devices.device())
        for name in tuple(whole):
            yield name, whole.pop(name)


def _owned(model: Model) -> Iterator[OwnedRule]:
    """Yields the rules of the whole model in the order of an export, and the ranks that hold their tensors."""
    chunks = chunk_plans(model.hf["num_hidden_layers"], model.dims.pp, model.dims.vpp, model.mtp)
    return export_order(
        model.family, model.hf, layout=model.dims, chunks=chunks, spec=model.spec, head=model.config.head
    )


def merge_adapters(model: Model) -> ValueOf:
    """Returns a function from a parameter to its values with its adapter added in: a new tensor."""
    of_parameter: dict[int, lora.Adapter] = {}
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            module, _, own_name = name.rpartition(".")
            adapter = lora.adapter_of(chunk.get_submodule(module), own_name)
            if adapter is not None:
                of_parameter[id(parameter)] = adapter

    def value(parameter: Tensor) -> Tensor:
        adapter = of_parameter.get(id(parameter))
        return parameter.data if adapter is None or not adapter.enabled else adapter.merged_weight(parameter.data)

    return value


def stream_trained(model: Model, value: ValueOf) -> TensorStream:
    """Yields (name in peft's file, whole tensor on the host) of the trained tensors of a model with adapters.

    value: gives fp32.
    """
    return _joined(_of_adapters(model, value))


def _of_adapters(model: Model, value: ValueOf) -> Iterator[tuple[Rule, Tensor]]:
    of_chunks = [dict(chunk.named_parameters()) for chunk in model.chunks]
    owned = []
    for each in _owned(model):
        rules: list[Rule] = list(rules_of(each.rule, model.adapters, model.family))
        if model.config.head == "value" and each.rule.mcore == HEAD:
            rules.append(each.rule)
        owned += [dataclasses.replace(each, rule=rule) for rule in rules]
    for rule, whole in _whole_tensors(owned, _shards(model, of_chunks, value, owned, torch.float32)):
        if whole:
            yield rule, whole.pop(rule.hf[0]).cpu()


def _joined(pairs: Iterable[tuple[AdapterRule | Rule, Tensor]]) -> TensorStream:
    """Yields (name, tensor) as in peft's file, from (rule, A or B of one expert) in any order."""
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


def _whole_tensors(
    owned: Sequence[OwnedRule], shards: Iterator[Tensor | None]
) -> Iterator[tuple[Rule, dict[str, Tensor]]]:
    """Yields each rule and, on rank 0, its whole tensors by name.

    The reader takes the tensors out. Tensors that it leaves are held until the next are there. shards: those of
    `_shards`, of the same rules.
    """
    for each in owned:
        of_rule = itertools.islice(shards, each.rule.degree)
        if dist.get_rank() == 0:
            yield each.rule, each.rule.merge(of_rule)
        else:
            collections.deque(of_rule, maxlen=0)
            yield each.rule, {}


@functools.cache
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


@dataclasses.dataclass(frozen=True)
class _Shard:
    """Describes a shard of a parameter on its way to rank 0."""

    owned: OwnedRule
    holder: int  # the sending rank, global
    shape: Shape
    dtype: torch.dtype

    @property
    def travels(self) -> bool:
        return self.holder != 0 and 0 not in self.shape  # a rank may have no row of an adapter


def _batches(model: Model, owned: Iterable[OwnedRule], dtype: torch.dtype) -> Iterator[list[_Shard]]:
    """Yields all shards of `owned`, in order; the same batches on every rank."""
    batch: list[_Shard] = []
    size = 0
    for each in owned:
        rule = each.rule
        for place, holder in enumerate(_holders(model.dims, each.pp_rank, each.ep_rank, rule.axis, rule.degree)):
            shard = _Shard(each, holder, rule.shape(place), _dtype_of(rule, dtype))
            taken = max(math.prod(shard.shape) * shard.dtype.itemsize, MIN_BATCH_BYTES)
            if batch and size + taken > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(shard)
            size += taken
    if batch:
        yield batch


def _dtype_of(rule: Rule, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if rule.buffer else dtype


def _shards(
    model: Model,
    of_chunks: Sequence[Mapping[str, Tensor]],
    value: ValueOf,
    owned: Sequence[OwnedRule],
    dtype: torch.dtype,
) -> Iterator[Tensor | None]:
    """Yields as many items on each rank: on rank 0 the shards of `owned`, in order, on the engine's device.

    of_chunks: tensors of this rank's chunks, by name.
    """
    rank, device = dist.get_rank(), devices.device()
    if dist.get_world_size() > 1:
        # batch_isend_irecv uses the communicator of all ranks, and NCCL makes it with all ranks or hangs. So each rank
        # takes part here, also one that sends nothing. (A single send would make one for each pair of ranks.)
        dist.all_reduce(torch.zeros(1, device=device))
    for batch in _batches(model, owned, dtype):
        shards: list[Tensor | None] = [None] * len(batch)
        transfers = []
        for i, shard in enumerate(batch):
            if shard.holder == rank and 0 not in shard.shape:
                held = value(of_chunks[shard.owned.chunk][shard.owned.rule.mcore]).detach()
                assert held.dtype == shard.dtype, f"{shard.owned.rule.mcore}: {held.dtype}, not {shard.dtype}"
                shards[i] = held.to(device).contiguous()
            elif rank == 0:
                shards[i] = torch.empty(shard.shape, dtype=shard.dtype, device=device)
            if shard.travels and rank in (0, shard.holder):
                way, other = (dist.irecv, shard.holder) if rank == 0 else (dist.isend, 0)
                transfers.append(dist.P2POp(way, shards[i], other))
        # on a GPU only the stream waits, so the host continues with the next batch
        for work in dist.batch_isend_irecv(transfers) if transfers else ():
            work.wait()
        transfers.clear()
        for i in range(len(batch)):
            held, shards[i] = shards[i], None
            yield held
            del held
