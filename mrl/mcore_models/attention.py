"""Core attention on `scaled_dot_product_attention`, for the layer spec that needs no transformer-engine.

Dimensions: `T` tokens of a micro-batch on this rank, `H` query heads and `G` key/value groups on this tensor-parallel
rank, `D` head size, `S` sequences, `L` length of a sequence.

Tokens come end to end, [T, 1, H, D], and a layout object that travels as megatron's `packed_seq_params` says which belong
together: `PackedLayout` for training and log-probs (a padded micro-batch is the case of equal lengths and runs as one
batch), `CacheLayout` for generation. Without one, the input is megatron's own [L, S, H, D], optionally left-padded.
Context parallelism: each rank holds segments `r` and `2*cp-1-r` of the `2*cp` segments of every sequence (the zigzag
that balances causal work); keys and values are gathered over the group and queries stay where they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


@dataclasses.dataclass
class PackedLayout(PackedSeqParams):
    """Megatron's packed-sequence parameters with what our attention needs on the host.

    padded_lengths: places of each sequence in the micro-batch, with its padding, over all context-parallel ranks; each
    a multiple of 2*cp where cp > 1. positions: [T] int64, each local place's index in its sequence.
    """

    padded_lengths: tuple[int, ...] = ()
    positions: Tensor | None = None

    @classmethod
    def make(
        cls, lengths: Sequence[int], padded: Sequence[int], *, positions: Tensor, qkv_format: str = "sbhd"
    ) -> "PackedLayout":
        """For sequences of `lengths` real tokens that occupy `padded` places each. qkv_format "thd" is for transformer-engine."""

        def starts(sizes: Sequence[int]) -> Tensor:
            return torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0).to(torch.int32).to(positions.device)

        real, places = starts(lengths), starts(padded)
        return cls(
            qkv_format=qkv_format, cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=places,
            cu_seqlens_kv_padded=places, max_seqlen_q=max(padded), max_seqlen_kv=max(padded),
            padded_lengths=tuple(padded), positions=positions,
        )  # fmt: skip

    @functools.cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Neighbouring sequences of equal length: (first place, how many, length of each), over all cp ranks."""
        runs: list[tuple[int, int, int]] = []
        start = 0
        for length in self.padded_lengths:
            if runs and runs[-1][2] == length:
                first, count, _ = runs[-1]
                runs[-1] = (first, count + 1, length)
            else:
                runs.append((start, 1, length))
            start += length
        return runs


@dataclasses.dataclass
class CacheLayout(PackedSeqParams):
    """Tokens of several sequences in generation, and the keys and values that came before them.

    new_lengths: tokens of each sequence in this forward; they lie end to end and padding may follow.
    cached_lengths: tokens of each sequence that are in the cache already. positions: [T], `cached + 0, 1, ...` for each
    sequence, 0 for padding. cache: layer number -> (keys, values), each [S, Lmax, G, D]; filled by the attention.
    """

    new_lengths: tuple[int, ...] = ()
    cached_lengths: tuple[int, ...] = ()
    max_length: int = 0
    positions: Tensor | None = None
    cache: dict[int, tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)


def zigzag_places(padded_lengths: tuple[int, ...], cp: int, cp_rank: int) -> Tensor:
    """[T] places in the whole micro-batch of the tokens that `cp_rank` holds, in the order it holds them."""
    parts, start = [], 0
    for length in padded_lengths:
        segment = length // (2 * cp)
        for s in (cp_rank, 2 * cp - 1 - cp_rank):
            parts.append(torch.arange(start + s * segment, start + (s + 1) * segment))
        start += length
    return torch.cat(parts)


def zigzag_inverse(padded_lengths: tuple[int, ...], cp: int) -> Tensor:
    """[cp*T] index that puts the ranks' shards, concatenated in rank order, back into the micro-batch's order."""
    return torch.argsort(torch.cat([zigzag_places(padded_lengths, cp, r) for r in range(cp)]))


def causal_mask(q_length: int, k_length: int, window: int | None, device: torch.device) -> Tensor:
    """[q_length, k_length] bool, True where the query (aligned to the end of the keys) may look; `window` tokens back at most."""
    allowed = torch.ones(q_length, k_length, dtype=torch.bool, device=device).tril(k_length - q_length)
    return allowed if window is None else allowed.triu(k_length - q_length - window + 1)


class SdpaAttention(MegatronModule):
    """softmax(q k^T * scale) v under a causal mask, with grouped queries, sliding window and context parallelism."""

    def __init__(self, config, layer_number, attn_mask_type=None, attention_type=None, attention_dropout=None,
                 softmax_scale=None, cp_comm_type=None, pg_collection=None, **_):  # fmt: skip
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        windows = config.window_attn_skip_freq
        windowed = config.window_size is not None and (windows is None or bool(windows[layer_number - 1]))
        self.window = config.window_size[0] + 1 if windowed else None
        self.cp_group = pg_collection.cp
        self.cp, self.cp_rank = self.cp_group.size(), self.cp_group.rank()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
                attn_mask_type=None, attention_bias=None, packed_seq_params: PackedLayout | None = None, **_) -> Tensor:  # fmt: skip
        """Returns [T, 1, H*D], or [L, S, H*D] for input without a layout."""
        if packed_seq_params is None:
            return self._left_padded(query, key, value, attention_mask)
        query, key, value = (t.squeeze(1) if t.dim() == 4 else t for t in (query, key, value))
        if isinstance(packed_seq_params, CacheLayout):
            return self._cached(query, key, value, packed_seq_params)
        if self.cp > 1:
            return self._context_parallel(query, key, value, packed_seq_params)
        parts = []
        runs = packed_seq_params.runs
        # split, not slices: the gradients of slices are each as long as the micro-batch
        pieces = (t.split([count * length for _, count, length in runs]) for t in (query, key, value))
        for (_, count, length), *piece in zip(runs, *pieces, strict=True):
            q, k, v = (t.unflatten(0, (count, length)).transpose(1, 2) for t in piece)  # [count, heads, length, D]
            if self.window is None or self.window >= length:
                out = self._attend(q, k, v, None, causal=True)
            else:
                out = self._attend(q, k, v, causal_mask(length, length, self.window, q.device))
            parts.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        call = functools.partial(
            F.scaled_dot_product_attention, q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale,
            dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        if not dropout:
            return call()
        with get_cuda_rng_tracker().fork():  # heads are split over tp: each rank draws its own mask
            return call()

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedLayout) -> Tensor:
        order = zigzag_inverse(packed.padded_lengths, self.cp).to(query.device)
        gathered = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self.cp_group)
        key, value = gathered[order].split([key.shape[-1], value.shape[-1]], dim=-1)
        parts, local = [], 0
        for start, count, length in packed.runs:
            segment = length // (2 * self.cp)
            for s in range(count):
                k, v = (t[start + s * length : start + (s + 1) * length].transpose(0, 1)[None] for t in (key, value))
                for part in (self.cp_rank, 2 * self.cp - 1 - self.cp_rank):
                    q = query[local : local + segment].transpose(0, 1)[None]
                    seen = (part + 1) * segment
                    mask = causal_mask(segment, seen, self.window, q.device)
                    out = self._attend(q, k[:, :, :seen], v[:, :, :seen], mask)
                    parts.append(out[0].transpose(0, 1).flatten(1))
                    local += segment
        return torch.cat(parts).unsqueeze(1)

    def _cached(self, query: Tensor, key: Tensor, value: Tensor, layout: CacheLayout) -> Tensor:
        """Appends the new keys and values to the cache and attends to all of each sequence's own."""
        if self.layer_number not in layout.cache:
            shape = (len(layout.new_lengths), layout.max_length, *key.shape[1:])
            layout.cache[self.layer_number] = (key.new_zeros(shape), value.new_zeros(shape))
        keys, values = layout.cache[self.layer_number]
        out = torch.zeros_like(query)
        if all(n == 1 for n in layout.new_lengths):
            self._decode(query, key, value, layout, out)
            return out.flatten(1).unsqueeze(1)
        start = 0
        for s, (new, old) in enumerate(zip(layout.new_lengths, layout.cached_lengths, strict=True)):
            keys[s, old : old + new], values[s, old : old + new] = key[start : start + new], value[start : start + new]
            q, k, v = (
                t.transpose(0, 1)[None]
                for t in (query[start : start + new], keys[s, : old + new], values[s, : old + new])
            )
            out[start : start + new] = self._attend(q, k, v, causal_mask(new, old + new, self.window, q.device))[
                0
            ].transpose(0, 1)
            start += new
        return out.flatten(1).unsqueeze(1)

    def _decode(self, query: Tensor, key: Tensor, value: Tensor, layout: CacheLayout, out: Tensor) -> None:
        """One new token for each sequence: all of them in one batch, under a mask over the cache."""
        keys, values = layout.cache[self.layer_number]
        count, longest = len(layout.new_lengths), max(layout.cached_lengths) + 1
        at = torch.tensor(layout.cached_lengths, device=query.device)
        rows = torch.arange(count, device=query.device)
        keys[rows, at], values[rows, at] = key[:count], value[:count]
        places = torch.arange(longest, device=query.device)
        mask = places <= at[:, None]
        if self.window is not None:
            mask &= places > at[:, None] - self.window
        k, v = keys[:, :longest].transpose(1, 2), values[:, :longest].transpose(1, 2)
        out[:count] = self._attend(query[:count].unsqueeze(2), k, v, mask[:, None, None])[:, :, 0]

    def _left_padded(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None) -> Tensor:
        """query [Lq, S, H, D], key and value [Lk, S, G, D]; padding [S, >=Lk] bool, True at left padding. [Lq, S, H*D]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        mask = causal_mask(q.shape[2], k.shape[2], self.window, q.device)[None, None]
        if padding is not None:
            own = torch.eye(k.shape[2], dtype=torch.bool, device=q.device)[
                -q.shape[2] :
            ]  # a row of padding sees itself
            mask = (mask & ~padding[:, None, None, : k.shape[2]]) | own
        return self._attend(q, k, v, mask).permute(2, 0, 1, 3).flatten(2)
