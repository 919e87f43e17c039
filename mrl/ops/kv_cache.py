"""Keeps keys and values of the sequences in generation, and attends over them. It is plain torch: both engines use it.

Dimensions: `R` rows of the cache, `L` positions of a row, `T` new tokens of a forward, `H` query heads, `G` key/value
heads, `D` head size. Row `i` belongs to the `i`-th sequence of the forward at hand.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.ops import devices
from mrl.ops.causal import causal_attention
from mrl.ops.delta_rule import Chunks
from mrl.ops.masked import ScoreRule, explicit_attention

Pairs = dict[int, tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class RowCopy:
    """Holds copies of one sequence's row, by layer."""

    keys: Pairs  # keys and values [G, places, D]
    states: Pairs  # of recurrent layers, as after the last place


class KVCache:
    """Holds [R, G, L, D] keys and values for each layer that asks; a layer's are made at its first forward.

    A recurrent layer has two states [R, ...] in their place, which stand for all tokens so far.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self.layers: Pairs = {}
        self.states: Pairs = {}

    def of_layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values. key, value: new ones [T, G, D]; a value's D may be another."""
        if layer not in self.layers:
            self.layers[layer] = tuple(
                new.new_zeros(self.rows, new.shape[1], self.length, new.shape[2]) for new in (key, value)
            )
        return self.layers[layer]

    def states_of(self, layer: int, *empty: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a layer's two states [R, ...]. empty: tensors of their dtypes and of the shapes of one row."""
        if layer not in self.states:
            self.states[layer] = tuple(one.new_zeros(self.rows, *one.shape) for one in empty)
        return self.states[layer]

    def part(self, first: int, rows: int) -> "CachePart":
        """Returns some of the rows as a cache, for a forward of their sequences alone."""
        return CachePart(self, first, rows)

    def arrange(self, copies: Sequence[tuple[int, int, int]], shape: tuple[int, int] | None) -> None:
        """Copies (source row, target row, positions) in order, then gives the cache its new shape (rows, positions of a
        row).

        Rows past the new count are dropped. One tensor at a time is there twice. Each tensor takes two kernels, however
        many copies there are. A target may get more positions of its source than were asked for: nothing reads them
        before they are written. States are copied as they are, so the source must have just these positions.
        """
        origins: dict[int, int] = {}  # of each target, the row that had its positions before the first copy
        for source, target, _places in copies:
            origins[target] = origins.get(source, source)
        if origins:
            device = next((first.device for first, _ in (*self.layers.values(), *self.states.values())), devices.CPU)
            targets, sources = (devices.tensor_on(device, list(rows)) for rows in (origins, origins.values()))
            places = max(count for _, _, count in copies)
            for tensor in (tensor for pair in self.layers.values() for tensor in pair):
                tensor[targets, :, :places] = tensor[sources, :, :places]
            for tensor in (tensor for pair in self.states.values() for tensor in pair):
                tensor[targets] = tensor[sources]
        if shape is not None:
            for layer, (keys, values) in self.layers.items():
                self.layers[layer] = (_reshaped(keys, *shape), _reshaped(values, *shape))
            for layer, (first, second) in self.states.items():
                self.states[layer] = (_with_rows(first, shape[0]), _with_rows(second, shape[0]))
            self.rows, self.length = shape

    def copy_row(self, row: int, places: int) -> RowCopy:
        """Returns a copy of the first positions of a row, in every layer. States are those after the last of them."""
        keys = {
            layer: (keys[row, :, :places].clone(), values[row, :, :places].clone())
            for layer, (keys, values) in self.layers.items()
        }
        states = {layer: (first[row].clone(), second[row].clone()) for layer, (first, second) in self.states.items()}
        return RowCopy(keys, states)

    def put_row(self, row: int, copy: RowCopy, places: int) -> None:
        """Puts the first positions of a copy into a row; the cache may be new. States need all positions."""
        for layer, pair in copy.states.items():
            for tensor, part in zip(self.states_of(layer, *pair), pair, strict=True):
                tensor[row] = part
        for layer, pair in copy.keys.items():
            key, value = (part.transpose(0, 1) for part in pair)
            for tensor, part in zip(self.of_layer(layer, key, value), pair, strict=True):
                tensor[row, :, :places] = part[:, :places]


class CachePart(KVCache):
    """Is some rows of another cache, in its memory."""

    def __init__(self, whole: KVCache, first: int, rows: int) -> None:
        super().__init__(rows, whole.length)
        self.whole, self.here = whole, slice(first, first + rows)

    def of_layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.whole.of_layer(layer, key, value)
        return keys[self.here], values[self.here]

    def states_of(self, layer: int, *empty: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.whole.states_of(layer, *empty)
        return first[self.here], second[self.here]


def _reshaped(old: Tensor, rows: int, length: int) -> Tensor:
    new = old.new_zeros(rows, old.shape[1], length, old.shape[3])
    kept, places = min(rows, old.shape[0]), min(length, old.shape[2])
    new[:kept, :, :places] = old[:kept, :, :places]
    return new


def _with_rows(old: Tensor, rows: int) -> Tensor:
    new = old.new_zeros(rows, *old.shape[1:])
    kept = min(rows, old.shape[0])
    new[:kept] = old[:kept]
    return new


@dataclasses.dataclass(eq=False)
class CachedStep:
    """Describes one forward: `new_lengths[i]` tokens of sequence `i`, after `cached_lengths[i]` that the cache has.

    Tokens lie end to end, and padding may follow. Leading sequences with one new token each are attended in one batch.

    copies: decoding attends copies of keys and values. A copy has one memory layout, whichever cache it is from.
    """

    cache: KVCache
    new_lengths: tuple[int, ...]
    cached_lengths: tuple[int, ...]
    device: torch.device
    copies: bool = False
    _made: dict[tuple, Tensor] = dataclasses.field(default_factory=dict)  # masks and indices that layers share

    @classmethod
    def fixed(cls, cache: KVCache, positions: Tensor, places: int) -> "CachedStep":
        """Returns a step with one new token of each of the first rows. positions: [R], on the device alone.

        Attention reads `places` positions of every row. These are more than any position, whatever the positions are.
        """
        count = positions.numel()
        step = cls(cache, (1,) * count, (places - 1,) * count, positions.device)
        step.positions, step.rows = positions, torch.arange(count, device=positions.device)
        return step

    @functools.cached_property
    def tokens(self) -> int:
        return sum(self.new_lengths)

    @functools.cached_property
    def decoding(self) -> int:
        """Returns how many leading sequences have one new token."""
        return next((i for i, new in enumerate(self.new_lengths) if new != 1), len(self.new_lengths))

    @functools.cached_property
    def positions(self) -> Tensor:
        """Returns the index [T] of each token in its sequence."""
        pairs = zip(self.new_lengths, self.cached_lengths, strict=True)
        return devices.tensor_on(self.device, [old + i for new, old in pairs for i in range(new)])

    @functools.cached_property
    def rows(self) -> Tensor:
        """Returns the row [T] of each token."""
        if self.decoding == len(self.new_lengths):
            return torch.arange(self.decoding, device=self.device)
        return devices.tensor_on(self.device, [i for i, new in enumerate(self.new_lengths) for _ in range(new)])

    @functools.cached_property
    def chunks(self) -> Chunks:
        """Returns the chunks of the sequences with several new tokens, for recurrent layers."""
        return Chunks.of(self.new_lengths[self.decoding :], self.device)

    def slots(self, groups: int) -> Tensor:
        """Returns the places [T*G] for each token's keys in a layer's cache, seen as [R*G*L, D]."""
        name = ("slots", groups)
        if name not in self._made:
            heads = torch.arange(groups, device=self.device)
            at = (self.rows[:, None] * groups + heads) * self.cache.length + self.positions[:, None]
            self._made[name] = at.flatten()
        return self._made[name]

    def decode_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Returns [decoding, 1, 1, longest]: 0 for positions that a decoding sequence's new token may look at, else
        -inf."""
        name = ("decode", window)
        if name not in self._made:
            at = self.positions[: self.decoding, None]
            places = torch.arange(max(self.cached_lengths[: self.decoding]) + 1, device=self.device)
            hidden = places > at
            if window is not None:
                hidden |= places <= at - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, -torch.inf)
            self._made[name] = mask[:, None, None]
        return self._made[name]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: ScoreRule,
    ) -> Tensor:
        """Appends new keys and values [>=T, G, D] to the cache, then attends query [>=T, G, H/G, D] over its own
        sequence.

        Returns query's shape with the D of a value, zeros for padding.
        """
        keys, values = self.cache.of_layer(layer, key, value)
        where = self.slots(key.shape[1])
        for cached, new in ((keys, key), (values, value)):
            size = new.shape[2]
            cached.view(-1, size).index_copy_(0, where, new[: self.tokens].reshape(-1, size))
        count, padded = self.decoding, query.shape[0] > self.tokens
        if count:
            mask = self.decode_mask(scoring.window, query.dtype)
            k, v = keys[:count, :, : mask.shape[-1]], values[:count, :, : mask.shape[-1]]
            if self.copies:
                k, v = (t.clone(memory_format=torch.contiguous_format) for t in (k, v))
            # the query heads of a group meet the same keys: they stand where several queries would
            if scoring.sinks is None and scoring.softcap is None:
                decoded = F.scaled_dot_product_attention(query[:count], k, v, attn_mask=mask, scale=scoring.scale)
            else:
                of_groups = None if scoring.sinks is None else scoring.sinks.view(1, key.shape[1], -1, 1)
                decoded = explicit_attention(
                    query[:count], k, v, mask == 0, scale=scoring.scale, sinks=of_groups, softcap=scoring.softcap
                )
            if count == len(self.new_lengths) and not padded:
                return decoded
        shape = (*query.shape[:-1], value.shape[-1])
        out = query.new_zeros(shape) if padded else query.new_empty(shape)
        if count:
            out[:count] = decoded
        start = count
        for row in range(count, len(self.new_lengths)):
            new, old = self.new_lengths[row], self.cached_lengths[row]
            if not new:
                continue
            q = query[None, start : start + new].flatten(2, 3).transpose(1, 2)
            k, v = keys[row, None, :, : old + new], values[row, None, :, : old + new]
            attended = causal_attention(q, k, v, scoring)
            out[start : start + new] = attended[0].transpose(0, 1).unflatten(1, query.shape[1:3])
            start += new
        return out
