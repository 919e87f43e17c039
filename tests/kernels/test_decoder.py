"""The native decoder's use of the kernels: its norms, turned heads and SwiGLU, and whole completions.

In bfloat16 a kernel gives the bits of the formula of transformers, or of transformer-engine's kernels under their spec,
but for sums in another order: those move few numbers by one unit.
"""

from __future__ import annotations

import types

import pytest
import torch

from mrl.kernels import operators
from mrl.mcore_models import cpu_stand_in

cpu_stand_in.prepare()

from mrl.mcore_models.decoder import Decoder, _GroupedAttention, _Norm, _swiglu  # noqa: E402
from tests.engine import generation, tiny  # noqa: E402
from tests.engine.harness import run_case  # noqa: E402
from tests.kernels.test_layers import DTYPES, numbers, plain_turn  # noqa: E402

TOKENS, GROUPS, QUERIES, SIZE = 5, 3, 2, 24
POSITIONS = torch.tensor([0, 7, 1023, 4096, 33])


def assert_same(found, expected):
    if expected.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        return
    assert found.dtype == expected.dtype and found.shape == expected.shape
    difference = (found.double() - expected.double()).abs()
    assert (difference <= 2**-7 * expected.double().abs()).all() and (difference != 0).double().mean() < 0.01


def heads(dtype):
    """Queries and the key of each group [T, G, queries + 1, D], as a part of a product that has values too."""
    return numbers(TOKENS, GROUPS, QUERIES + 2, SIZE).to(dtype)[:, :, :-1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("of_heads", [False, True])
def test_norms_round_as_torchs(of_heads, once, dtype):
    """of_heads: queries have one weight, keys another."""
    x = heads(dtype) if of_heads else numbers(7, 96).to(dtype)
    weight = 1 + 0.2 * numbers(*(x.shape[-2:] if of_heads else x.shape[-1:]), seed=1).to(dtype)
    norm = _Norm(weight.float() if once else weight, 1e-6, once)
    with operators.interpreted(False):
        expected = norm(x)
    assert_same(norm(x), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turns", [SIZE, 8])
@pytest.mark.parametrize("wide", [False, True])
def test_queries_and_keys_turn_by_their_tokens_angles(wide, turns, dtype):
    """wide: in fp32, rounded once, as transformer-engine's kernel does."""
    rotary = types.SimpleNamespace(inv_freq=0.7 ** torch.arange(turns // 2), scale=1.25)
    model = types.SimpleNamespace(groups=GROUPS, model=types.SimpleNamespace(rotary_pos_emb=rotary))
    attention = types.SimpleNamespace(head=SIZE)
    between = torch.float32 if wide else dtype

    def turned():
        cos_sin = Decoder._cos_sin(model, POSITIONS, between)
        return _GroupedAttention._turned(attention, heads(dtype), *cos_sin), cos_sin

    (query, key), _ = turned()
    with operators.interpreted(False):
        plain, cos_sin = turned()
    for found, ours, part in ((query, plain[0], slice(-1)), (key, plain[1], slice(-1, None))):
        formula = plain_turn(heads(dtype)[:, :, part].to(between), *cos_sin).to(dtype)
        assert_same(found, formula)
        torch.testing.assert_close(ours, formula, rtol=2**-7, atol=2**-7)  # torch's adds the second product unrounded


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_rounds_as_torchs(dtype):
    both = numbers(7, 2 * 37, scale=3.0).to(dtype)
    with operators.interpreted(False):
        expected = _swiglu(both)
    assert_same(_swiglu(both), expected)


@pytest.mark.parametrize(
    "family, spec, parallel",
    [
        ("qwen3", "local", {}),
        pytest.param("qwen3_5", "local", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "te", {}, marks=pytest.mark.slow),
    ],
)
def test_completions_are_those_of_transformers(tmp_path, family, spec, parallel):
    """Prompts of 1 to 11 tokens, in one step with sequences past theirs."""
    folder = tiny.make_model(str(tmp_path / "model"), family)
    config = tiny.role(folder, backend="megatron", parallel=parallel, optimizer=None, layer_spec=spec)
    expected = generation.hugging_face(folder, generation.sampled_requests(1))
    size = max(parallel.values(), default=1)
    launched = run_case(size, "tests.kernels.decoding:samples_are_the_same", config=config, expected=expected)
    assert {"draw", "rms_norm", "rotary", "swiglu"} <= launched
