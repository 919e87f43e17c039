"""A mini-batch of sequences of unequal length, stored end to end.

Dimensions: `S` sequences, `T` tokens in all of them together.

Labels are shifted once, here: a sequence of token ids `x[0..n]` becomes `tokens = x[:-1]` and `labels = x[1:]`. So
every position has its next token, and masks, log-probs and advantages align with labels. Nothing else shifts, rolls or
cuts.

Example, two sequences `[5, 6, 7]` (the last token trains) and `[8, 9]` (trains)::

    Batch(tokens=[5, 6, 8], labels=[6, 7, 9], loss_mask=[0., 1., 1.], lengths=[2, 1],
          denominators={"tokens": 2.0, "sequences": 2.0})
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MTP_MASK = "mtp_mask"
"""Token field [T] float32: the weight of each label in the loss of MTP layers, where that is not the loss mask; its sum
over the global mini-batch is the denominator of the same name."""


MAX_PINNED_BYTES = 2**26
"""Bytes of a tensor that goes to a GPU through pinned memory: 8 M tokens."""


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Returns the tensor on `device`.

    To a GPU it goes through pinned memory: for other memory the host would wait until all earlier work of the GPU has
    ended. A large tensor (images) is waited for, because torch keeps pinned memory for good.
    """
    small = tensor.numel() * tensor.element_size() <= MAX_PINNED_BYTES
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda" and small:
        # a copy of our own, which nobody writes over
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
        return copy.to(device, non_blocking=True)
    return tensor.to(device)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Holds sequences laid end to end, with all that belongs to their tokens or to them."""

    tokens: Tensor  # [T] int64
    labels: Tensor  # [T] int64, the token after each token; [T, K] for several log-probs at each
    loss_mask: Tensor  # [T] float32, the weight of each label in the loss; 0 where it does not train
    lengths: Tensor  # [S] int64, sums to T, each at least 1
    token_fields: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Name -> [T, ...]: advantages, old log-probs, ..."""
    sequence_fields: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Name -> [S, ...]."""
    multi_modal_inputs: tuple[Mapping[str, Tensor], ...] = ()
    """Of each sequence, name -> tensor [N, ...]: the model's inputs for its images, each with an N of its own
    (`pixel_values` [patches, dim], `image_grid_thw` [images, 3]). {} for a sequence of text; () if all are text. They
    are no tokens: a slice of a sequence leaves them whole."""
    denominators: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Counts over the *whole global mini-batch* of this batch: "tokens" is the sum of the loss mask, "sequences" the
    number of sequences with a non-zero mask. They are set once, when the global mini-batch is made, and travel
    unchanged through every split."""
    group: int = 1
    """So many neighbours belong together (the chosen and the rejected answer of a pair): no rank and no micro-batch has
    some of them without the others."""

    @property
    def num_sequences(self) -> int:
        return self.lengths.numel()

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def max_length(self) -> int:
        return int(self.lengths.max()) if self.num_sequences else 0

    @property
    def cu_seqlens(self) -> Tensor:
        """[S + 1] int32: where each sequence starts; the last entry is T."""
        zero = torch.zeros(1, dtype=torch.int32, device=self.lengths.device)
        return torch.cat([zero, self.lengths.cumsum(0).to(torch.int32)])

    @property
    def position_ids(self) -> Tensor:
        """[T] int64: each token's index in its own sequence."""
        starts = self.cu_seqlens[:-1].long().repeat_interleave(self.lengths)
        return torch.arange(self.num_tokens, device=self.tokens.device) - starts

    @property
    def joined_multi_modal_inputs(self) -> dict[str, Tensor]:
        """Name -> the tensors of all sequences with images, end to end; {} without any."""
        names = {name: None for inputs in self.multi_modal_inputs for name in inputs}
        return {name: torch.cat([m[name] for m in self.multi_modal_inputs if name in m]) for name in names}

    def select(self, indices: Sequence[int]) -> "Batch":
        """Returns the sequences at `indices`, in that order; denominators stay those of the global mini-batch."""
        index = torch.as_tensor(list(indices), dtype=torch.int64)
        starts = self.cu_seqlens.long().tolist()
        where = [torch.arange(starts[i], starts[i + 1]) for i in index.tolist()]
        at = torch.cat(where) if where else torch.zeros(0, dtype=torch.int64)
        at, index = at.to(self.tokens.device), index.to(self.tokens.device)
        return dataclasses.replace(
            self, tokens=self.tokens[at], labels=self.labels[at], loss_mask=self.loss_mask[at],
            lengths=self.lengths[index],
            token_fields={k: v[at] for k, v in self.token_fields.items()},
            sequence_fields={k: v[index] for k, v in self.sequence_fields.items()},
            multi_modal_inputs=tuple(self.multi_modal_inputs[i] for i in indices) if self.multi_modal_inputs else (),
        )  # fmt: skip

    def to(self, device: torch.device | str) -> "Batch":
        """Returns the same batch with its tensors on `device`."""
        move = functools.partial(to_device, device=device)
        return dataclasses.replace(
            self, tokens=move(self.tokens), labels=move(self.labels), loss_mask=move(self.loss_mask),
            lengths=move(self.lengths),
            token_fields={k: move(v) for k, v in self.token_fields.items()},
            sequence_fields={k: move(v) for k, v in self.sequence_fields.items()},
            multi_modal_inputs=tuple({k: move(v) for k, v in m.items()} for m in self.multi_modal_inputs),
        )  # fmt: skip

    def with_denominators(self) -> "Batch":
        """Returns this batch as a whole global mini-batch: with denominators counted from its own loss mask."""
        masks = self.loss_mask.cpu().split(self.lengths.tolist())
        counts = {"tokens": float(self.loss_mask.sum()), "sequences": float(sum(bool(m.any()) for m in masks))}
        return dataclasses.replace(self, denominators=counts)


def make_batch(
    sequences: Sequence[Sequence[int]],
    masks: Sequence[Sequence[float]],
    *,
    token_fields: Mapping[str, Tensor] | None = None,
    sequence_fields: Mapping[str, Tensor] | None = None,
    multi_modal_inputs: Sequence[Mapping[str, Tensor]] = (),
) -> Batch:
    """Returns a global mini-batch from token ids and per-token masks. Labels are shifted here alone.

    sequences: token ids, each at least 2 long. masks: one weight per token of the same sequence. The weight of
    `sequences[i][j]` is that of predicting this token (the first token's is ignored: nothing precedes it).
    multi_modal_inputs: one mapping per sequence, or none at all.
    """
    assert len(multi_modal_inputs) in (0, len(sequences)), (
        f"{len(multi_modal_inputs)} inputs of {len(sequences)} sequences"
    )
    for i, (ids, mask) in enumerate(zip(sequences, masks, strict=True)):
        assert len(ids) >= 2, f"sequence {i} has {len(ids)} tokens; 2 are needed to have one label"
        assert len(ids) == len(mask), f"sequence {i} has {len(ids)} tokens and {len(mask)} mask entries"
    flat = lambda rows, dtype: torch.tensor([x for row in rows for x in row], dtype=dtype)  # noqa: E731
    return Batch(
        tokens=flat([ids[:-1] for ids in sequences], torch.int64),
        labels=flat([ids[1:] for ids in sequences], torch.int64),
        loss_mask=flat([m[1:] for m in masks], torch.float32),
        lengths=torch.tensor([len(ids) - 1 for ids in sequences], dtype=torch.int64),
        token_fields=dict(token_fields or {}),
        sequence_fields=dict(sequence_fields or {}),
        multi_modal_inputs=tuple(multi_modal_inputs) if any(multi_modal_inputs) else (),
    ).with_denominators()
