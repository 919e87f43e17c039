"""Rows of experts: those of megatron-core's own permutation, and sums of them in the order of experts.

The router's product where transformer-engine is installed, whose own is not that of what it is given.
"""

from __future__ import annotations

import types

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute
from torch import Tensor

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


@pytest.fixture
def like_transformer_engine(monkeypatch):
    """megatron multiplies as on an H100 with transformer-engine: factors of fp32 become TF32; a bias comes out wrong, as is suspected."""
    from megatron.core.transformer.moe import moe_utils

    import mrl.engine.megatron.engine  # noqa: F401 - megatron-core is imported as an engine imports it

    def rounded(t: Tensor) -> Tensor:
        return (t.view(torch.int32) & ~0x1FFF).view(torch.float32) if t.dtype == torch.float32 else t.float()

    def multiply(
        a: Tensor, b: Tensor, dtype: torch.dtype, layout: str, bias: Tensor | None = None, **_
    ) -> list[Tensor]:
        a, b = rounded(a), rounded(b)
        product = {"TN": lambda: b @ a.t(), "NN": lambda: b @ a, "NT": lambda: b.t() @ a}[layout]()
        return [product.to(dtype) + (0.0 if bias is None else bias.flip(0).float())]

    monkeypatch.setattr(moe_utils, "te_general_gemm", multiply)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_multiplies_what_it_is_given(like_transformer_engine, dtype: torch.dtype, has_bias: bool):
    from mrl.mcore_models.router import Router

    torch.manual_seed(0)
    made = Router.__new__(Router)
    torch.nn.Module.__init__(made)
    made.config = types.SimpleNamespace(moe_router_dtype="fp32")
    made.weight = torch.nn.Parameter(torch.randn(8, 32, dtype=dtype))
    made.bias = torch.nn.Parameter(torch.randn(8, dtype=dtype)) if has_bias else None
    given, of_logits = torch.randn(5, 3, 32, dtype=dtype), torch.randn(5, 3, 8)
    found = made.gating(given)
    exact = [None if p is None else p.detach().double().requires_grad_() for p in (made.weight, made.bias)]
    expected = torch.nn.functional.linear(given.double(), *exact)
    (found * of_logits).sum().backward(), (expected * of_logits).sum().backward()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    bound = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    for one, of in zip((made.weight, made.bias), exact, strict=True):
        assert (one is None) == (of is None)
        if one is not None:
            torch.testing.assert_close(one.grad.double(), of.grad, rtol=bound, atol=10 * bound)
