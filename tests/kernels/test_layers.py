"""The kernels of layers against torch's formulas, on CPU tensors under Triton's interpreter.

In fp32, values and gradients are as near to fp64 as torch's own, within a factor of 4 and a unit in the last place. In
bfloat16, values are those of Hugging Face's modules: a sum in another order may move a number by one unit, and few do.
Gradients are computed in fp32 from the same numbers and rounded once, so they may differ by the rounding of the
products between, 2^-7 of the largest.
"""

from __future__ import annotations

import pytest
import torch

from mrl.kernels import layers

DTYPES = [torch.float32, torch.bfloat16]


def numbers(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def outcome(function, inputs, dtype, layout=None):
    """Returns the values and the gradients of a function, as one list, at leaves of `dtype` that hold `inputs`."""
    leaves = [x.to(dtype if x.dtype == torch.float64 else x.dtype).detach().clone().requires_grad_() for x in inputs]
    given = leaves if layout is None else [layout(x) for x in leaves]
    values = function(*given)
    values = list(values) if isinstance(values, tuple) else [values]
    upper = [numbers(*v.shape, seed=9 + i).to(v.dtype) for i, v in enumerate(values)]
    return values + list(torch.autograd.grad(values, leaves, upper))


def compare(kernel, plain, inputs, dtype, layout=None):
    """plain: torch's formula, which rounds as Hugging Face's modules."""
    found, expected = (outcome(f, inputs, dtype, layout) for f in (kernel, plain))
    exact = outcome(plain, [x.double() for x in inputs], torch.float64, layout)
    values = len(found) - len(inputs)
    for i, (ours, theirs, true) in enumerate(zip(found, expected, exact, strict=True)):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        if not ours.numel():
            continue
        largest = true.abs().max()
        if dtype == torch.float32:
            own, torchs = ((t.double() - true).abs().max() for t in (ours, theirs))
            assert own <= 4 * torchs + 2**-22 * largest
        elif i < values:
            difference = (ours.double() - theirs.double()).abs()
            assert (difference <= 2**-7 * theirs.double().abs()).all() and (difference != 0).double().mean() < 0.01
        else:
            assert (ours.double() - theirs.double()).abs().max() <= 2**-7 * largest
    return found


# -- RMSNorm -----------------------------------------------------------------------------------------------------------


def plain_norm(eps, centered):
    def norm(x, weight):
        wide = x if x.dtype == torch.float64 else x.float()
        unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if centered:
            return (unit * (1 + weight.to(wide.dtype))).to(x.dtype)
        return weight * unit.to(x.dtype)

    return norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape, centered, layout",
    [
        ((3, 7, 4, 16), False, None), ((2, 3, 5000), True, None), ((700, 1, 24), True, None), ((1, 1), False, None),
        ((0, 1, 32), True, None),
        ((6, 3, 5, 16), False, lambda x: x if x.dim() == 1 else x[:, :, 4:5]),  # as keys are: every few heads of one product
        ((6, 3, 5, 16), False, lambda x: x if x.dim() == 1 else x.transpose(0, 1)),
    ],
)  # fmt: skip
def test_norms(shape, centered, layout, dtype):
    def kernel(x, weight):
        return layers.rms_norm(x, weight, 1e-6, centered)

    inputs = [numbers(*shape), numbers(shape[-1], seed=1, scale=0.2) + (0 if centered else 1)]
    if shape == (1, 1):  # the gradient of one number's norm is all but zero
        inputs[0] = inputs[0] * 1e-3
    compare(kernel, plain_norm(1e-6, centered), inputs, dtype, layout)


def test_a_weights_gradient_is_summed_over_all_programs(monkeypatch):
    from mrl.kernels import layer_launchers

    monkeypatch.setattr(layer_launchers, "PROGRAMS", 3)
    inputs = [numbers(1000, 24), numbers(24, seed=1)]
    compare(lambda x, w: layers.rms_norm(x, w, 1e-6), plain_norm(1e-6, False), inputs, torch.float32)


@pytest.mark.parametrize("rows", [40, 0])
def test_a_weights_gradient_is_added_to_megatrons_buffer(rows):
    """In fp32, micro-batch after micro-batch, and the weight says so. A frozen weight has no gradient."""
    weight = torch.nn.Parameter(numbers(24).bfloat16())
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(24), False
    expected = torch.ones(24, dtype=torch.float64)
    for seed in range(2):
        x, upper = (numbers(rows, 24, seed=seed + n).bfloat16() for n in (0, 7))
        layers.rms_norm(x.requires_grad_(), weight, 1e-6).backward(upper)
        unit = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        expected += (upper.double() * unit.bfloat16().double()).sum(0).detach()
    assert weight.grad_added_to_main_grad
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-6, atol=1e-5)
    weight.requires_grad_(False)
    layers.rms_norm(x, weight, 1e-6).sum().backward()
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-6, atol=1e-5)


def test_norms_take_what_fits():
    x, weight = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    assert layers.norm_fits(x, weight)
    assert not layers.norm_fits(x, weight.float())
    assert not layers.norm_fits(x, weight[:4])
    with pytest.raises(AssertionError, match="rms_norm needs one dtype: x is torch.bfloat16, its weight torch.float32"):
        layers.rms_norm(x, weight.float(), 1e-6)


# -- rotary embedding --------------------------------------------------------------------------------------------------


def plain_turn(x, cos, sin):
    """Turns x [.., T, H, D], as `apply_rotary_pos_emb` of transformers does, with channels that do not turn."""
    cos, sin, turned = cos[..., None, :], sin[..., None, :], cos.shape[-1]
    x, rest = x[..., :turned], x[..., turned:]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([x * cos + torch.cat([-b, a], dim=-1) * sin, rest], dim=-1)


def angles(*shape, equal=True):
    half = numbers(*shape[:-1], shape[-1] // 2, seed=5, scale=3.0)
    return torch.cat([half, half if equal else half + 1], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rows, heads, size, turned, equal",
    [((2, 5), (3, 1), 24, 24, True), ((5,), (6, 6), 20, 8, False), ((0,), (2, 2), 8, 8, True)],
)
def test_queries_and_keys_turn(rows, heads, size, turned, equal, dtype):
    of = angles(*rows, turned, equal=equal)
    q, k = (numbers(*rows, n, size, seed=n) for n in heads)

    def plain(q, k):
        cos, sin = of.cos().to(q.dtype), of.sin().to(q.dtype)
        return plain_turn(q, cos, sin), plain_turn(k, cos, sin)

    def kernel(q, k):
        return layers.rotary(q, k, of.cos().to(q.dtype), of.sin().to(q.dtype))

    compare(kernel, plain, [q, k], dtype)


def test_rows_share_angles_and_heads_may_lie_apart():
    """As transformers has them: [R, H, T, D] that a transposition made, and cosines [1, T, D]."""
    of = angles(1, 5, 16)
    cos, sin = of.cos(), of.sin()
    q, k = numbers(3, 4, 5, 16), numbers(3, 2, 5, 16, seed=1)

    def kernel(q, k):
        return layers.rotary(q.transpose(1, 2), k.transpose(1, 2), cos.to(q.dtype), sin.to(q.dtype))

    def plain(q, k):
        return tuple(plain_turn(x.transpose(1, 2), cos.to(x.dtype), sin.to(x.dtype)) for x in (q, k))

    compare(kernel, plain, [q, k], torch.float32)


# -- SwiGLU ------------------------------------------------------------------------------------------------------------


def plain_swiglu(x, up=None, weights=None):
    gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
    out = torch.nn.functional.silu(gate) * up
    return out if weights is None else (out * weights).to(x.dtype)


def apart(x):
    return x.transpose(0, 1) if x.dim() == 3 else x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "inputs, layout",
    [
        ([numbers(5, 1, 96, scale=3.0)], None), ([numbers(2, 3, 5000, scale=3.0)], None), ([numbers(0, 1, 32)], None),
        ([numbers(2, 3, 37, scale=3.0), numbers(2, 3, 37, seed=1)], None),
        ([numbers(2, 3, 37, scale=3.0), numbers(2, 3, 37, seed=1)], apart),
    ],
    ids=["one tensor", "wide", "none", "two tensors", "two that lie apart"],
)  # fmt: skip
def test_swiglu(inputs, layout, dtype):
    compare(layers.swiglu, plain_swiglu, inputs, dtype, layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_with_the_routers_weights(dtype):
    """They are fp32 whatever x is, and their gradient too."""
    inputs = [numbers(6, 3000, scale=2.0), numbers(6, 1, seed=2).abs().float()]
    compare(lambda x, w: layers.swiglu(x, weights=w), lambda x, w: plain_swiglu(x, weights=w), inputs, dtype)


# -- operators ---------------------------------------------------------------------------------------------------------


def test_operators_are_registered_as_torch_asks():
    """Schemas hold, and fake tensors have the shapes, dtypes and strides of real ones."""
    x, weight, half = torch.randn(3, 8), torch.randn(8), torch.randn(3, 1)
    q, k, cos = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 8)
    calls = {
        "rms_norm": (x, weight, 1e-6, False),
        "rms_norm_backward": (x, x, weight, 1e-6, True, torch.zeros(8)),
        "rotary": (q, k, cos, cos, False),
        "swiglu": (x, x, half),
        "swiglu_backward": (x, x, x, half, True),
    }
    for name, args in calls.items():
        torch.library.opcheck(getattr(torch.ops.mrl, name).default, args, test_utils=("test_schema", "test_faketensor"))


def test_what_is_compiled_has_no_graph_break():
    def step(x, weight, q, k, cos):
        out = layers.swiglu(layers.rms_norm(x, weight, 1e-6))
        return out.sum() + sum(t.square().sum() for t in layers.rotary(q, k, cos, cos.flip(0)))

    def inputs():
        made = [numbers(*s, seed=i).float() for i, s in enumerate([(3, 8), (8,), (3, 4, 8), (3, 2, 8), (3, 8)])]
        return [x.requires_grad_(i < 4) for i, x in enumerate(made)]

    plain, compiled = inputs(), inputs()
    step(*plain).backward()
    torch.compile(step, backend="aot_eager", fullgraph=True)(*compiled).backward()
    for a, b in zip(plain[:4], compiled[:4], strict=True):
        assert torch.equal(a.grad, b.grad)
