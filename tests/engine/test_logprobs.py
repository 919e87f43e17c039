"""Log-probs and entropies from (vocabulary-parallel) logits, against torch's log_softmax.

Tensor parallelism: each rank is a process of a gloo group of two, on halves of
a vocabulary whose padding fills the end of the second half. Traps 13 (padded columns), 19 (temperature) and 20
(logits written in place) are named where they are tested.
"""

import pytest
import torch
import torch.distributed as dist

from mrl.engine.logprobs import PLAIN, LogitRule, VocabShard, log_probs_from_hidden, top_log_probs
from tests.engine.harness import run_case

T, H, V, K = 13, 8, 29, 3


def inputs(dtype=torch.float64, columns=V, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(columns, H, generator=generator, dtype=torch.float64) * scale / H**0.5
    labels = torch.randint(0, V, (T,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), labels


def reference(logits, labels, temperature=1.0, rule=PLAIN):
    """labels: [T] or [T, K]. Columns from V on are padding."""
    logits = logits[:, :V] * rule.scale
    logits = logits if rule.softcap is None else rule.softcap * torch.tanh(logits / rule.softcap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(1, labels.view(T, -1)).view(labels.shape), -(log_p.exp() * log_p).sum(1)


def several_labels():
    """[T, K], of which some tokens have one twice."""
    labels = torch.randint(0, V, (T, K), generator=torch.Generator().manual_seed(1))
    labels[::4, 1] = labels[::4, 0]
    return labels


def objective(log_probs, entropy):
    weights = torch.linspace(-1, 1, T, dtype=log_probs.dtype)
    of_labels = weights if log_probs.dim() == 1 else torch.stack([weights * (k + 1) for k in range(K)], dim=1)
    return (log_probs * of_labels).sum() + (0.0 if entropy is None else (entropy * weights.flip(0)).sum())


@pytest.mark.parametrize(  # temperature: trap 19
    ("rule", "several", "keep_logits", "temperature", "chunk"),
    [
        (PLAIN, False, True, 1.0, None), (PLAIN, True, False, 0.7, 5), (PLAIN, False, False, 0.7, T),
        (LogitRule(0.25), True, True, 0.7, 1), (LogitRule(0.25), False, False, 1.0, 5),
        (LogitRule(1.0, 3.0), False, True, 0.7, 5), (LogitRule(1.0, 3.0), True, False, 1.0, None),
        (LogitRule(4.0, 2.0), True, True, 1.0, T), (LogitRule(4.0, 2.0), False, False, 0.7, 1),
    ],
    ids=str,
)  # fmt: skip
def test_values_and_gradients_match_log_softmax(rule, several, keep_logits, temperature, chunk):
    """Trap 13: padded columns take no part."""
    hidden, weight, labels = inputs(columns=V + 3)
    labels = several_labels() if several else labels
    ours = [t.clone().requires_grad_() for t in (hidden, weight)]
    theirs = [t.clone().requires_grad_() for t in (hidden, weight)]
    options = {"shard": VocabShard(V), "temperature": temperature, "entropy": "differentiable", "chunk": chunk}
    log_probs, entropy = log_probs_from_hidden(*ours, labels, keep_logits=keep_logits, rule=rule, **options)
    expected, expected_entropy = reference(theirs[0] @ theirs[1].t(), labels, temperature, rule)
    torch.testing.assert_close(log_probs, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-12, atol=1e-12)
    objective(log_probs, entropy).backward()
    objective(expected, expected_entropy).backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("several", "keep_logits", "wanted"),
    [
        (False, True, []),
        (True, False, []),
        (True, True, [4]),
        (False, False, [0, 3, 4, 9, 12]),
        (True, True, [*range(T)]),
    ],
)
def test_rows_are_those_of_all_tokens_and_others_are_0(several, keep_logits, wanted):
    rows, mask = torch.tensor(wanted, dtype=torch.int64), torch.zeros(T, dtype=torch.float64)
    mask[rows] = 1.0
    labels = several_labels() if several else inputs()[2]
    of_labels = mask.view(T, *(1 for _ in labels.shape[1:]))
    ours, all_ours = ([t.clone().requires_grad_() for t in inputs()[:2]] for _ in range(2))
    options = {"shard": VocabShard(V), "entropy": "differentiable", "chunk": 2, "keep_logits": keep_logits}
    log_probs, entropy = log_probs_from_hidden(*ours, labels, rows=rows, **options)
    every, every_entropy = log_probs_from_hidden(*all_ours, labels, **options)
    torch.testing.assert_close(log_probs, every * of_labels)
    torch.testing.assert_close(entropy, every_entropy * mask)
    objective(log_probs, entropy).backward()
    objective(every * of_labels, every_entropy * mask).backward()
    for a, b in zip(ours, all_ours, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trap_20_kept_logits_are_not_written_to(temperature):
    """A second backward pass over the same logits gives the first one's gradients, with and without the entropy."""
    hidden, weight, labels = inputs(torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    options = {"shard": VocabShard(V), "temperature": temperature, "chunk": 4, "keep_logits": True}
    log_probs, entropy = log_probs_from_hidden(hidden, weight, labels, entropy="differentiable", **options)
    for value in (objective(log_probs, None), objective(log_probs, entropy)):
        first, again = (torch.autograd.grad(value, (hidden, weight), retain_graph=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_detached_entropy_has_the_value_and_no_gradient():
    hidden, weight, labels = inputs()
    hidden.requires_grad_()
    log_probs, entropy = log_probs_from_hidden(hidden, weight, labels, shard=VocabShard(V), entropy="detached")
    torch.testing.assert_close(entropy, reference(hidden @ weight.t(), labels)[1].detach())
    assert log_probs.requires_grad and not entropy.requires_grad


def test_bf16_is_computed_in_fp32_and_returned_in_fp32():
    hidden, weight, labels = inputs(torch.bfloat16)
    hidden.requires_grad_(), weight.requires_grad_()
    log_probs, _ = log_probs_from_hidden(hidden, weight, labels, shard=VocabShard(V), chunk=4)
    expected, _ = reference((hidden @ weight.t()).float(), labels)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected)
    log_probs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_large_logits_do_not_overflow():
    weight = torch.tensor([[1e4], [-1e4], [0.0]])
    log_probs, entropy = log_probs_from_hidden(
        torch.ones(1, 1), weight, torch.tensor([1]), shard=VocabShard(3), entropy="detached"
    )
    assert log_probs.item() == -2e4 and entropy.item() == 0.0


def test_a_label_outside_the_vocabulary_is_nan():
    log_probs, _ = log_probs_from_hidden(torch.ones(2, 1), torch.zeros(4, 1), torch.tensor([1, 3]), shard=VocabShard(3))
    assert log_probs.isnan().tolist() == [False, True]


@pytest.mark.parametrize("chunk", [None, 4])
def test_the_largest_log_probs_of_each_token(chunk):
    hidden, weight, _ = inputs()
    padded = torch.cat([weight, 9 * torch.ones(3, H, dtype=weight.dtype)])
    found, ids = top_log_probs(hidden, padded, 5, shard=VocabShard(V), temperature=0.7, chunk=chunk)
    expected = torch.log_softmax(hidden @ weight.t() / 0.7, dim=-1).topk(5)
    torch.testing.assert_close((found, ids), tuple(expected))
    found, ids = top_log_probs(hidden, padded, V + 2, shard=VocabShard(V))
    assert found[:, V:].eq(-torch.inf).all() and not ids[:, V:].any() and ids.sort().values[:, 2:].equal(
        torch.arange(V).expand(T, V)
    )  # fmt: skip
    assert [t.shape for t in top_log_probs(hidden[:0], weight, 5, shard=VocabShard(V))] == [(0, 5), (0, 5)]


def test_no_tokens():
    hidden, weight, labels = (t[:0] if i != 1 else t for i, t in enumerate(inputs()))
    weight.requires_grad_()
    log_probs, entropy = log_probs_from_hidden(hidden, weight, labels, shard=VocabShard(V), entropy="differentiable")
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,) and not weight.grad.any()


def check_columns(rank, columns_per_rank, labels):
    hidden, weight, _ = inputs(columns=2 * columns_per_rank)
    rows = slice(rank * columns_per_rank, (rank + 1) * columns_per_rank)
    shard = VocabShard(V, start=rows.start, group=dist.group.WORLD)
    full = weight.clone().requires_grad_()
    expected_hidden = hidden.clone().requires_grad_()
    logits = (expected_hidden @ full.t())[:, :V]
    expected = reference(logits, labels, 0.9)
    largest = torch.log_softmax(logits.detach(), dim=-1).topk(6)
    objective(*expected).backward()
    torch.testing.assert_close(top_log_probs(hidden, weight[rows], 6, shard=shard, chunk=5), tuple(largest))
    for reduce in (True, False):
        local, h = weight[rows].clone().requires_grad_(), hidden.clone().requires_grad_()
        options = {"shard": shard, "temperature": 0.9, "entropy": "differentiable", "chunk": 5}
        out = log_probs_from_hidden(h, local, labels, reduce_hidden_grad=reduce, **options)
        torch.testing.assert_close(out, expected)
        objective(*out).backward()
        if not reduce:  # each rank holds its part
            dist.all_reduce(h.grad)
        torch.testing.assert_close(h.grad, expected_hidden.grad)
        torch.testing.assert_close(local.grad, full.grad[rows])


def columns_of_each_rank(columns_per_rank):
    """Of two ranks: the columns of each of the padded vocabulary give the single-rank values and gradients."""
    for labels in (inputs()[2], several_labels()):
        check_columns(dist.get_rank(), columns_per_rank, labels)


@pytest.mark.parametrize("columns_per_rank", [16, 32])  # the second: rank 1 holds nothing but padding
def test_two_tensor_parallel_ranks(columns_per_rank):
    run_case(2, "tests.engine.test_logprobs:columns_of_each_rank", columns_per_rank=columns_per_rank)
