"""The router's product where transformer-engine is installed, whose own is not that of what it is given."""

from __future__ import annotations

import types

import pytest
import torch
from torch import Tensor


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
