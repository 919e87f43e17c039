"""Computes how one mcore shard is made of slices of Hugging Face tensors: arithmetic on shapes, for both directions.

Every sharded weight is the concatenation, along one dimension, of slices of one or more HF tensors (`Span`). Loading
reads the spans and concatenates them; merging copies each span back to its origin. So a kind is one function: it lists
the spans of a rank's shard. The spans of all ranks tile every HF tensor exactly once, so split then merge is the
identity.

Layout of mcore weights (megatron-core 0.16.1 and 0.19.2, `core/transformer/{attention,mlp}.py`): `linear_qkv`
interleaves `[q * (heads / groups), k, v]` per KV group. It is split into equal contiguous row blocks, even if there are
fewer groups than ranks: mcore gathers and slices in the forward. `linear_fc1` of a gated MLP holds `cat(gate, up)` of
each rank's own rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from mrl.errors import ConfigError

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Span:
    """Is a run of contiguous entries of one dimension of a Hugging Face tensor."""

    source: int | None  # which of the parameter's HF tensors; None: zeros
    dim: int
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class Shard:
    """Is the shard that is asked for: part `rank` of `degree` along `axis`."""

    axis: str  # "tp" or "etp"
    rank: int
    degree: int
    sizes: Mapping[str, int]  # the model's numbers by name (`mrl.weights.table.sizes_of`)
    what: str  # the tensor, for messages

    def share(self, n: int, dim: int) -> tuple[int, int]:
        """Returns start and length of this rank's equal share of `n` entries."""
        if n % self.degree:
            raise ConfigError(
                f"engine.parallel.{self.axis}",
                self.degree,
                f"does not divide the size {n} of dimension {dim} of {self.what}",
                f"use a divisor of {n}",
            )
        return self.rank * (n // self.degree), n // self.degree


def replicated(shapes: tuple[Shape, ...], shard: Shard) -> list[Span]:
    """Returns the whole tensor on every rank."""
    return [Span(0, 0, 0, shapes[0][0])]


def column(shapes: tuple[Shape, ...], shard: Shard) -> list[Span]:
    """Returns an equal block of output rows (dimension 0)."""
    return [Span(0, 0, *shard.share(shapes[0][0], 0))]


def row(shapes: tuple[Shape, ...], shard: Shard) -> list[Span]:
    """Returns an equal block of input columns (dimension 1)."""
    return [Span(0, 1, *shard.share(shapes[0][1], 1))]


def gate_up(shapes: tuple[Shape, ...], shard: Shard) -> list[Span]:
    """Returns this rank's rows of each tensor, one tensor after the other."""
    return [Span(i, 0, *shard.share(shape[0], 0)) for i, shape in enumerate(shapes)]


def qkv(shapes: tuple[Shape, ...], shard: Shard) -> list[Span]:
    """Returns the contiguous rows of this rank out of q, k and v interleaved per KV group."""
    groups, heads = shard.sizes["groups"], shard.sizes["heads"]
    if heads % groups or heads % shard.degree or (groups % shard.degree and shard.degree % groups):
        raise ConfigError(
            "engine.parallel.tp",
            shard.degree,
            f"does not fit the model's {heads} attention heads and {groups} KV heads",
            f"use a divisor of {heads} that divides {groups} or is a multiple of it",
        )
    queries, keys, values = (shape[0] // groups for shape in shapes)
    if queries == heads // groups * keys:
        of_group = [(0, 0, queries)]
    else:  # each head's rows are a query and then a gate; megatron has all queries of a group first
        starts = range(0, queries, 2 * keys)
        of_group = [(0, start + after, keys) for after in (0, keys) for start in starts]
    of_group += [(1, 0, keys), (2, 0, values)]
    rows = (queries, keys, values)
    return _part_of_rows(
        [(source, group * rows[source] + start, count) for group in range(groups) for source, start, count in of_group],
        shard,
    )


def delta(shapes: tuple[Shape, ...], shard: Shard) -> list[Span]:
    """Returns the rows of this rank's key heads of a gated delta net, interleaved for each key head.

    The first tensor has blocks of queries, keys and values. Others have rows for each value head.
    """
    heads, keys = shard.sizes["delta_heads"], shard.sizes["delta_keys"]
    key, value = keys // heads, (shapes[0][0] - 2 * keys) // heads
    rows = []
    for head in range(heads):
        rows += [(0, head * key, key), (0, keys + head * key, key), (0, 2 * keys + head * value, value)]
        for source, shape in enumerate(shapes[1:], 1):
            count = shape[0] // heads
            rows.append((source, head * count, count))
    return _part_of_rows(rows, shard)


def _part_of_rows(rows: list[tuple[int, int, int]], shard: Shard) -> list[Span]:
    """Returns this rank's equal part of rows in order, each (tensor, first row in it, count)."""
    first, length = shard.share(sum(count for *_, count in rows), 0)
    spans, at = [], 0
    for source, start, count in rows:
        low, high = max(at, first), min(at + count, first + length)
        if low < high:
            spans.append(Span(source, 0, start + low - at, high - low))
        at += count
    return spans


def vocab(shapes: tuple[Shape, ...], shard: Shard) -> list[Span]:
    """Returns an equal block of the rows padded with zeros to `sizes["padded_vocab"]`."""
    rows = shapes[0][0]
    start, length = shard.share(shard.sizes["padded_vocab"], 0)
    real = min(max(rows - start, 0), length)
    spans = [Span(0, 0, start, real), Span(None, 0, 0, length - real)]
    return [span for span in spans if span.length]


KINDS: Mapping[str, Callable[[tuple[Shape, ...], Shard], list[Span]]] = {
    "replicated": replicated,
    "column": column,
    "row": row,
    "gate_up": gate_up,
    "qkv": qkv,
    "delta": delta,
    "vocab": vocab,
}


def padded_vocab(vocab_size: int, tp: int, multiple: int = 1) -> int:
    """Returns rows of the embedding: `vocab_size` rounded up to a multiple of `multiple * tp`, as mcore counts.

    The default pads as little as tensor parallelism needs. Padding rows are zero on import and trimmed on export. The
    log-probs must leave them out.
    """
    unit = multiple * tp
    return -(-vocab_size // unit) * unit
