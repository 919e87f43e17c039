"""Divergences from a teacher against an own oracle: torch's autograd through the papers' sums over whole distributions,
or over buckets of them.

Not here: that layouts and micro-batches give the same (tests/trainers/test_distill.py).
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from mrl.algorithms import distill
from mrl.algorithms.distill import DIVERGENCES, TEACHER, TEACHER_OF, DistillLoss, TeacherDivergence, divergence
from mrl.algorithms.losses import ActorLoss
from mrl.batch import Batch, make_batch

V, ROWS, BETA = 11, 6, 0.3


def logits(seed: int, scale: float = 2.0) -> Tensor:
    return torch.randn(ROWS, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def by_hand(kind: str, p: Tensor, q: Tensor) -> Tensor:
    """[N] by the papers' equations, of distributions [N, buckets]."""
    kl = lambda a, b: (a * (a / b).log()).sum(1)  # noqa: E731
    m = BETA * p + (1 - BETA) * q
    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: BETA * kl(p, m) + (1 - BETA) * kl(q, m),
    }[kind]()


def buckets(probabilities: Tensor, ids: Tensor) -> Tensor:
    """[N, K + 1]: of the ids, and of all others, each added up."""
    here = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, ids, True)
    rest = probabilities.masked_fill(here, 0).sum(1, keepdim=True)
    return torch.cat([probabilities.gather(1, ids), rest], 1)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("top", [None, 4, 1])
def test_values_and_gradients_are_those_of_the_papers(kind, top):
    """The gradient at the logits: through the K log-probs that an engine gives."""
    teacher, student = logits(1), logits(2).requires_grad_()
    count = V if top is None else top
    teacher_NK, ids = teacher.log_softmax(1).topk(count)
    student_NK = student.log_softmax(1).gather(1, ids)
    value, slope, tail = divergence(student_NK, teacher_NK, kind=kind, beta=BETA, tail=top is not None)
    (made,) = torch.autograd.grad((student_NK * slope).sum(), student)
    p, q = teacher.softmax(1), student.softmax(1)
    if top is not None:
        p, q = buckets(p, ids), buckets(q, ids)
        assert torch.allclose(tail, p[:, -1], atol=1e-12)
    expected = by_hand(kind, p, q)
    (wanted,) = torch.autograd.grad(expected.sum(), student)
    assert torch.allclose(value, expected, atol=1e-12) and (value > 0).all()
    assert torch.allclose(made, wanted, atol=1e-12)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("tail", [True, False])
def test_a_student_that_is_its_teacher_has_no_loss_and_does_not_move(kind, tail):
    """To the bit, in fp32 too, and with a tail that is lost in rounding."""
    for scale in (1.0, 30.0):
        log_probs = logits(3, scale).float().log_softmax(1).topk(4 if tail else V).values
        value, slope, _ = divergence(log_probs, log_probs, kind=kind, beta=BETA, tail=tail)
        assert (value == 0).all() and (slope == 0).all()


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_far_apart_is_finite(kind):
    """Log-probs of 1e-300 and less, and tails of nothing."""
    teacher, student = torch.tensor([[-0.0, -800.0]]), torch.tensor([[-800.0, -0.0]])
    value, slope, _ = divergence(student, teacher, kind=kind, beta=BETA, tail=True)
    assert value.isfinite().all() and slope.isfinite().all() and value > 0


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_tail_of_nothing_moves_with_nothing(kind):
    """The student has no probability left for the half that the teacher gives the tail."""
    # the student's sum is above 1, because CPUs round a logarithm differently
    teacher, student = torch.tensor([[0.25, 0.25]]).log(), torch.tensor([[0.7501, 0.25]]).log()
    slopes = [divergence(student, teacher, kind=kind, beta=BETA, tail=tail)[1] for tail in (True, False)]
    assert torch.equal(*slopes) and (slopes[0] != 0).any()
    whole = divergence(teacher, student, kind=kind, beta=BETA, tail=True)[2]
    assert whole.tolist() == [0.0], "what is reported is the teacher's own, not what keeps a logarithm finite"


def test_an_id_that_the_student_lacks_is_of_the_tail():
    """A teacher with more rows than the student: its log-prob is -inf, and its place counts nowhere else."""
    teacher, student = logits(1).log_softmax(1), logits(2).log_softmax(1)
    ids = torch.tensor([[0, 3, 5]]).expand(ROWS, 3)
    with_hole = teacher.gather(1, ids).index_fill(1, torch.tensor([1]), -torch.inf)
    made = divergence(student.gather(1, ids), with_hole, kind="jsd", tail=True)
    without = divergence(student[:, [0, 5]], teacher[:, [0, 5]], kind="jsd", tail=True)
    assert torch.equal(made[0], without[0]) and torch.equal(made[1][:, [0, 2]], without[1])
    assert (made[1][:, 1] == 0).all()


def batch_of(teacher_NK: Tensor) -> Batch:
    """Three sequences of which six tokens train, with weights; teacher_NK: of the trained ones."""
    masks = [[0, 0, 1, 1], [0, 1, 0.5], [0, 2, 1]]
    batch = make_batch([[1, 2, 3, 4], [5, 6, 7], [8, 9, 1]], masks)
    field = torch.full((batch.num_tokens, teacher_NK.shape[1]), torch.nan)
    field[batch.loss_mask != 0] = teacher_NK.float()
    return Batch(**{**vars(batch), "token_fields": {TEACHER: field}})


@pytest.mark.parametrize(("parts", "chunk"), [(((0, 1, 2),), 2**22), (((2,), (0, 1)), 2**22), (((0, 1, 2),), 7)])
def test_the_loss_is_a_sum_whatever_the_micro_batches(parts, chunk, monkeypatch):
    """And whatever is worked on at once: two rows of three log-probs in the last case."""
    monkeypatch.setattr(distill, "_CHUNK", chunk)
    teacher_NK, ids = logits(1).log_softmax(1).topk(3)
    batch = batch_of(teacher_NK)
    trained = batch.loss_mask != 0
    log_probs = torch.full((batch.num_tokens, 4), torch.nan)  # nothing there may reach a sum
    log_probs[trained] = torch.cat([logits(4)[:, :1], logits(2).log_softmax(1).gather(1, ids)], 1).float()
    log_probs.requires_grad_()
    loss_fn = DistillLoss(kind="forward_kl", temperature=2.0, weight=0.75)
    starts, total, metrics = batch.cu_seqlens.tolist(), 0.0, {}
    for part in parts:
        at = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in part])
        loss, ctx = loss_fn(batch.select(part), {"log_probs": log_probs[at]}, {"metrics": {}})
        total = total + loss
        metrics = {name: metrics.get(name, 0.0) + float(value) for name, value in ctx["metrics"].items()}
    (gradient,) = torch.autograd.grad(total, log_probs)
    mask = batch.loss_mask[trained].double()
    value, slope, tail = divergence(log_probs[trained, 1:], teacher_NK.float(), kind="forward_kl", tail=True)
    nll = -(log_probs[trained, 0].double() * mask).sum()
    assert float(total) == pytest.approx(float(0.25 * nll + 0.75 * 4 * (value * mask).sum()), rel=1e-12)
    assert metrics == pytest.approx(
        {"distill/divergence": float((value * mask).sum()), "distill/nll": float(nll),
         "distill/teacher_tail": float((tail * mask).sum())}
    )  # fmt: skip
    assert torch.allclose(gradient[trained, 1:], (slope * 3 * mask[:, None]).float(), atol=1e-6)
    assert torch.allclose(gradient[trained, 0], (-0.25 * mask).float()) and (gradient[~trained] == 0).all()


def test_each_teacher_has_the_mean_of_its_own_tokens():
    """Its own weights too; a teacher without tokens has no metric. Once the engine has divided by all tokens, that is."""
    teacher_NK, ids = logits(1).log_softmax(1).topk(3)
    batch = batch_of(teacher_NK)
    counts = {"tokens/a": 2.0 + 3.0, "tokens/b": 1.5, "tokens/idle": 0.0}  # by the masks of `batch_of`
    own = {"denominators": {**batch.denominators, **counts}, "sequence_fields": {TEACHER_OF: torch.tensor([0, 1, 0])}}
    batch = dataclasses.replace(batch, **own)
    trained = batch.loss_mask != 0
    log_probs = torch.zeros(batch.num_tokens, 4)
    log_probs[trained, 1:] = logits(2).log_softmax(1).gather(1, ids).float()
    loss_fn = DistillLoss(kind="forward_kl", temperature=2.0, names=("a", "b", "idle"))
    metrics = loss_fn(batch, {"log_probs": log_probs}, {})[1]["metrics"]
    student, teacher = log_probs[trained, 1:], teacher_NK.float()
    each = divergence(student, teacher, kind="forward_kl", tail=True)[0] * batch.loss_mask[trained].double()
    means = {"a": float(each[[0, 1, 4, 5]].sum()) / 5, "b": float(each[[2, 3]].sum()) / 1.5}
    found = {name: float(value) / 6.5 for name, value in metrics.items() if name.startswith(distill.PER_TEACHER_METRIC)}
    assert found == pytest.approx({distill.PER_TEACHER_METRIC + name: mean for name, mean in means.items()}, rel=1e-9)


def test_the_policys_loss_and_the_divergence_are_added_with_the_coefficient():
    """Of mrl ppo, with rewards beside a teacher: each sampled token has both."""
    teacher_NK, ids = logits(1).log_softmax(1).topk(3)
    batch = batch_of(teacher_NK)
    trained = batch.loss_mask != 0
    log_probs = torch.full((batch.num_tokens, 4), torch.nan)
    log_probs[trained] = torch.cat([logits(4)[:, :1].abs().neg(), logits(2).log_softmax(1).gather(1, ids)], 1).float()
    advantages = torch.linspace(-1, 2, batch.num_tokens)
    fields = {**batch.token_fields, "advantages": advantages, "old_log_probs": log_probs[:, 0].nan_to_num()}
    batch = Batch(**{**vars(batch), "token_fields": fields})
    loss_fn = ActorLoss(kl_coef=0.25, distill=TeacherDivergence(kind="jsd", beta=BETA))
    total, ctx = loss_fn(batch, {"log_probs": log_probs}, {"metrics": {}})
    mask = batch.loss_mask[trained].double()
    value, _, tail = divergence(log_probs[trained, 1:], teacher_NK.float(), kind="jsd", beta=BETA, tail=True)
    by_policy = -(advantages[trained].double() * mask).sum()  # ratios of 1
    assert float(total) == pytest.approx(float(by_policy + 0.25 * (value * mask).sum()), rel=1e-6)
    found = {name: float(ctx["metrics"][f"actor/{name}"]) for name in ("divergence", "teacher_tail")}
    assert found == pytest.approx(
        {"divergence": float((value * mask).sum()), "teacher_tail": float((tail * mask).sum())}, rel=1e-6
    )
