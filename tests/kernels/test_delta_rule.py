"""The gated delta rule by fla's kernels, on CPU tensors under Triton's interpreter, against mrl's own rule."""

from __future__ import annotations

import builtins
import importlib
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from mrl.kernels import delta_rule as kernels
from mrl.kernels import operators
from mrl.ops import delta_rule
from mrl.ops.delta_heads import DeltaHeads
from mrl.ops.delta_rule import Chunks, unit
from mrl.ops.kv_cache import CachedStep, KVCache
from tests.ops.test_delta_rule import CPU, HEADS, KEY, SHARING, VALUE, inputs

MODULES = Path(sys.prefix) / "fla"


@pytest.fixture(autouse=True, scope="module")
def fla():
    """fla, with the first of the sizes that its autotuner would time on a GPU."""
    autotuner = pytest.importorskip("triton.runtime.autotuner", reason="the CPU build of torch has no triton")
    from triton.runtime import interpreter

    assert (MODULES / "fla").is_dir(), f"{MODULES} is missing: `make te-modules` fetches it"

    def first(self, *args, **options):
        return self.fn.run(*args, **options | self.configs[0].all_kwargs())

    def tensor_range(*bounds):
        """The interpreter's loops give numbers, on which fla calls methods of tensors."""
        bounds = (int(b.handle.data.item()) if hasattr(b, "handle") else b for b in bounds)
        return (interpreter._implicit_cvt(number) for number in builtins.range(*bounds))

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(MODULES)
        patch.setattr(autotuner.Autotuner, "run", first)
        patch.setattr(importlib.import_module("fla.ops.common.chunk_delta_h"), "range", tensor_range, raising=False)
        kernels._version.cache_clear()
        kernels._rule.cache_clear()
        yield
    kernels._version.cache_clear()
    kernels._rule.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        del sys.modules[name]


def both(lengths, dtype, *, state=None, fastest=1.0):
    """For each rule, outputs, states, and gradients of all inputs, which have this dtype but for decay and beta."""
    found = []
    for rule in ("kernels", "ours"):
        tensors = [x.requires_grad_() for x in inputs(sum(lengths), fastest=fastest)]
        query, key, value, decay, beta = tensors
        query, key, value = (
            x.to(dtype).to(wide)
            for x, wide in ((unit(query), torch.float32), (unit(key), torch.float32), (value, dtype))
        )
        chunks = Chunks.of(lengths, CPU)
        if rule == "kernels":
            out, after = kernels.chunked_rule((query, key, value, decay, beta), chunks.cu_seqlens, state)
        else:
            out, states = delta_rule.chunked_rule(query, key, value, decay, beta, chunks, state)
            after = states()
        drawn = torch.Generator().manual_seed(1)
        total = sum((x.float() * torch.randn(x.shape, generator=drawn)).sum() for x in (out, after))
        found.append([out, after, *torch.autograd.grad(total, tensors)])
    return zip(*found, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "with_state"), [((1, 64, 65), False), ((0, 5, 0, 70), True)], ids=str)
def test_kernels_give_the_numbers_of_the_rule(lengths, with_state):
    """In fp32, which the interpreter computes without TF32: sums in another order."""
    drawn = torch.randn(len(lengths), HEADS, SHARING, KEY, VALUE, generator=torch.Generator().manual_seed(3))
    for one, other in both(lengths, torch.float32, state=drawn if with_state else None):
        assert one.shape == other.shape
        assert (one - other).norm() < 2e-6 * other.norm()


def test_fast_decays_cost_digits_of_their_gradient_alone():
    """A state keeps exp(-16) at most: sums of 64 such logarithms in fp32 leave their differences 13 bits."""
    *others, (of_decay, expected), of_beta = both((70,), torch.float32, fastest=16.0)
    for one, other in (*others, of_beta):
        assert (one - other).norm() < 1e-5 * other.norm()
    assert 1e-6 * expected.norm() < (of_decay - expected).norm() < 1e-3 * expected.norm()


def test_kernels_round_to_two_bytes():
    """Products of fla round to the dtype of values, ours are in fp32: four units of float16, which is 2^-11.

    The interpreter of triton 3.7 multiplies the bits of bfloat16 as integers.
    """
    for one, other in both((1, 66), torch.float16):
        assert (one.float() - other.float()).norm() < 4 * 2**-11 * other.float().norm()


def layer_inputs(tokens=76, weights=4):
    """Inputs and parameters of `DeltaHeads`."""
    drawn = torch.Generator().manual_seed(4)
    channels = 2 * KEY + SHARING * VALUE
    x = torch.randn(tokens, HEADS, channels + 2 * SHARING, generator=drawn)
    return x, torch.randn(HEADS, channels, weights, generator=drawn), *torch.rand(2, HEADS, SHARING, generator=drawn)


def prompts_of(heads, x):
    """Outputs and the states after two prompts in two steps: 10 and 1 tokens, then 40 and 25 more."""
    cache, found = KVCache(2, 100), []
    for new, old in (((10, 1), (0, 0)), ((40, 25), (10, 1))):
        step = CachedStep(cache, new, old, CPU)
        found.append(heads.cached(0, x[sum(old) : sum(old) + sum(new)], step))
    return *found, *cache.states[0]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["forward", "cached"])
def test_heads_compute_by_the_kernels_that_are_taken(monkeypatch, step):
    """Outputs, gradients and kept states of a layer by fla's kernels, in float16, as by mrl's rule."""
    found = []
    for taken in (True, False):
        monkeypatch.setattr(kernels, "takes", lambda value, repeatable, taken=taken: taken)
        x, *parameters = (p.half().requires_grad_() for p in layer_inputs())
        heads = DeltaHeads(*parameters, KEY)
        if step == "forward":
            out = heads(x, Chunks.of((6, 70), CPU))
            grads = torch.autograd.grad(
                (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).float().sum(), (x, *parameters)
            )
            found.append([out, *grads])
        else:
            with torch.no_grad():
                found.append(prompts_of(heads, x))
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype and torch.isfinite(one).all()
        assert (one.float() - other.float()).norm() < 8 * 2**-11 * other.float().norm()
    assert not torch.equal(found[0][0], found[1][0])  # two ways to compute it


@pytest.mark.slow
def test_no_token_of_another_document_moves_a_bit():
    lengths, found = (66, 1, 9), []
    for factor in (1.0, 0.5):
        tensors = inputs(sum(lengths))
        for x in tensors:
            x[66] *= factor
        query, key, *rest = tensors
        out, after = kernels.chunked_rule((unit(query), unit(key), *rest), Chunks.of(lengths, CPU).cu_seqlens, None)
        found.append((out, after))
    (out, after), (changed, after_change) = found
    assert not torch.equal(out[66], changed[66]) and not torch.equal(after[1], after_change[1])
    for kept in (slice(66), slice(67, None)):
        assert torch.equal(out[kept], changed[kept])
    for document in (0, 2):
        assert torch.equal(after[document], after_change[document])


def test_whose_rule_a_gpu_has(monkeypatch):
    assert kernels.choice(torch.bfloat16).startswith("fla-core 0.") and kernels.choice(torch.float32) == "mrl"
    assert kernels.choice(torch.bfloat16, repeatable=True) == "mrl"
    assert not kernels.takes(torch.zeros(1, dtype=torch.bfloat16), repeatable=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "CAN_COMPILE", False)
        assert kernels.choice(torch.bfloat16) == "mrl"
    monkeypatch.setattr(kernels, "OLDEST", Version("99"))
    kernels._version.cache_clear()
    assert kernels.choice(torch.bfloat16) == "mrl"
    kernels._version.cache_clear()
