"""Computes core attention on torch's kernels, for the layer spec that needs no transformer-engine. causal.py chooses
the kernel.

Dimensions: `T` tokens of a micro-batch on this rank. `H` query heads and `G` key/value groups are those of this
tensor-parallel rank. `D` is the head size.

Tokens come end to end, [T, 1, H, D]. A layout object tells sequences apart and travels as megatron's
`packed_seq_params`. `PackedLayout` is for training and log-probs: a padded micro-batch is the case of equal lengths and
runs as one batch. `CacheLayout` is for generation.

Context parallelism cuts every sequence into `2*cp` segments. Rank `r` holds segments `r` and `2*cp-1-r`: this zigzag
balances causal work. Keys and values are gathered over the group. Queries stay on their rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from mrl.ops import devices
from mrl.ops.causal import causal_attention
from mrl.ops.delta_rule import Chunks
from mrl.ops.kv_cache import CachedStep
from mrl.ops.masked import ScoreRule
from mrl.ops.packed import has_packed_kernel, packed_attention, runs_of

FEWEST, SHORTEST = 8, 256
"""Sequences, and positions of the longest, of the smallest bucket of `fixed` layouts."""

_FIELDS = {field.name for field in dataclasses.fields(PackedSeqParams)}
_NO_PADDING_BETWEEN = {"pad_between_seqs": False} if "pad_between_seqs" in _FIELDS else {}
"""For transformer-engine: megatron-core 0.19 passes it on. Without it, transformer-engine before 2.18 compares the
values of two `cu_seqlens` in every layer, and this waits for the GPU."""


@dataclasses.dataclass
class PackedLayout(PackedSeqParams):
    """Megatron's packed-sequence parameters with what our attention needs on the host."""

    padded_lengths: tuple[int, ...] = ()
    """Positions of each sequence in the micro-batch, with its padding, over all context-parallel ranks. Each is a
    multiple of 2*cp if cp > 1."""
    positions: Tensor | None = None  # [T] int64, each local place's index in its sequence
    order: Tensor | None = None  # `zigzag_inverse` of the lengths where cp > 1: made once, not in every layer
    fixed: bool = False
    """Whether attention takes lengths from `cu_seqlens` alone, in one call. `padded_lengths` may be empty then."""

    @classmethod
    def for_sequences(
        cls,
        padded: Sequence[int],
        *,
        positions: Tensor,
        order: Tensor | None = None,
        qkv_format: str = "sbhd",
        fixed: bool = False,
    ) -> "PackedLayout":
        """Returns the layout of sequences in `padded` positions each. qkv_format "thd" is for transformer-engine.

        fixed: the shapes and numbers that layers see are those of a bucket. Empty sequences follow the others, up to a
        power of two. The longest counts as a power of two, too.

        All four `cu_seqlens` are one tensor, of padded lengths. A sequence's padding belongs to it and stands behind
        its tokens. The causal mask keeps tokens from seeing padding, while padding sees tokens.

        Two tensors, one of them of real lengths, mean padding between sequences to transformer-engine. It then drops
        FlashAttention 2 and its unfused attention, or leaves the gradient's rows of the last padding uninitialised.
        Since 2.18 it asks whether the two are one object.
        """
        starts, longest = [*itertools.accumulate(padded, initial=0)], max(padded)
        if fixed:
            starts += [starts[-1]] * (_bucket(len(padded), FEWEST) - len(padded))
            longest = min(_bucket(longest, SHORTEST), starts[-1])
        places = devices.tensor_on(positions.device, starts, torch.int32)
        if qkv_format == "thd":
            # transformer-engine rounds so if it is not given; cuDNN plans a kernel for every value that it meets
            longest = -(-longest // 64) * 64
        return cls(
            qkv_format=qkv_format, cu_seqlens_q=places, cu_seqlens_kv=places, cu_seqlens_q_padded=places,
            cu_seqlens_kv_padded=places, max_seqlen_q=longest, max_seqlen_kv=longest, padded_lengths=tuple(padded),
            positions=positions, order=order, fixed=fixed, **_NO_PADDING_BETWEEN,
        )  # fmt: skip

    @functools.cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Returns runs of neighbouring sequences of equal length, over all cp ranks: (first position, how many, length
        of each)."""
        return runs_of(self.padded_lengths)

    @functools.cached_property
    def inverse(self) -> Tensor:
        """Returns the index [cp*T] that undoes `order`, where cp > 1."""
        assert self.order is not None
        return self.order.argsort()

    @functools.cached_property
    def chunks(self) -> Chunks:
        """Returns the chunks of the gated delta rule, over all cp ranks."""
        assert self.positions is not None
        return Chunks.of(self.padded_lengths, self.positions.device)


def _bucket(number: int, least: int) -> int:
    """Returns the smallest power of two that is at least both."""
    return max(least, 1 << (number - 1).bit_length())


@dataclasses.dataclass
class CacheLayout(PackedSeqParams):
    """Holds the step of generation that new tokens belong to, with the cache of earlier keys and values."""

    step: CachedStep | None = None  # lengths, positions and cache, for all layers of a chunk
    positions: Tensor | None = None  # [T] with those of padding behind

    @classmethod
    def make(cls, step: CachedStep, padding: int = 0) -> "CacheLayout":
        """Returns the layout of a step. padding: tokens behind those of the step; nothing is kept of them."""
        longest = step.cache.length
        positions = torch.nn.functional.pad(step.positions, (0, padding))
        return cls(qkv_format="sbhd", max_seqlen_q=longest, max_seqlen_kv=longest, step=step, positions=positions)


def zigzag_places(padded_lengths: tuple[int, ...], cp: int, cp_rank: int) -> Tensor:
    """Returns the positions [T] in the whole micro-batch of the tokens of `cp_rank`, in that rank's order."""
    parts, start = [], 0
    for length in padded_lengths:
        segment = length // (2 * cp)
        for s in (cp_rank, 2 * cp - 1 - cp_rank):
            parts.append(torch.arange(start + s * segment, start + (s + 1) * segment))
        start += length
    return torch.cat(parts)


def zigzag_inverse(padded_lengths: tuple[int, ...], cp: int) -> Tensor:
    """Returns the index [cp*T] that puts shards, concatenated in rank order, back into the micro-batch's order."""
    return torch.argsort(torch.cat([zigzag_places(padded_lengths, cp, r) for r in range(cp)]))


class SdpaAttention(MegatronModule):
    """Computes softmax(q k^T * scale) v under a causal mask, with grouped queries, sliding window and context
    parallelism."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: Any = None,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: Any = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        windows = config.window_attn_skip_freq
        windowed = config.window_size is not None and (windows is None or bool(windows[layer_number - 1]))
        # megatron counts the keys to the left of a query, ours with its own
        self.window = config.window_size[0] + 1 if windowed else None
        self.softmax_offset = None  # [H] scores of a place that no value is at; megatron's name
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(
                torch.zeros(heads, dtype=config.params_dtype, device=devices.device())
            )
            # else clip_grads.get_grad_norm_fp32 counts the sinks of the first rank alone
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
            self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        self.cp, self.cp_rank = self.cp_group.size(), self.cp_group.rank()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
                attn_mask_type: Any = None, attention_bias: Any = None, packed_seq_params: PackedLayout | None = None,
                **_: Any) -> Tensor:  # fmt: skip
        """Returns [T, 1, H*D]."""
        assert packed_seq_params is not None
        query, key, value = (t.squeeze(1) if t.dim() == 4 else t for t in (query, key, value))
        if isinstance(packed_seq_params, CacheLayout):
            step = packed_seq_params.step
            assert step is not None
            query = query.unflatten(1, (key.shape[1], -1))  # heads of a group are neighbours
            return step.attend(self.layer_number, query, key, value, self.scoring).flatten(1).unsqueeze(1)
        if self.cp > 1:
            return self._context_parallel(query, key, value, packed_seq_params)
        parts = []
        runs = packed_seq_params.runs
        dropout = self.dropout if self.training else 0.0
        ragged = packed_seq_params.fixed or len(runs) > 1
        if ragged and has_packed_kernel(query, value, self.scoring, dropout):
            places, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
            return packed_attention(query, key, value, places, longest, self.scoring).flatten(1).unsqueeze(1)
        if not runs:
            raise RuntimeError("attention has no kernel for packed rows here, and reads their lengths on the host")
        # split, because the gradient of each slice would be as long as the micro-batch; that of a split is a copy
        sizes = [count * length for _, count, length in runs]
        split = ((t,) if len(runs) == 1 else t.split(sizes) for t in (query, key, value))
        for (_, count, length), *run in zip(runs, *split, strict=True):
            q, k, v = (t.unflatten(0, (count, length)).transpose(1, 2) for t in run)  # [count, heads, length, D]
            parts.append(self._causal(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(1)

    @property
    def scoring(self) -> ScoreRule:
        return ScoreRule(self.scale, self.window, self.softmax_offset)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns causal attention of q [N, heads, queries, D], which stand at the end of k and v [N, groups, keys,
        D]."""
        dropout = self.dropout if self.training else 0.0
        # heads are split over tp: each rank draws its own mask
        with get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():
            return causal_attention(q, k, v, self.scoring, dropout=dropout)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Splits sinks over tensor-parallel ranks, as megatron's own attention does."""
        if self.softmax_offset is None:
            return {}
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedLayout) -> Tensor:
        # megatron's gather of a sequence, over another group: its backward pass sums the ranks' gradients of a key
        gathered = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self.cp_group)
        key, value = gathered[packed.order].split([key.shape[-1], value.shape[-1]], dim=-1)
        runs = packed.runs
        parts = []
        here = query.split([count * length // self.cp for _, count, length in runs])
        split = (t.split([count * length for _, count, length in runs]) for t in (key, value))
        for (_, count, length), of_run, *both in zip(runs, here, *split, strict=True):
            k, v = (t.unflatten(0, (count, length)).transpose(1, 2) for t in both)
            segment = length // (2 * self.cp)
            outs = []
            for q, place in zip(
                of_run.unflatten(0, (count, 2, segment)).unbind(1),
                (self.cp_rank, 2 * self.cp - 1 - self.cp_rank),
                strict=True,
            ):
                seen = (place + 1) * segment
                outs.append(self._causal(q.transpose(1, 2), k[:, :, :seen], v[:, :, :seen]).transpose(1, 2).flatten(2))
            parts.append(torch.stack(outs, dim=1).flatten(0, 2))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(1)
