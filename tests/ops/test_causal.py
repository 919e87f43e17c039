"""Causal attention by every way that causal.py has, against its formula over a mask of all queries and keys."""

from __future__ import annotations

import pytest
import torch

from mrl.ops import causal, flash
from mrl.ops.causal import causal_attention
from mrl.ops.kv_cache import CachedStep, KVCache
from mrl.ops.masked import ScoreRule, causal_mask, explicit_attention
from tests.ops.test_flash import OnGpu

H, G, D = 4, 2, 8
LONG = 2 * flash.BLOCK + 5
OPTIONS = [{}, {"window": 3}, {"window": 700}, {"sinks": True}, {"sinks": True, "window": 5}, {"softcap": 5.0},
           {"softcap": 5.0, "window": 5, "sinks": True}]  # fmt: skip


def given(queries, keys, dtype=torch.float64, sinks=False, **options):
    """Queries, keys and values, and the other arguments of an attention."""
    torch.manual_seed(0)
    tensors = [
        torch.randn(2, heads, n, D, dtype=dtype, requires_grad=True)
        for heads, n in ((H, queries), (G, keys), (G, keys))
    ]
    of_sinks = torch.randn(H, dtype=dtype) if sinks else None
    return tensors, {"scale": 0.3, "window": None, "sinks": of_sinks} | options


def written_out(q, k, v, *, scale, window, sinks=None, softcap=None):
    mask = causal_mask(q.shape[-2], k.shape[-2], window, torch.device("cpu"))
    sinks = None if sinks is None else sinks.view(-1, 1, 1)
    return explicit_attention(q, k, v, mask, scale=scale, sinks=sinks, softcap=softcap)


def with_gradients(out, tensors):
    """[the output, its gradients by the tensors], the same weights on every place of outputs of one shape."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, tensors, weights)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("queries, keys", [(5, 5), (3, 9), (flash.BLOCK + 9, LONG)])
def test_every_way_computes_the_same(monkeypatch, queries, keys, options):
    """On a CPU, and as on a GPU that has no kernel for it: fp64 is none of flash-attn's types."""
    tensors, arguments = given(queries, keys, **options)
    wanted = with_gradients(written_out(*tensors, **arguments), tensors)
    found = with_gradients(causal_attention(*tensors, ScoreRule(**arguments)), tensors)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    monkeypatch.setattr(causal, "MAX_SCORES", 7 * 2 * H * keys)  # in blocks of 7 queries
    on_gpu = causal_attention(*(t.as_subclass(OnGpu) for t in tensors), ScoreRule(**arguments))
    on_gpu = with_gradients(on_gpu.as_subclass(torch.Tensor), tensors)
    torch.testing.assert_close(on_gpu, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_prompt_in_parts_is_the_prompt(options):
    """As in generation: tokens after those that the cache has, in several forwards, of two sequences at once."""
    (q, k, v), arguments = given(LONG, LONG, **options)
    q, k, v = (t.detach() for t in (q, k, v))
    wanted = written_out(q, k, v, **arguments).transpose(1, 2)
    query = q.transpose(1, 2).unflatten(2, (G, -1))
    key, value = (t.transpose(1, 2) for t in (k, v))
    cache, old, outs = KVCache(2, LONG), 0, []
    for new in (1, 3, flash.BLOCK + 7, LONG - flash.BLOCK - 11):
        step = CachedStep(cache, (new, new), (old, old), q.device)
        out = step.attend(
            0, *(t[:, old : old + new].flatten(0, 1) for t in (query, key, value)), ScoreRule(**arguments)
        )
        outs.append(out.flatten(1, 2).unflatten(0, (2, new)))
        old += new
    torch.testing.assert_close(torch.cat(outs, dim=1), wanted, rtol=0, atol=1e-6)
