"""Random ragged sequences, as plain Python lists for the oracles and as tensors for the code under test."""

from __future__ import annotations

import dataclasses
import random

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.batch import Batch, make_batch

Rows = list[list[float]]
examples = settings(max_examples=60, deadline=None)


@dataclasses.dataclass
class Ragged:
    """masks: one list of 0 and 1 per sequence: prompts and observations are 0. rng: where its numbers come from."""

    masks: list[list[int]]
    rng: random.Random

    def rows(self, low: float, high: float) -> Rows:
        """A number for each token."""
        return [[self.rng.uniform(low, high) for _ in mask] for mask in self.masks]

    def per_sequence(self, low: float, high: float) -> list[float]:
        return [self.rng.uniform(low, high) for _ in self.masks]

    def spread(self, values: list[float]) -> Rows:
        """A sequence's number at each of its tokens."""
        return [[value] * len(mask) for value, mask in zip(values, self.masks, strict=True)]

    @property
    def lengths_S(self) -> Tensor:
        return torch.tensor([len(mask) for mask in self.masks])

    @property
    def mask_T(self) -> Tensor:
        return flat(self.masks)

    def batch(self, **fields: Rows) -> Batch:
        """A global mini-batch; tokens are of no importance here."""
        ids = [list(range(len(mask) + 1)) for mask in self.masks]
        fields_T = {name: flat(rows) for name, rows in fields.items()}
        return make_batch(ids, [[0, *mask] for mask in self.masks], token_fields=fields_T)

    def split(self) -> list[list[int]]:
        """The sequences of micro-batches: every sequence once, in any order, any number to each."""
        order = self.rng.sample(range(len(self.masks)), len(self.masks))
        parts: list[list[int]] = [[]]
        for i in order:
            if parts[-1] and self.rng.random() < 0.5:
                parts.append([])
            parts[-1].append(i)
        return parts


@st.composite
def ragged(draw, trained: bool = True) -> Ragged:
    """1 to 5 sequences of 1 to 8 tokens, any mask. trained: at least one token trains."""
    masks = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=5))
    if trained and not any(map(any, masks)):
        masks[-1][-1] = 1
    return Ragged(masks, random.Random(draw(st.integers(0, 2**32))))


@st.composite
def groups(draw) -> tuple[list[float], list[int]]:
    """Rewards, few of them different, and group numbers: groups of any size, one included, in any order."""
    size = draw(st.integers(1, 12))
    rewards = draw(st.lists(st.sampled_from([0.0, 1.0, 0.1, -2.5, 0.7]), min_size=size, max_size=size))
    return rewards, draw(st.lists(st.sampled_from([7, 0, 3, 100]), min_size=size, max_size=size))


def in_micro_batches(loss, batch: Batch, predictions: dict, denominator: str, parts=None, **ctx):
    """(mean loss, metrics) of micro-batches of the sequences `parts`, as an engine makes them; one of all by default."""
    total, metrics, starts = 0.0, {}, batch.cu_seqlens.tolist()
    for part in parts or [range(batch.num_sequences)]:
        at = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in part])
        summed, found = loss(
            batch.select(list(part)), {name: given[at] for name, given in predictions.items()}, dict(ctx)
        )
        assert found.items() >= ctx.items()
        total = total + summed / batch.denominators[denominator]
        for name, value in found["metrics"].items():
            metrics[name] = metrics.get(name, 0.0) + float(value) / batch.denominators[denominator]
    return total, metrics


def flat(rows) -> Tensor:
    """[T] float64."""
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def close(actual: Tensor, expected, tolerance: float = 1e-9) -> bool:
    """Whether a tensor has these numbers, given flat or in rows, to `tolerance` of their size."""
    wanted = [x for row in expected for x in (row if isinstance(row, list) else [row])]
    wanted_T = torch.tensor(wanted, dtype=torch.float64)
    return torch.allclose(actual.double(), wanted_T, rtol=tolerance, atol=tolerance)
