"""Does steps one and three of a micro-batch: from sequences to the model's inputs, and from its outputs back.

Dimensions: `S` sequences, `T` real tokens, `P` positions of the micro-batch with padding, over all context-parallel
ranks.

Every sequence is padded to a multiple of 2*cp (its zigzag segments). The whole micro-batch is padded to a multiple of
what sequence parallelism splits and, for FP8, of what its products take of each rank. "Padded" micro-batches give every
sequence the same number of positions. With `engine.micro_batch.pad`, and for transformer-engine's userbuffers, all
micro-batches have the same number. The rest behind the last sequence is filled with sequences of padding. None is
longer than the longest of the others (or `PADDING`), so attention computes no more for them than for real ones.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from mrl.batch import MTP_MASK, Batch, to_device
from mrl.mcore_models.attention import PackedLayout, zigzag_inverse, zigzag_places
from mrl.parallel import Coordinates, ParallelDims

PADDING = 128
"""Length of a sequence of padding, if no other one is longer."""


@dataclasses.dataclass(frozen=True)
class MTPInputs:
    """Holds the inputs of an MTP layer.

    The layer of depth `k` (from 1) joins a hidden state with the token `k` later in its sequence, and predicts the
    next.
    """

    tokens: Tensor  # [P/cp] int64, 0 without a token
    labels: Tensor  # [P/cp] int64, 0 without a label
    padding: Tensor  # [P/cp] bool, True without a token
    trained: Tensor  # positions with a label that counts in the loss
    loss_mask: Tensor  # [T] fp32, the weights of these labels in the micro-batch's order


@dataclasses.dataclass(frozen=True)
class ModelInputs:
    """Holds the inputs of the model on one rank."""

    tokens: Tensor  # [P/cp] int64, any id in padding
    labels: Tensor  # [P/cp] or [P/cp, K] int64, 0 in padding
    padding: Tensor  # [P/cp] bool, True in padding
    trained: Tensor | None  # positions with a label that counts in the loss; None for all
    layout: PackedLayout  # the sequence of each position
    places: Tensor  # [T] the position of each real token among all P
    mtp: tuple[MTPInputs, ...] = ()  # for each MTP layer


def padded_lengths(
    lengths: list[int], dims: ParallelDims, *, packed: bool, multiple: int = 1, places: int | None = None
) -> list[int]:
    """Returns the padded length of each sequence. An empty micro-batch gets one sequence of padding.

    multiple: each rank's positions are a multiple of it; under sequence parallelism a rank has fewer of them. places:
    the positions of the whole micro-batch; then sequences of padding may follow the others.
    """
    if places is not None:
        padded = [dims.places_of(n) for n in lengths]
        rest, longest = places - sum(padded), max([*padded, dims.places_of(PADDING)])
        assert rest >= 0, f"a micro-batch of {sum(padded)} places is larger than {places}, which all are to have"
        return padded + [min(longest, rest - start) for start in range(0, rest, longest)]
    whole = dims.cp * math.lcm(2 if dims.cp > 1 else 1, multiple * (dims.tp if dims.sp else 1))
    if not lengths:
        return [whole]
    if not packed:
        return [-(-max(lengths) // whole) * whole] * len(lengths)
    padded = [dims.places_of(n) for n in lengths]
    padded[-1] += -sum(padded) % whole
    return padded


def prepare(
    batch: Batch,
    dims: ParallelDims,
    coords: Coordinates,
    *,
    packed: bool,
    device: torch.device,
    thd: bool,
    mtp: int = 0,
    multiple: int = 1,
    places: int | None = None,
    fillers: int = 1,
    fixed: bool = False,
) -> ModelInputs:
    """Lays out the sequences of a micro-batch for this rank.

    thd: for transformer-engine's attention. mtp: MTP layers to run. multiple, places: as in `padded_lengths`. fillers:
    so many ids alternate in padding. With much padding, equal ids would all go to the same experts. fixed: as of
    `PackedLayout.for_sequences`.
    """
    lengths = batch.lengths.tolist()
    padded = padded_lengths(lengths, dims, packed=packed, multiple=multiple, places=places)
    starts = torch.tensor([0, *padded[:-1]]).cumsum(0)[: len(lengths)]
    at = batch.position_ids.cpu() + starts.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    total = sum(padded)
    tokens, labels = torch.arange(total) % fillers, torch.zeros(total, *batch.labels.shape[1:], dtype=torch.int64)
    padding, counts = torch.ones(total, dtype=torch.bool), torch.zeros(total, dtype=torch.bool)
    tokens[at], labels[at], padding[at] = batch.tokens.cpu(), batch.labels.cpu(), False
    counts[at] = batch.loss_mask.cpu() != 0
    positions = torch.cat([torch.arange(n) for n in padded])
    order, mine = None, slice(None)
    if dims.cp > 1:
        mine = zigzag_places(tuple(padded), dims.cp, coords.cp_rank)
        tokens, labels, padding, counts, positions = (t[mine] for t in (tokens, labels, padding, counts, positions))
        order = to_device(zigzag_inverse(tuple(padded), dims.cp), device)
    layout = PackedLayout.for_sequences(
        padded, positions=to_device(positions, device), order=order, qkv_format="thd" if thd else "sbhd", fixed=fixed
    )
    trained = None if counts.all() else to_device(counts.nonzero()[:, 0], device)
    mtp_inputs = tuple(_mtp_inputs(batch, depth, at, total, mine, device) for depth in range(1, mtp + 1))
    tokens, labels, padding, at = (to_device(t, device) for t in (tokens, labels, padding, at))
    return ModelInputs(tokens, labels, padding, trained, layout, at, mtp_inputs)


def _mtp_inputs(
    batch: Batch, depth: int, places: Tensor, total: int, mine: Tensor | slice, device: torch.device
) -> MTPInputs:
    """Returns the inputs of the MTP layer of a depth.

    places: positions of the micro-batch's tokens among all `total`. mine: those on this rank, in its order.
    """
    assert batch.labels.dim() == 1, "MTP layers predict one label for each token"
    lengths = batch.lengths.cpu()
    has = batch.position_ids.cpu() + depth < lengths.repeat_interleave(lengths)
    at = torch.arange(batch.num_tokens)[has] + depth
    loss_mask = torch.zeros(batch.num_tokens)
    loss_mask[has] = batch.token_fields.get(MTP_MASK, batch.loss_mask).cpu()[at]
    tokens, labels = torch.zeros(total, dtype=torch.int64), torch.zeros(total, dtype=torch.int64)
    padding, counts = torch.ones(total, dtype=torch.bool), torch.zeros(total, dtype=torch.bool)
    tokens[places[has]], labels[places[has]], padding[places[has]] = (
        batch.tokens.cpu()[at],
        batch.labels.cpu()[at],
        False,
    )
    counts[places] = loss_mask != 0
    trained = counts[mine].nonzero()[:, 0]  # on the host: nonzero on a GPU makes the host wait
    tokens, labels, padding, trained, loss_mask = (
        to_device(t, device) for t in (tokens[mine], labels[mine], padding[mine], trained, loss_mask)
    )
    return MTPInputs(tokens, labels, padding, trained, loss_mask)


def restore(outputs: Tensor, inputs: ModelInputs, cp_group: dist.ProcessGroup) -> Tensor:
    """Returns outputs [P/cp, K] of this rank as [T, K] in the micro-batch's order, on every context-parallel rank.

    Every rank then computes the whole loss. The backward pass gives each rank only the gradient of its own positions.
    Over the group these add up to the gradient of one loss.
    """
    order = inputs.layout.order
    if order is not None:
        outputs = gather_from_sequence_parallel_region(outputs, tensor_parallel_output_grad=False, group=cp_group)
        outputs = outputs[order]
    return outputs[inputs.places]
