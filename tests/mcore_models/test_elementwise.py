"""The CPU's functions against what autograd makes of their plain formulas; and that megatron calls them."""

import pytest
import torch
import torch.nn.functional as F

from mrl.mcore_models import cpu_stand_in, elementwise
from mrl.ops import devices

cpu_stand_in.prepare()

from megatron.core.models.common.embeddings import rope_utils  # noqa: E402
from megatron.core.transformer import mlp  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape))).requires_grad_()


def halves(t: torch.Tensor) -> torch.Tensor:
    a, b = t.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def angles() -> torch.Tensor:
    half = torch.outer(torch.arange(7.0), torch.tensor([1.0, 0.3, 0.1]))
    return torch.cat([half, half], dim=-1)[:, None, None]


PAIRS = {
    "rms norm": (
        lambda x, w: elementwise.RMSNormFunction.apply(x, w, 1e-5),
        lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
        [numbers(7, 2, 6), numbers(6)],
    ),
    "swiglu": (
        elementwise.swiglu,
        lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        [numbers(7, 1, 12)],
    ),
    "swiglu with a bias": (
        elementwise.swiglu,
        lambda x, b: F.silu((x + b).chunk(2, -1)[0]) * (x + b).chunk(2, -1)[1],
        [numbers(7, 12), numbers(12)],
    ),
    "weighted swiglu": (
        lambda x, w: elementwise.weighted_swiglu(x, None, w),
        lambda x, w: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1] * w,
        [numbers(7, 12), numbers(7, 1)],
    ),
    "rotary": (
        lambda t: elementwise.rotary(t, angles()),
        lambda t: t * angles().cos() + halves(t) * angles().sin(),
        [numbers(7, 1, 2, 6)],
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_value_and_gradients(name: str):
    ours, plain, inputs = PAIRS[name]
    assert torch.autograd.gradcheck(ours, inputs, atol=1e-6)
    expected = plain(*inputs)
    torch.testing.assert_close(ours(*inputs), expected, rtol=1e-6, atol=1e-6)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    for got, want in zip(
        *(torch.autograd.grad((f(*inputs) * weights).sum(), inputs) for f in (ours, plain)), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_frozen_norm_passes_its_gradient_on():
    x, weight = numbers(5, 6), numbers(6).detach()
    (got,) = torch.autograd.grad(elementwise.RMSNormFunction.apply(x, weight, 1e-5).sum(), x)
    (want,) = torch.autograd.grad(F.rms_norm(x, weight.shape, weight, 1e-5).sum(), x)
    torch.testing.assert_close(got, want)


def test_weighted_swiglu_keeps_the_dtype():
    x, weights = numbers(3, 8, dtype=torch.bfloat16), torch.rand(3, 1)
    assert elementwise.weighted_swiglu(x, None, weights).dtype == torch.bfloat16


@pytest.mark.skipif(devices.has_gpu(), reason="a GPU uses megatron's own")
def test_megatron_uses_them_and_keeps_its_own_for_the_rest():
    x, weights = numbers(3, 8), numbers(3, 1)
    for theirs, ours in (
        (mlp.bias_swiglu_impl(x, None), elementwise.swiglu(x)),
        (mlp.weighted_bias_swiglu_impl(x, None, weights), elementwise.weighted_swiglu(x, None, weights)),
    ):
        assert torch.equal(theirs, ours) and type(theirs.grad_fn) is type(ours.grad_fn)
    t, turn = numbers(7, 1, 2, 8), rope_utils._apply_rotary_pos_emb_bshd
    assert type(turn(t[..., :6], angles()).grad_fn).__name__ == "RotaryFunctionBackward"
    part = turn(t, angles())  # angles for a part of the dimensions
    torch.testing.assert_close(part[..., :6], turn(t[..., :6], angles()))
    torch.testing.assert_close(part[..., 6:], t[..., 6:])


class Shared:
    """A context-parallel group of two, of which nothing but the size is asked."""

    size = staticmethod(lambda: 2)
    rank = staticmethod(lambda: 1)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_packed_tokens_turn_by_angles_of_their_own(fused, monkeypatch):
    """megatron takes the angles of a packed row for those of 0, 1, 2, ... or of the whole row, and asks the host which; both
    are wrong under cp. The lengths here have no numbers: nobody can read them."""
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", None)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", None)
    plain = rope_utils._apply_rotary_pos_emb_bshd
    kernel = lambda t, freqs, interleaved=False: plain(t, freqs)  # noqa: E731  in place of transformer-engine's
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", kernel if fused else None)
    cpu_stand_in._turn_packed_tokens_as_others()
    assert (rope_utils.fused_apply_rotary_pos_emb_thd is not None) == fused
    t, lengths = numbers(7, 2, 6), torch.empty(3, dtype=torch.int32, device="meta")
    config = TransformerConfig(num_layers=1, hidden_size=12, num_attention_heads=2, apply_rope_fusion=fused)
    found = rope_utils.apply_rotary_pos_emb(t, angles(), config, cu_seqlens=lengths, cp_group=Shared())
    angle = angles().squeeze(1)
    torch.testing.assert_close(found, t * angle.cos() + halves(t) * angle.sin())
