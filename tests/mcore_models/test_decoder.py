"""Parts of the decoder that completions in fp32 do not tell apart: how norms are rounded, which buckets there are."""

import types

import pytest
import torch

from mrl.mcore_models import cpu_stand_in

cpu_stand_in.prepare()

from mrl.mcore_models.decode_graphs import places_of, rows_of  # noqa: E402
from mrl.mcore_models.decoder import _Norm  # noqa: E402
from mrl.mcore_models.layers import RMSNorm  # noqa: E402
from tests.engine import te_like  # noqa: E402


def config_of_norms(dtype, *, centered=False):
    return types.SimpleNamespace(params_dtype=dtype, sequence_parallel=False, layernorm_zero_centered_gamma=centered)


@pytest.mark.parametrize("kind", [RMSNorm, te_like.Norm, te_like.NormAndColumn])
def test_a_norm_rounds_as_its_module(kind):
    """Bit for bit in bfloat16, in which transformer-engine's norms round once and ours twice."""
    config = config_of_norms(torch.bfloat16)
    torch.manual_seed(0)
    x, weight = torch.randn(50, 64).bfloat16(), torch.nn.Parameter(1 + 0.1 * torch.randn(64).bfloat16())
    if kind is te_like.NormAndColumn:
        linear = types.SimpleNamespace(layer_norm_weight=weight, eps=1e-5, zero_centered_gamma=False)
        norm, expected = _Norm.of(torch.nn.Identity(), linear), te_like._rms_norm(x, weight, linear)
    else:
        module = kind(config, 64, eps=1e-5)
        module.weight = weight
        norm, expected = _Norm.of(module), module(x)
    assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [RMSNorm, te_like.Norm])
def test_a_zero_centered_norm_is_one_more_than_its_weight(kind, dtype):
    """And rounds once, as transformers' norm of Qwen3.5 does."""
    module, x = kind(config_of_norms(dtype, centered=True), 8), torch.randn(3, 8).to(dtype)
    module.weight = torch.nn.Parameter(torch.randn(8).to(dtype))
    expected = torch.nn.functional.rms_norm(x.float(), (8,), module.weight.float() + 1, 1e-5).to(dtype)
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-6 if dtype is torch.float32 else 0)
    torch.testing.assert_close(_Norm.of(module)(x), expected, rtol=0, atol=0)


def test_buckets_are_few_and_not_much_wider_than_what_is_in_them():
    rows = [rows_of(n, 512) for n in range(1, 513)]
    assert sorted(set(rows)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert all(n <= wide < 1.5 * n for n, wide in enumerate(rows, start=1)) and rows_of(5, 5) == 5
    assert [places_of(n, 5000) for n in (1, 256, 257, 4096, 4097)] == [256, 256, 512, 4096, 5000]
    assert places_of(3, 21) == 21
