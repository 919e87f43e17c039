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


@pytest.mark.parametrize("kind", [RMSNorm, te_like.Norm, te_like.NormAndColumn])
def test_a_norm_rounds_as_its_module(kind):
    """Bit for bit in bfloat16, in which transformer-engine's norms round once and ours twice."""
    config = types.SimpleNamespace(params_dtype=torch.bfloat16, sequence_parallel=False)
    torch.manual_seed(0)
    x, weight = torch.randn(50, 64).bfloat16(), torch.nn.Parameter(1 + 0.1 * torch.randn(64).bfloat16())
    if kind is te_like.NormAndColumn:
        linear = types.SimpleNamespace(layer_norm_weight=weight, eps=1e-5, zero_centered_gamma=False)
        norm, expected = _Norm.of(torch.nn.Identity(), linear), te_like._rms_norm(x, weight, 1e-5)
    else:
        module = kind(config, 64, eps=1e-5)
        module.weight = weight
        norm, expected = _Norm.of(module), module(x)
    assert torch.equal(norm(x), expected)


def test_a_zero_centered_norm_is_one_more_than_its_weight():
    module = te_like.Norm(types.SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False), 8)
    x = torch.randn(3, 8)
    expected = module(x)
    module.zero_centered_gamma, module.weight = True, torch.nn.Parameter(module.weight - 1)
    assert torch.equal(_Norm.of(module)(x), expected)


def test_buckets_are_few_and_not_much_wider_than_what_is_in_them():
    rows = [rows_of(n, 512) for n in range(1, 513)]
    assert sorted(set(rows)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert all(n <= wide < 1.5 * n for n, wide in enumerate(rows, start=1)) and rows_of(5, 5) == 5
    assert [places_of(n, 5000) for n in (1, 256, 257, 4096, 4097)] == [256, 256, 512, 4096, 5000]
    assert places_of(3, 21) == 21
