"""The kernels of rows of experts against torch's operators of mrl/mcore_models/dispatch.py: the same bits."""

from __future__ import annotations

import pytest
import torch

from mrl.kernels import operators, routes
from mrl.mcore_models import dispatch
from tests.mcore_models.test_dispatch import routing


def with_torch(function, *args):
    """Runs torch's operators, as outside of these tests."""
    with operators.interpreted(False):
        return function(*args)


@pytest.mark.parametrize(
    "tokens, experts, chosen", [(70, 8, 2), (33, 16, 8), (7, 5, 1), (5, 6, 6), (1, 3, 2), (0, 8, 3), (60, 384, 8)]
)
def test_routes(tokens, experts, chosen, monkeypatch):
    """Of several blocks of tokens, the last of which is not full."""
    monkeypatch.setattr("mrl.kernels.route_launchers.TILE", 128)
    routing_map, _ = routing(tokens, experts, chosen)
    found = dispatch.Routes.of(routing_map, chosen)
    expected = with_torch(dispatch.Routes.of, routing_map, chosen)
    for name in ("rows", "choices", "places"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype and torch.equal(one, other), name
    transposed = routing_map.T.contiguous().T
    assert torch.equal(dispatch.Routes.of(transposed, chosen).rows, expected.rows)


@pytest.mark.parametrize(
    "dtype, width, chosen", [(torch.float32, 40, 4), (torch.bfloat16, 33, 1), (torch.bfloat16, 2100, 3)]
)
def test_rows_there_and_back(dtype, width, chosen, monkeypatch):
    """In bfloat16 the sums are torch's fp32 ones, rounded: a CPU's `embedding_bag` rounds ties up."""
    routing_map, probs = routing(21, 6, chosen)

    def run():
        x, p = (
            torch.randn(21, width, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_(),
            probs.clone().requires_grad_(),
        )
        route = dispatch.Routes.of(routing_map, chosen)
        rows, weights = dispatch.CopyToRows.apply(x, route.rows, route.choices), route.of_rows(p)
        out = dispatch.SumOfRows.apply((rows * weights[:, None]).to(dtype), route.rows, route.choices)
        return rows, weights, out, *torch.autograd.grad(out.float().square().sum(), (x, p))

    kernels = run()
    if dtype == torch.bfloat16:
        monkeypatch.setattr(dispatch, "sum_of_rows", lambda y, rows: sum(y.float()[rows].unbind(1)).to(y.dtype))
    for found, expected in zip(kernels, with_torch(run), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_operators_have_shapes_without_memory():
    routing_map = torch.empty(5, 8, dtype=torch.bool, device="meta")
    rows, choices, places = routes.find_routes(routing_map, 2)
    assert rows.shape == (5, 2) and choices.shape == places.shape == (10,)
    copied = routes.copy_rows(torch.empty(5, 4, device="meta"), choices, 2)
    assert copied.shape == (10, 4) and routes.sum_rows(copied, rows).shape == (5, 4)
