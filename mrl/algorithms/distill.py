"""Distillation: how far the student's next-token distribution is from the teacher's, as engines take losses (sums).

Dimensions: `T` tokens of a micro-batch end to end, `N` of them that train, `K` token ids for the comparison.

With the teacher's probabilities `p`, the student's `q`, and `m = beta p + (1 - beta) q`:

    forward_kl    sum p log(p / q)                                  Hinton et al., 2015 (arXiv 1503.02531)
    reverse_kl    sum q log(q / p)                                  Gu et al., 2023, MiniLLM (arXiv 2306.08543), eq. 1
    jsd           beta sum p log(p / m) + (1 - beta) sum q log(q / m)
                                                                    Agarwal et al., 2023, GKD (arXiv 2306.13649), eq. 1

The sums are over buckets. Each of the teacher's `K` likeliest ids is one. If they are not the whole vocabulary, one
more bucket holds all others, with the probability `1 - sum` of the `K`. A divergence of buckets is at most the whole
distributions' one. It is 0 only if both agree on all buckets (data processing inequality).

A bucket's share of a KL is taken as `p log(p / q) - p + q`. The terms `- p + q` add up to 0 over all buckets, and make
each share at least 0. The derivative by `log q` is exactly 0 at `p = q`, so a student that equals its teacher does not
move, to the bit. Values and derivatives are computed in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms.ragged import to_tokens
from mrl.batch import Batch

Ctx = dict[str, Any]

TEACHER = "teacher_log_probs"
"""Token field [T, K] fp32: the teacher's log-probs of `labels[:, 1:]`, -inf for no id. labels[:, 0] is the label."""

TEACHER_IDS = "teacher_ids"
"""Token field [T, K] int32, of rollouts: the ids that the teacher's log-probs are of, 0 where there is none. A rollout
without has those of all ids, in their order."""

TEACHER_OF = "teacher"
"""Sequence field [S] int64: the number of each sequence's teacher; a batch that has none is of the first alone."""

MIN_TAIL = 2.0**-23
"""The probability that the last bucket has at least: in fp32 log-probs a smaller one is their rounding."""

METRIC_DENOMINATORS: Mapping[str, str] = {
    "distill/divergence": "tokens",
    "distill/nll": "tokens",
    "distill/teacher_tail": "tokens",
}
"""Metric -> the denominator whose mean it is."""

PER_TEACHER_METRIC = "distill/divergence/"
"""Begins the metric of one of several teachers, which ends with its name."""


def teacher_numbers(batch: Batch) -> Tensor:
    """Returns [S] int64: the number of each sequence's teacher."""
    return batch.sequence_fields.get(TEACHER_OF, torch.zeros_like(batch.lengths))


def tokens_denominator(name: str) -> str:
    """Returns the name of the denominator that counts the trained tokens of one of several teachers."""
    return f"tokens/{name}"


def metric_denominators(names: Sequence[str]) -> Mapping[str, str]:
    """Returns `METRIC_DENOMINATORS` with the metrics of several teachers. names: theirs; () where there is one."""
    return {**METRIC_DENOMINATORS, **{PER_TEACHER_METRIC + name: tokens_denominator(name) for name in names}}


_CHUNK = 2**22  # log-probs that are worked on at once


def _forward_kl(lp: Tensor, lq: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    p, q = lp.exp(), lq.exp()
    return p * (lp - lq) - p + q, q - p


def _reverse_kl(lp: Tensor, lq: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    p, q = lp.exp(), lq.exp()
    return q * (lq - lp) - q + p, q * (lq - lp)


def _jsd(lp: Tensor, lq: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    most = 700.0  # exp of more is no float64
    m_to_p = torch.log1p((1 - beta) * torch.expm1((lq - lp).clamp(max=most)))  # log(m / p)
    m_to_q = torch.log1p(beta * torch.expm1((lp - lq).clamp(max=most)))
    of_q = -(1 - beta) * lq.exp() * m_to_q
    return of_q - beta * lp.exp() * m_to_p, of_q


Divergence = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]

DIVERGENCES: Mapping[str, Divergence] = {"forward_kl": _forward_kl, "reverse_kl": _reverse_kl, "jsd": _jsd}
"""`teacher.loss` -> (log p, log q, beta) of buckets -> each one's share, and the derivative of that by log q."""


def divergence(
    student_NK: Tensor, teacher_NK: Tensor, *, kind: str, beta: float = 0.5, tail: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ([N] the divergence, [N, K] its derivative by the student's log-probs, [N] the teacher's tail), float64.

    student_NK, teacher_NK: log-probs of the same ids. A teacher's -inf is no bucket, and the student's probability
    there is in the tail. tail: whether there is a bucket for the rest.
    """
    lp, lq = teacher_NK.detach().double(), student_NK.detach().double()
    here = lp > -torch.inf
    lp, lq = lp.where(here, torch.zeros_like(lp)), lq.where(here, torch.zeros_like(lq))
    shares, slopes = DIVERGENCES[kind](lp, lq, beta)
    value, slope = (shares * here).sum(1), slopes * here
    rest_p, rest_q = (1 - (log_probs.exp() * here).sum(1) for log_probs in (lp, lq))
    if not tail:
        return value, slope, torch.zeros_like(rest_p)
    tail_p, tail_q = (rest.clamp(min=MIN_TAIL) for rest in (rest_p, rest_q))
    share, of_tail = DIVERGENCES[kind](tail_p.log(), tail_q.log(), beta)
    # d log(1 - sum q) / d log q_k = -q_k / (1 - sum q); a tail at its least moves with nothing
    moves = (of_tail / tail_q).where(rest_q > MIN_TAIL, torch.zeros_like(of_tail))
    return value + share, slope - moves[:, None] * lq.exp() * here, rest_p.clamp(min=0)


class _Divergence(torch.autograd.Function):
    """Computes [N] divergences and [N] tails, chunk by chunk. It keeps one tensor of the log-probs' shape and dtype for
    the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, student_NK: Tensor, teacher_NK: Tensor, kind: str, beta: float, tail: bool
    ) -> tuple[Tensor, Tensor]:
        rows = max(1, _CHUNK // max(1, student_NK.shape[1]))
        slope_NK = torch.empty_like(student_NK)
        values, tails = [], []
        for start in range(0, len(student_NK), rows):
            part = slice(start, start + rows)
            value, slope_NK[part], tail_p = divergence(
                student_NK[part], teacher_NK[part], kind=kind, beta=beta, tail=tail
            )
            values.append(value)
            tails.append(tail_p)
        ctx.save_for_backward(slope_NK)
        nothing = student_NK.new_zeros(0, dtype=torch.float64)
        tail_N = torch.cat([nothing, *tails])
        ctx.mark_non_differentiable(tail_N)
        return torch.cat([nothing, *values]), tail_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (slope_NK,) = ctx.saved_tensors
        return slope_NK * grad_N[:, None].to(slope_NK.dtype), None, None, None, None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherDivergence:
    """Measures the divergence of the student from the teacher at each token that trains, and the teacher's tail
    there."""

    kind: str  # of `DIVERGENCES`
    beta: float = 0.5  # of jsd
    tail: bool = True  # False: the ids are the whole vocabulary

    def __call__(self, data: Batch, student_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both [T] float64, 0 where nothing trains, the first with gradient. student_TK: log-probs of the ids
        of `data.token_fields[TEACHER]`."""
        teacher_TK = data.token_fields[TEACHER]
        assert student_TK.shape == teacher_TK.shape, f"{student_TK.shape}, teacher {teacher_TK.shape}"
        trained = data.loss_mask.nonzero()[:, 0]
        found = _Divergence.apply(student_TK[trained], teacher_TK[trained], self.kind, self.beta, self.tail)
        value_T, tail_T = (of_N.new_zeros(len(student_TK)).index_copy(0, trained, of_N) for of_N in found)
        return value_T, tail_T


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillLoss:
    """`sum_t mask_t ((1 - weight) nll_t + weight temperature^2 D_t)`: the SFT loss and the divergence from the teacher.

    predictions["log_probs"]: [T, 1 + K] of `data.labels`, the first column at temperature 1 and the others at
    `temperature`, which divides the logits of both models. The factor temperature^2 keeps the size of the gradient
    (Hinton et al., 2015, section 2). Metrics are those of `metric_denominators(names)`; the engine's one division by
    "tokens" makes them means. The divergence among them is without that factor.
    """

    kind: str  # of `DIVERGENCES`
    beta: float = 0.5  # of jsd
    temperature: float = 1.0
    weight: float = 1.0
    tail: bool = True  # False: the ids are the whole vocabulary
    names: tuple[str, ...] = ()  # of several teachers, by the numbers in `TEACHER_OF`

    def __call__(self, data: Batch, predictions: Mapping[str, Tensor], ctx: Ctx) -> tuple[Tensor, Ctx]:
        log_probs, teacher = predictions["log_probs"], data.token_fields[TEACHER]
        assert log_probs.shape == (len(teacher), 1 + teacher.shape[1]), f"{log_probs.shape}, teacher {teacher.shape}"
        trained = data.loss_mask.nonzero()[:, 0]
        mask_N = data.loss_mask[trained].double()
        nll = -(log_probs[trained, 0].double() * mask_N).sum()
        value_N, tail_N = _Divergence.apply(log_probs[trained, 1:], teacher[trained], self.kind, self.beta, self.tail)
        found_N = value_N * mask_N
        found = found_N.sum()
        total = self.weight * self.temperature**2 * found
        if self.weight < 1:
            total = total + (1 - self.weight) * nll
        sums = {"distill/divergence": found.detach(), "distill/nll": nll.detach()}
        if self.tail:
            sums["distill/teacher_tail"] = (tail_N * mask_N).sum()
        if self.names:
            of_T = to_tokens(teacher_numbers(data), data.lengths)
            sums |= self._of_each(data, found_N.detach(), of_T[trained])
        return total, {**ctx, "metrics": {**ctx.get("metrics", {}), **sums}}

    def _of_each(self, data: Batch, found_N: Tensor, of_N: Tensor) -> dict[str, Tensor]:
        """Returns the divergence by teacher, for each teacher with tokens in the global mini-batch.

        found_N: of each trained token. of_N: the number of its teacher. The engine divides by all trained tokens, and
        the mean is over the teacher's.
        """
        sums = {}
        for number, name in enumerate(self.names):
            if count := data.denominators[tokens_denominator(name)]:
                sums[PER_TEACHER_METRIC + name] = found_N[of_N == number].sum() * (data.denominators["tokens"] / count)
        return sums
