"""Ulysses by itself: the exchange around attention, and how a micro-batch is cut. What models make of it: parity_rows.py."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mrl.batch import Batch, make_batch
from mrl.config.schema import RoleConfig
from mrl.engine.fsdp import forward
from mrl.engine.fsdp.ulysses import Ulysses
from mrl.engine.registry import build_engine
from mrl.errors import ModelError
from tests.engine import tiny
from tests.engine.harness import run_case

HEADS = ((4, 4), (4, 2), (4, 1), (12, 3), (8, 8))
"""Of queries, and of keys and values: as many as, more than, fewer than the ranks, and a number that they do not divide."""


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[R, heads, L, D] each, values of a size of their own -> [R, L, H, D]."""
    gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=gqa).transpose(1, 2)


def attention_is_that_of_one_rank(dtype: torch.dtype = torch.float64) -> None:
    """Each rank's part of the output, and of the gradients of its own queries, keys and values."""
    group = dist.group.WORLD
    ulysses, rank = Ulysses(group), group.rank()
    rows, length, generator = 3, 5 * group.size(), torch.Generator().manual_seed(0)

    def own(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(group.size(), dim=dim)[rank]

    for (heads, kv_heads), value_size in itertools.product(HEADS, (8, 6)):
        sizes = ((heads, 8), (kv_heads, 8), (kv_heads, value_size))
        whole = [torch.randn(rows, n, length, d, generator=generator).to(dtype).requires_grad_() for n, d in sizes]
        expected = attention(*whole)
        weights = torch.randn(expected.shape, generator=generator).to(dtype)
        (expected * weights).sum().backward()
        parts = [own(t.detach(), 2).clone().requires_grad_() for t in whole]
        out = ulysses.attend(attention, *parts)
        (out * own(weights, 1)).sum().backward()
        close = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 0.1}
        torch.testing.assert_close(out, own(expected, 1), **close)
        for part, t in zip(parts, whole, strict=True):
            torch.testing.assert_close(part.grad, own(t.grad, 2), **close)


def is_refused(config: RoleConfig, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_engine(config).init_model()


def batch_of(lengths: list[int]) -> Batch:
    """Sequences of these lengths, whose tokens and masks tell one place from another."""
    numbers = itertools.count(100)
    rows = [[next(numbers) for _ in range(n + 1)] for n in lengths]
    return make_batch(rows, [[float(token % 3) for token in row] for row in rows])


def inputs_are_cut_once() -> None:
    """What ranks are fed is, end to end, what one would be; outputs come back in the order of the batch, with gradients."""
    group = dist.group.WORLD
    ulysses = Ulysses(group)
    for lengths, packed in itertools.product(([5, 3], [1], [2, 1, 1], [8, 4, 4], []), (True, False)):
        batch = batch_of(lengths)
        ins = forward.prepare(batch, packed=packed, device=torch.device("cpu"), ulysses=ulysses)
        assert ins.tokens.shape == ins.positions.shape and ins.labels.numel() == ins.tokens.numel()
        rows, length = ins.tokens.shape[0], ins.tokens.shape[1] * group.size()
        assert rows == (1 if packed else max(1, len(lengths))) and length % group.size() == 0
        assert not packed or sum(ins.documents.lengths) == length
        trained = torch.zeros(ins.tokens.numel(), dtype=torch.bool)
        trained[ins.trained if ins.trained is not None else slice(None)] = True
        for own, whole in (
            (ins.tokens, batch.tokens), (ins.positions, batch.position_ids), (ins.labels, batch.labels),
            (trained, batch.loss_mask != 0),
        ):  # fmt: skip
            assert torch.equal(ins.restore(own.flatten()), whole), (lengths, packed)
        count = torch.tensor(int(trained.sum()))
        dist.all_reduce(count)
        assert count == (batch.loss_mask != 0).sum(), "padding trains nothing"
        outputs = torch.ones(ins.tokens.numel(), requires_grad=True)
        (ins.restore(outputs) * batch.loss_mask).sum().backward()
        assert torch.equal(ins.restore(outputs.grad), batch.loss_mask)


@pytest.mark.parametrize("case", ["attention_is_that_of_one_rank", "inputs_are_cut_once"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(ranks, case):
    run_case(ranks, f"tests.engine.test_ulysses:{case}")


def test_in_bfloat16():
    run_case(2, "tests.engine.test_ulysses:attention_is_that_of_one_rank", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "packed", "message"),
    [
        ("bloom", False, "gives padded and shared sequences other numbers than each has alone"),
        ("gpt2", True, "cannot run packed and shared sequences here .*3 heads on 2 ranks"),
    ],
)
def test_a_model_whose_sequences_cannot_be_shared_is_refused(tmp_path, family, packed, message):
    """One that mrl has no table for: its attention is its own, or its heads go by another name in config.json."""
    fields = {"num_attention_heads": 3, "hidden_size": 24} if family == "gpt2" else {}
    config = tiny.role(tiny.make_model(str(tmp_path), family, tied=True, **fields), packing=packed, parallel={"cp": 2})
    message = f"model_type '{family}' {message}.*set engine.parallel.cp to 1"
    run_case(2, "tests.engine.test_ulysses:is_refused", config=config, message=message)
