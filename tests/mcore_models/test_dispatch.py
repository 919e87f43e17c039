"""Rows of experts: those of megatron-core's own permutation, and sums of them in the order of experts."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute

from mrl.mcore_models.dispatch import CopyToRows, Routes, SumOfRows


def routing(tokens, experts, chosen):
    generator = torch.Generator().manual_seed(tokens)
    probs = torch.rand(tokens, experts, generator=generator)
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, probs.topk(chosen, dim=1).indices, True), probs


@pytest.mark.parametrize(
    "tokens, experts, chosen", [(50, 8, 2), (33, 16, 8), (7, 4, 1), (5, 6, 6), (1, 8, 3), (0, 8, 3)]
)
def test_rows_are_megatrons_and_so_are_gradients(tokens, experts, chosen):
    """In fp64 but for the order of sums; two summands have none."""
    map_, probs = routing(tokens, experts, chosen)
    x = torch.randn(tokens, 12, dtype=torch.float64)
    scale = torch.randn(tokens * chosen, 12, dtype=torch.float64)  # what experts make of a row

    def ours(x, probs):
        routes = Routes.of(map_, chosen)
        rows, of_rows = CopyToRows.apply(x, routes.rows, routes.choices), routes.of_rows(probs)
        return rows, of_rows, SumOfRows.apply(rows * scale * of_rows[:, None], routes.rows, routes.choices)

    def megatrons(x, probs):
        rows, of_rows, order, *_ = permute(x, map_, probs=probs, num_out_tokens=tokens * chosen)
        return rows, of_rows, unpermute(rows * scale * of_rows[:, None], order, restore_shape=x.shape)

    found, expected = [], []
    for function, results in ((ours, found), (megatrons, expected)):
        leaves = [x.clone().requires_grad_(), probs.double().requires_grad_()]
        results += function(*leaves)
        results[-1].square().sum().backward()
        results += [leaf.grad for leaf in leaves]
    for name, one, other in zip(("rows", "probs", "out", "of x", "of probs"), found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if name in ("rows", "probs") else 1e-12, msg=name)


def test_a_sum_is_rounded_once_and_its_rows_are_in_the_order_of_experts():
    """megatron-core rounds to bfloat16 after each term."""
    map_, _ = routing(64, 16, 8)
    routes = Routes.of(map_, 8)
    assert torch.equal(routes.places[routes.rows], map_.flatten().nonzero().view(64, 8))
    y = torch.randn(64 * 8, 40).bfloat16()
    exact = y.double()[routes.rows].sum(1)
    error = (SumOfRows.apply(y, routes.rows, routes.choices).double() - exact).abs()
    assert (error <= 2**-8 * exact.abs() + 1e-6).all()  # half of the last bit, and what fp32 rounds
