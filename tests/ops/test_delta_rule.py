"""The gated delta rule over documents that lie end to end, against transformers' rules over each document alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from mrl.ops.delta_rule import CHUNK, CausalConvolution, Chunks, chunked_rule, one_token_rule, unit
from tests.operators import Operators

CPU = torch.device("cpu")
HEADS, SHARING, KEY, VALUE = 2, 2, 8, 12
DOCUMENTS = {
    "around a chunk": (1, 63, 64, 65),
    "a long one": (1000, 3),
    "twenty short ones": (5, 2, 9, 1, 4, 7, 3, 3, 1, 8, 6, 2, 5, 9, 1, 1, 4, 2, 7, 3),
    "one token between two long ones": (200, 1, 200),
    "in four numbers of chunks": (130, 1, 200, 70),
}


def inputs(tokens: int, seed: int = 0, *, fastest: float = 1.0) -> list[torch.Tensor]:
    """query, key, value, decay and beta, before the norm of query and key. fastest: of the decays of a token."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(HEADS, KEY), (HEADS, KEY), (HEADS, SHARING, VALUE), (HEADS, SHARING), (HEADS, SHARING)]
    drawn = [torch.randn(tokens, *shape, generator=generator) for shape in shapes]
    return [*drawn[:3], -fastest * drawn[3].sigmoid(), drawn[4].sigmoid()]


def ours(tensors: list[torch.Tensor], lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, *rest = tensors
    out, states = chunked_rule(unit(query), unit(key), *rest, Chunks.of(lengths, CPU))
    return out, states()


def of_transformers(rule, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """One document's outputs [T, G, R, V] and its last state."""
    query, key, value, decay, beta = (x[None] for x in tensors)
    heads = {"g": decay.flatten(2), "beta": beta.flatten(2)}
    out, state = rule(query, key, value.flatten(2, 3), **heads, output_final_state=True, use_qk_l2norm_in_kernel=True)
    return out[0].unflatten(1, (HEADS, SHARING)), state[0].unflatten(0, (HEADS, SHARING))


@pytest.mark.parametrize("rule", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents_end_to_end_are_each_alone(lengths, rule):
    """Outputs, states, and gradients of all inputs. Sums of up to 64 terms in another order: 1e-6 of a size of 1."""
    tensors = [x.requires_grad_() for x in inputs(sum(lengths))]
    out, states = ours(tensors, lengths)
    alone = [of_transformers(rule, list(each)) for each in zip(*(x.split(lengths) for x in tensors), strict=True)]
    torch.testing.assert_close(out, torch.cat([one for one, _ in alone]), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(states, torch.stack([state for _, state in alone]), rtol=1e-5, atol=2e-6)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found, wanted = (
        torch.autograd.grad((one * weights).sum(), tensors) for one in (out, torch.cat([one for one, _ in alone]))
    )
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


def test_a_token_of_another_document_moves_no_bit():
    """Neither an output nor a gradient: of the rule and of the convolution before it."""
    lengths = (70, 1, 20, 130)
    starts = [0, 70, 71, 91]
    found = []
    for changed in (None, *range(len(lengths))):
        tensors = inputs(sum(lengths))
        rows = torch.randn(sum(lengths), 6, generator=torch.Generator().manual_seed(2))
        if changed is not None:
            at = starts[changed] + lengths[changed] // 2
            for x in (*tensors, rows):
                x[at] = x[at] * 0.5
        chunks, weight = Chunks.of(lengths, CPU), torch.linspace(-1, 1, 24).view(6, 4)
        tensors, rows = [x.requires_grad_() for x in tensors], rows.requires_grad_()
        outs = [ours(tensors, lengths)[0].flatten(1), CausalConvolution.apply(rows, weight, chunks.positions)]
        grads = torch.autograd.grad(sum(out.square().sum() for out in outs), [*tensors, rows])
        found.append([x.flatten(1).split(lengths) for x in (*outs, *grads)])
    for changed, those in enumerate(found[1:]):
        for kind, (before, after) in enumerate(zip(found[0], those, strict=True)):
            same = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
            assert all(same[:changed] + same[changed + 1 :])
            assert kind > 1 or not same[changed], "what was changed does not count"


def test_a_head_that_forgets_fast_keeps_the_digits_of_its_gradient():
    """In fp32, sums of decays of up to 1,000 have no digits left for their differences; transformers' are off by 1e-4."""
    lengths = (200,)
    tensors = inputs(200, fastest=16.0)

    def gradient(rule, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        *those, decay, beta = (x.to(dtype) for x in tensors)
        scale = torch.ones(HEADS, SHARING, dtype=dtype, requires_grad=True)
        out = rule([*those, decay * scale, beta])
        weights = torch.randn(200, HEADS, SHARING, VALUE, generator=torch.Generator().manual_seed(1)).to(dtype)
        return torch.autograd.grad((out * weights).sum(), scale)[0].double()

    exact = gradient(by_tokens, torch.float64)
    found = gradient(lambda those: ours(those, lengths)[0])
    theirs = gradient(lambda those: of_transformers(torch_chunk_gated_delta_rule, those)[0])
    assert (found - exact).norm() < 1e-6 * exact.norm() < 1e-2 * (theirs - exact).norm()


def by_tokens(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The rule as the paper writes it, in the dtype of its inputs."""
    query, key, value, decay, beta = tensors
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    state, outs = value.new_zeros(HEADS, SHARING, KEY, VALUE), []
    for q, k, v, g, b in zip(query * KEY**-0.5, key, value, decay, beta, strict=True):
        state = state * g.exp()[..., None, None]
        new = b[..., None] * (v - torch.einsum("grkv,gk->grv", state, k))
        state = state + torch.einsum("gk,grv->grkv", k, new)
        outs.append(torch.einsum("grkv,gk->grv", state, q))
    return torch.stack(outs)


def test_a_document_goes_on_from_its_state():
    """In pieces of any length, by chunks and token by token."""
    query, key, *rest = inputs(150)
    tensors = [unit(query), unit(key), *rest]
    whole, last = chunked_rule(*tensors, Chunks.of((150,), CPU))
    last = last()
    outs, state = [], torch.zeros(1, HEADS, SHARING, KEY, VALUE)
    for piece in (70, 1, 1, 13, 65):
        at = sum(len(out) for out in outs)
        part = [x[at : at + piece] for x in tensors]
        if piece == 1:
            out, state = one_token_rule(*part, state)
        else:
            out, after = chunked_rule(*part, Chunks.of((piece,), CPU), state)
            state = after()
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs), whole, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=2e-6)


def test_sequences_of_no_tokens_keep_their_state():
    query, key, *rest = inputs(5)
    state = torch.randn(3, HEADS, SHARING, KEY, VALUE, generator=torch.Generator().manual_seed(3))
    after = chunked_rule(unit(query), unit(key), *rest, Chunks.of((0, 5, 0), CPU), state)[1]()
    assert torch.equal(after[[0, 2]], state[[0, 2]]) and not torch.equal(after[1], state[1])


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_the_convolution_begins_anew_at_each_document(lengths):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(lengths), 6, generator=generator).requires_grad_()
    weight = torch.randn(6, 4, generator=generator).requires_grad_()
    out = CausalConvolution.apply(rows, weight, Chunks.of(lengths, CPU).positions)
    wanted = torch.cat([causal_conv1d_fn(part.t()[None], weight)[0].t() for part in rows.split(lengths)])
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    weights = torch.randn(out.shape, generator=generator)
    for one, other in zip(
        *(torch.autograd.grad((x * weights).sum(), [rows, weight]) for x in (out, wanted)), strict=True
    ):
        assert (one - other).norm() < 1e-6 * other.norm()


def test_in_bfloat16_the_convolution_rounds_once():
    rows, weight = torch.randn(9, 6).bfloat16(), torch.randn(6, 4).bfloat16()
    positions = Chunks.of((9,), CPU).positions
    exact = F.conv1d(F.pad(rows.double().t(), (3, 0))[None], weight.double()[:, None], groups=6)[0].t()
    assert torch.equal(CausalConvolution.apply(rows, weight, positions), exact.bfloat16())


def operations(lengths: list[int]) -> int:
    """Those of a forward and a backward pass that a GPU's host would start, views too."""
    query, key, *rest = (x.requires_grad_() for x in inputs(sum(lengths)))
    query, key, chunks = unit(query), unit(key), Chunks.of(lengths, CPU)
    with Operators() as found:
        chunked_rule(query, key, *rest, chunks)[0].sum().backward()
    return len(found.calls)


def test_operations_grow_with_the_longest_document_alone():
    four, eight = operations([4 * CHUNK]), operations([8 * CHUNK])
    assert operations([4 * CHUNK] * 7) <= four + 10
    assert operations([4 * CHUNK, 1, CHUNK + 6]) <= four + 20
    assert eight - four <= 4 * 70
    assert four <= 530
