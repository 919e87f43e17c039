"""Divides a mini-batch into shares of the data-parallel ranks, and a share into micro-batches.

It is pure arithmetic on lengths. Everything is a function of its arguments, so ranks with the same lengths agree
without communication. A micro-batch is a list of indices into `lengths`. An empty list is a micro-batch without
sequences. A rank runs it on a dummy token with loss mask 0, to keep step with the others.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Sequence

from mrl.config.checks import DEFAULT_TOKENS
from mrl.errors import ConfigError


def balanced_shards(lengths: Sequence[int], n: int) -> list[list[int]]:
    """Divides sequences over `n` ranks, with balanced tokens and counts that differ by at most one.

    Returns one ascending list of indices per rank. Ranks are ordered by their first index, empty ones last. It is
    Karmarkar-Karp differencing over groups of `n` sequences of similar length. Each rank gets one of each group (N.
    Karmarkar, R. M. Karp, "The differencing method of set partitioning", 1982).
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups = [order[start : start + n] for start in range(0, len(order), n)]
    # A state is n subsets as (tokens, indices), heaviest first. The heap has the most uneven state on top.
    heap = []
    for number, group in enumerate(groups):
        state = [(lengths[i], [i]) for i in group] + [(0, []) for _ in range(n - len(group))]
        heap.append((state[-1][0] - state[0][0], number, state))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        merged = [(a + b, i + j) for (a, i), (b, j) in zip(left, reversed(right), strict=True)]
        merged.sort(key=lambda subset: -subset[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    shards = [sorted(indices) for _, indices in heap[0][2]] if heap else [[] for _ in range(n)]
    return sorted(shards, key=lambda indices: (not indices, indices))


def token_budget(tokens: int | None, longest: int, *, trains: bool) -> int:
    """Returns the tokens of a micro-batch, if no number of sequences is set.

    tokens: engine.micro_batch.tokens. longest: the longest sequence at hand. A model that never trains also takes one
    longer than `tokens`. A reward model renders conversations by its own template, and no key bounds their length.
    """
    if tokens is None:
        return max(DEFAULT_TOKENS, longest)
    return tokens if trains else max(tokens, longest)


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Returns the indices of `lengths` grouped into bins with lengths that sum to at most `capacity`.

    It takes the longest sequence first (of equal ones the first), and puts each into the fullest bin that still has
    room for it, of equally full bins the one filled last. It needs at most 11/9 of the optimal number of bins plus one
    (Johnson et al., 1974, "Worst-case performance bounds for simple one-dimensional packing algorithms"). On real
    length distributions it packs above 99 % full.
    """
    bins: list[list[int]] = []
    spaces: list[tuple[int, ...]] = []  # (free space, minus the time it was filled, bin), ascending
    for time, i in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        at = bisect.bisect_left(spaces, (lengths[i],))
        if at < len(spaces):
            free, _, index = spaces.pop(at)
        else:
            free, index = capacity, len(bins)
            bins.append([])
        bins[index].append(i)
        bisect.insort(spaces, (free - lengths[i], -time, index))
    return bins


def split_micro_batches(
    lengths: Sequence[int], *, size: int | None = None, tokens: int | None = None, packed: bool
) -> list[list[int]]:
    """Returns the fewest micro-batches of at most `size` sequences, or of at most `tokens` tokens (padding included).

    packed: sequences lie end to end, so a micro-batch costs the sum of its lengths. Otherwise each is padded to the
    longest one, and it costs that times their number. No sequences give no micro-batches.
    """
    if (size is None) == (tokens is None):
        raise ConfigError("engine.micro_batch", {"tokens": tokens, "size": size}, "is no one limit", "set exactly one")
    if not lengths:
        return []
    if size is not None:
        count = -(-len(lengths) // size)
        return balanced_shards(lengths, count) if packed else _even_runs(_by_length(lengths), count)
    assert tokens is not None
    if max(lengths) > tokens:
        fix = f"use at least {max(lengths)} or shorten data.max_length"
        raise ConfigError("engine.micro_batch.tokens", tokens, f"is less than a sequence of {max(lengths)} tokens", fix)
    if packed:
        return [sorted(indices) for indices in best_fit_decreasing(lengths, tokens)]
    runs: list[list[int]] = []
    for i in _by_length(lengths):  # ascending, so the newest sequence is the longest of its run
        if runs and (len(runs[-1]) + 1) * lengths[i] <= tokens:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def split_to_count(
    lengths: Sequence[int], count: int, *, size: int | None = None, tokens: int | None = None, packed: bool
) -> list[list[int]]:
    """Returns exactly `count` micro-batches within the same limits, balanced by tokens.

    count: at least what `split_micro_batches` needs. If there are fewer sequences than `count`, each has a micro-batch
    of its own and the rest are empty, at the end.
    """
    least = split_micro_batches(lengths, size=size, tokens=tokens, packed=packed)
    assert count >= len(least), f"{count} micro-batches are fewer than the {len(least)} that the limits need"
    if count >= len(lengths):
        return [[i] for i in range(len(lengths))] + [[] for _ in range(count - len(lengths))]
    if packed:
        even = balanced_shards(lengths, count)
        if tokens is None or max(sum(lengths[i] for i in indices) for indices in even) <= tokens:
            return even
    elif size is not None:
        return _even_runs(_by_length(lengths), count)
    return _halve_to_count(least, lengths, count, packed=packed)


def lengths_of_groups(lengths: Sequence[int], group: int, *, packed: bool) -> list[int]:
    """Returns the cost of each group of `group` neighbours, so that groups are divided as sequences of these lengths.

    It is the sum of their lengths. Without packing it is their number times the longest.
    """
    if group == 1:
        return list(lengths)
    assert len(lengths) % group == 0, f"{len(lengths)} sequences are no groups of {group}"
    groups = [lengths[start : start + group] for start in range(0, len(lengths), group)]
    return [sum(one) if packed else group * max(one) for one in groups]


def sequences_of(groups: Sequence[int], group: int) -> list[int]:
    """Returns the sequences of `groups` of `group` neighbours, in their order."""
    return [number * group + i for number in groups for i in range(group)]


def shares(lengths: Sequence[int], n: int, group: int = 1) -> list[list[int]]:
    """Returns the sequences of each of `n` data-parallel ranks, balanced by tokens, groups whole."""
    return [sequences_of(part, group) for part in balanced_shards(lengths_of_groups(lengths, group, packed=True), n)]


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    group: int = 1,
    size: int | None = None,
    tokens: int | None = None,
    packed: bool,
    multiple_of: int = 1,
    agree: Callable[[int], int] = lambda count: count,
) -> list[list[int]]:
    """Returns this rank's micro-batches, equal in number on every rank.

    group: so many neighbours are in one micro-batch; it divides `size`. agree: takes this rank's least number and
    returns the largest of all ranks (an all-reduce; the identity for one rank). multiple_of: the number is rounded up
    to a multiple of it (an interleaved pipeline needs one of `pp`).
    """
    costs = lengths_of_groups(lengths, group, packed=packed)
    if size is not None:
        assert size % group == 0, f"micro-batches of {size} sequences hold no whole groups of {group}"
        size //= group
    least = len(split_micro_batches(costs, size=size, tokens=tokens, packed=packed))
    count = max(1, agree(least))
    count = -(-count // multiple_of) * multiple_of
    split = split_to_count(costs, count, size=size, tokens=tokens, packed=packed)
    return [sequences_of(groups, group) for groups in split]


def _by_length(lengths: Sequence[int]) -> list[int]:
    """Returns indices from the shortest to the longest sequence."""
    return sorted(range(len(lengths)), key=lambda i: (lengths[i], i))


def _even_runs(order: Sequence[int], count: int) -> list[list[int]]:
    """Divides `order` into `count` runs with sizes that differ by at most one."""
    base, surplus = divmod(len(order), count)
    starts = [i * base + min(i, surplus) for i in range(count + 1)]
    return [list(order[a:b]) for a, b in zip(starts, starts[1:], strict=False)]


def _halve_to_count(
    micro_batches: list[list[int]], lengths: Sequence[int], count: int, *, packed: bool
) -> list[list[int]]:
    """Halves the most expensive micro-batch until there are `count`. A part never costs more than the whole."""

    def cost(indices: list[int]) -> int:
        sizes = [lengths[i] for i in indices]
        return sum(sizes) if packed else len(sizes) * max(sizes)

    parts = list(micro_batches)
    while len(parts) < count:
        largest = min((part for part in parts if len(part) > 1), key=lambda part: (-cost(part), part))
        parts.remove(largest)
        if packed:
            shards = balanced_shards([lengths[i] for i in largest], 2)
            parts += [[largest[j] for j in shard] for shard in shards]
        else:
            parts += _even_runs(largest, 2)
    return sorted(parts)
