"""The kernels of the output layer against fp64, and against mrl's own torch code.

The torch code of mrl/engine/logprobs.py runs on fp64 tensors, which the kernels do not take, and on others outside of
`operators.interpreted`. In fp32 an error is at most 4 times torch's, or 4 units in the last place of the largest number.
In bfloat16 both have the same logits. Their gradients are rounded once, from numbers that are equal but for fp32.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from mrl.engine import logprobs
from mrl.engine.logprobs import LogitRule, VocabShard, log_probs_from_hidden, top_log_probs
from mrl.kernels import head, operators
from tests.engine import tiny
from tests.engine.contract import gradients, make_engine
from tests.engine.harness import run_case
from tests.engine.layouts import world_and_role
from tests.tiers import in_tiers, nightly_but

T, H, V, PADDING = 7, 6, 300, 5
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of columns in a small vocabulary."""
    from mrl.kernels import head_launchers

    monkeypatch.setattr(head_launchers, "BLOCK", 128)


def inputs(labels=1, tokens=T, columns=V + PADDING, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    hidden, weight = draw(tokens, H), draw(columns, H) * 2
    ids = torch.randint(0, V, (tokens, labels), generator=generator)
    if labels > 2 and tokens:
        ids[0] = ids[0, 0]  # one label several times
    return hidden, weight, ids[:, 0] if labels == 1 else ids


def outcome(dtype, given, *, kernel=True, **options):
    """Returns log-probs, entropies, and the gradients of hidden and weight of a weighted sum of both."""
    hidden, weight, labels = given
    leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight)]
    with operators.interpreted(kernel):
        log_probs, entropy = log_probs_from_hidden(*leaves, labels, **({"shard": VocabShard(V)} | options))
        total = (log_probs.double() * torch.linspace(-1, 1, labels.numel()).view(labels.shape)).sum()
        if entropy is not None and entropy.requires_grad:
            total = total + (entropy.double() * torch.linspace(1, 2, len(entropy))).sum()
        found = torch.autograd.grad(total, leaves) if labels.numel() else ()
    return [log_probs] + ([] if entropy is None else [entropy]) + list(found)


def compare(dtype, given, **options):
    ours, theirs = (outcome(dtype, given, kernel=kernel, **options) for kernel in (True, False))
    exact = outcome(torch.float64, given, **options)
    for number, (a, b, true) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype and a.isfinite().all()
        largest = true.abs().max()
        if dtype == torch.float32:
            assert (a - true).abs().max() <= 4 * (b - true).abs().max() + 2**-21 * largest
        else:  # the last two are gradients
            bound = 2**-8 if number >= len(ours) - 2 else 2**-20
            assert (a.double() - b.double()).abs().max() <= bound * largest


BOTH = {"entropy": "differentiable"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given, options", [
    ({}, {}), ({}, BOTH | {"temperature": 0.7}),
    ({"labels": 3}, {"entropy": "detached", "rule": LogitRule(0.25), "temperature": 1.3}),
    ({"labels": 3}, BOTH | {"rule": LogitRule(1.0, 3.0)}), ({}, BOTH | {"rule": LogitRule(4.0, 2.0), "temperature": 0.5}),
    ({"labels": 5}, {}), ({"labels": 3}, BOTH | {"rows": torch.tensor([0, 2, 5]), "temperature": 0.8, "first_temperature": 1.0}),
    # a vocabulary that ends inside of a block, at the last column, and at the end of a block
    ({"labels": 2, "tokens": 1}, BOTH | {"shard": VocabShard(V + PADDING)}), ({"labels": 2, "tokens": 3, "columns": V}, BOTH),
    ({"labels": 2, "tokens": 2, "columns": 384}, BOTH | {"shard": VocabShard(384)}),
])  # fmt: skip
def test_values_and_gradients(given, options, dtype):
    keeps = given.get("labels", 1) == 1
    compare(dtype, inputs(**given), **{"entropy": "none", "chunk": 5, "keep_logits": keeps} | options)


def test_one_column_and_no_token():
    given = inputs(1, 2, 1)
    log_probs, entropy, *gradients = outcome(torch.float32, (*given[:2], torch.zeros(2, dtype=torch.int64)),
                                             shard=VocabShard(1), entropy="differentiable")  # fmt: skip
    assert not log_probs.any() and not entropy.any() and not any(g.any() for g in gradients)
    assert [t.shape for t in outcome(torch.float32, inputs(1, 0), entropy="detached")] == [(0,), (0,)]


def test_a_large_vocabulary_in_whole_blocks(monkeypatch):
    from mrl.kernels import head_launchers

    monkeypatch.setattr(head_launchers, "BLOCK", 4096)
    hidden, weight, _ = inputs(1, 2, 9001)
    given = (hidden, weight, torch.tensor([4095, 9000]))
    compare(torch.bfloat16, given, shard=VocabShard(9001), entropy="differentiable")


def test_a_label_outside_the_vocabulary_is_nan():
    hidden, weight, _ = inputs(1, 2)
    log_probs, *_ = outcome(torch.float32, (hidden, weight, torch.tensor([V - 1, V])))
    assert log_probs.isnan().tolist() == [False, True]


def test_large_logits_do_not_overflow():
    given = torch.ones(1, 1), torch.tensor([[1e4], [-1e4], [0.0]]), torch.tensor([1])
    log_probs, entropy, *_ = outcome(torch.float32, given, shard=VocabShard(3), entropy="detached")
    assert log_probs.item() == -2e4 and entropy.item() == 0.0


def test_columns_of_minus_infinity_have_no_part():
    """Whole blocks of them too. They have a probability and a gradient of 0."""
    z = torch.randn(3, V, generator=torch.Generator().manual_seed(0)) * 3
    kept = torch.zeros(V, dtype=torch.bool)
    kept[130:140] = kept[270:] = True
    masked, labels = z.masked_fill(~kept, -torch.inf), torch.tensor([[131], [275], [299]])
    log_p = z.double()[:, kept].log_softmax(-1)
    lse, entropy, log_probs = head.head_sums(masked, labels, 0, [1.0, 0.0, 1.0], True, True)
    torch.testing.assert_close(log_probs.double(), masked.double().log_softmax(-1).gather(1, labels)[:, 0])
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(1))
    ones = torch.ones(3)
    head.head_gradient_(masked, labels, lse, torch.zeros(3, 1), entropy, ones, 0, [1.0, 0.0, 1.0])
    expected = -log_p.exp() * (log_p + entropy.double()[:, None])
    torch.testing.assert_close(masked[:, kept].double(), expected, rtol=1e-5, atol=1e-6)
    assert not masked[:, ~kept].any()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trap_20_kept_logits_are_not_written_to(temperature):
    """A second backward pass over the same logits gives the first one's gradients."""
    hidden, weight, labels = inputs()
    leaves = [t.float().requires_grad_() for t in (hidden, weight)]
    log_probs, _ = log_probs_from_hidden(
        *leaves, labels, shard=VocabShard(V), temperature=temperature, chunk=4, keep_logits=True
    )
    first, again = (torch.autograd.grad(log_probs.sum(), leaves, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company_and_each_time(dtype):
    z = (torch.randn(5, V, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    labels = torch.arange(10).view(5, 2) * 7

    def run(rows):
        sums = head.head_sums(z[rows], labels[rows], 0, [1.0, 0.0, 0.9], True, True)
        out = z[rows].clone()
        head.head_gradient_(
            out, labels[rows], sums[0].clone(), sums[2:].t().contiguous(), sums[1].clone(), sums[1].clone(), 0,
            [1.0, 0.0, 0.9],
        )  # fmt: skip
        return sums, out

    together, gradient = run(slice(0, 5))
    for row in range(5):
        alone, own = run(slice(row, row + 1))
        assert torch.equal(alone[:, 0], together[:, row]) and torch.equal(own[0], gradient[row])


# -- the largest log-probs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_log_probs_are_those_of_their_labels_to_the_bit(dtype):
    hidden, weight, _ = inputs()
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    options = {"shard": VocabShard(V), "temperature": 0.7, "chunk": 4}
    values, ids = top_log_probs(hidden, weight, 5, **options)
    expected = torch.log_softmax((hidden @ weight.t()).double()[:, :V] / 0.7, dim=-1).topk(5).values
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
    assert (values.diff(dim=1) <= 0).all()
    again, _ = log_probs_from_hidden(hidden, weight, ids, entropy="none", **options)
    assert torch.equal(again, values)
    values, ids = top_log_probs(hidden, weight[:4], 6, shard=VocabShard(4))
    assert values[:, 4:].eq(-torch.inf).all() and not ids[:, 4:].any()


# -- shards of a vocabulary --------------------------------------------------------------------------------------------


def shard_of_each_rank(columns_per_rank, labels):
    """Of two ranks: the columns of each give the values and gradients of one process."""
    with operators.interpreted():
        rank, shard = dist.get_rank(), VocabShard(V, dist.get_rank() * columns_per_rank, dist.group.WORLD)
        hidden, weight, ids = inputs(labels, columns=2 * columns_per_rank)
        options = {"entropy": "differentiable", "temperature": 0.9, "chunk": 5}
        whole = outcome(torch.float32, (hidden, weight, ids), **options)
        part = weight[rank * columns_per_rank : (rank + 1) * columns_per_rank]
        found = outcome(torch.float32, (hidden, part, ids), **options, shard=shard)
        expected = (*whole[:3], whole[3][rank * columns_per_rank : (rank + 1) * columns_per_rank])
        torch.testing.assert_close(found, list(expected), rtol=1e-4, atol=1e-5)
        own = top_log_probs(hidden.float(), part.float(), 6, shard=shard, chunk=5)
        torch.testing.assert_close(own, top_log_probs(hidden.float(), weight.float(), 6, shard=VocabShard(V)))


OF_RANKS = [(160, 3), (304, 1)]  # columns and labels; in the last, rank 1 has nothing but padding


@pytest.mark.parametrize("columns, labels", nightly_but(OF_RANKS[:1], OF_RANKS))
def test_shards(columns, labels):
    run_case(2, "tests.kernels.test_head:shard_of_each_rank", columns_per_rank=columns, labels=labels)


# -- main_grad ---------------------------------------------------------------------------------------------------------


def gradients_of(config, kernels, batches):
    """Returns the gradients of an engine, and whether its output weight's was added to main_grad by mrl."""
    engine = make_engine(config)
    held, calls = logprobs.main_grad_of, []
    with pytest.MonkeyPatch.context() as patch, operators.interpreted(kernels):
        patch.setattr(logprobs, "main_grad_of", lambda weight: calls.append(held(weight)) or calls[-1])
        _, found = gradients(engine, *(tiny.uneven_batch(seed=seed, sequences=3) for seed in range(batches)))
    return found, [call is not None for call in calls]


ENGINES = [
    ("llama", "megatron", True), ("qwen2", "megatron", False), ("llama", "megatron tp2", True), ("llama", "fsdp", False),
]  # fmt: skip


@pytest.mark.parametrize("family, layout, direct", in_tiers(ENGINES[:2], ENGINES[3:], ENGINES))
def test_the_weights_gradient_goes_into_main_grad_unless_it_is_tied(tmp_path, family, layout, direct):
    """Over two mini-batches of one step. qwen2 is tied: autograd sums the gradients of both ends."""
    folder = tiny.make_model(str(tmp_path), family, layers=1, tied=family == "qwen2")
    world, config = world_and_role(layout, folder, tokens=32)
    case = "tests.kernels.test_head:gradients_of"
    (found, taken), (expected, _) = (run_case(world, case, config=config, kernels=k, batches=2) for k in (True, False))
    assert taken and set(taken) == {direct}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max() + 1))
