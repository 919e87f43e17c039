"""The losses that engines get: every combination of parts is the mean that its parts' papers say, however it is split.

What is divided, by what: here as in an engine, the sums of all micro-batches over `batch.denominators[loss.denominator]`.

Traps 18 (a model in train mode) and 19 (a temperature forgotten) cannot occur in these functions: they see neither a model
nor logits, and only compare log-probs with each other. Trap 20 (logits written to) is here: nothing that comes in is.

The aggregates of PPO, GRPO and Dr. GRPO, written as means over lists, against weights and a denominator.

Traps 5 (a mean of means) and 7 (length instead of mask).

The critic's loss against its equation, explained variance against its definition.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mrl.algorithms.kl import KL_ESTIMATORS
from mrl.algorithms.losses import DENOMINATORS, ActorLoss, CriticLoss, explained_variance, token_weights, value_loss
from mrl.algorithms.policy import OBJECTIVES, RATIOS, Clip, Correction
from mrl.batch import Batch, make_batch
from tests.algorithms.sequences import Ragged, close, examples, flat, in_micro_batches, ragged
from tests.algorithms.test_kl import oracle as kl_oracle
from tests.algorithms.test_policy import CLIPS, CORRECTIONS, cispo_oracle, clip_oracle, ratio_oracle, weight_oracle

LONGEST = 11


def aggregate(name, losses, masks):
    """The aggregate of a whole mini-batch."""
    trained = [[x for x, m in zip(*rows, strict=True) if m] for rows in zip(losses, masks, strict=True)]
    trained = [row for row in trained if row]
    if name == "token_mean":
        return sum(map(sum, trained)) / sum(map(len, trained))
    if name == "sequence_mean":
        return sum(sum(row) / len(row) for row in trained) / len(trained)
    return sum(sum(row) / LONGEST for row in trained) / len(trained)


@pytest.mark.parametrize("name", DENOMINATORS)
@examples
@given(case=ragged())
def test_traps_5_and_7_sum_over_any_split_is_the_aggregate(name, case):
    losses = case.rows(-1, 1)
    batch = case.batch(loss=losses)
    total = 0.0
    for part in case.split():
        micro = batch.select(part)
        weights_T = token_weights(name, micro.loss_mask.double(), micro.lengths, fixed_length=LONGEST)
        assert not weights_T[micro.loss_mask == 0].any()
        total += float((micro.token_fields["loss"] * weights_T).sum()) / micro.denominators[DENOMINATORS[name]]
    assert total == pytest.approx(aggregate(name, losses, case.masks), rel=1e-9, abs=1e-9)


NUMBERS = st.floats(-2, 2)


def value_oracle(v, old, r, clip):
    """(loss, d loss / d v, clipped): 1/2 max((V - R)^2, (V_old + clip(V - V_old) - R)^2)."""
    plain = (v - r) ** 2
    if not clip:
        return plain / 2, v - r, False
    near = old + min(max(v - old, -clip), clip)
    if (near - r) ** 2 > plain:
        return (near - r) ** 2 / 2, (near - r) if abs(v - old) < clip else 0.0, True
    return plain / 2, v - r, False


@examples
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=8), st.sampled_from([0.0, 0.2, 0.5]))
def test_value_loss(tokens, clip):
    values, old, returns = zip(*tokens, strict=True)
    for v, o, r in tokens:  # no finite slope at a kink, no certain winner at a tie
        near = o + min(max(v - o, -clip), clip)
        assume(abs(abs(v - o) - clip) > 1e-6 and (near == v or abs((near - r) ** 2 - (v - r) ** 2) > 1e-9))
    values_T = flat([values]).requires_grad_()
    got = value_loss(values_T, flat([old]), flat([returns]), clip=clip)
    got.loss_T.sum().backward()
    expected = [value_oracle(*token, clip) for token in tokens]
    assert close(got.loss_T, [loss for loss, _, _ in expected])
    assert close(values_T.grad, [slope for _, slope, _ in expected])
    assert got.clipped_T.tolist() == [clipped for _, _, clipped in expected]


def test_the_first_update_is_not_clipped():
    values_T = torch.tensor([0.3, -1.0], dtype=torch.float64, requires_grad=True)
    got = value_loss(values_T, values_T.detach(), torch.tensor([1.0, 1.0], dtype=torch.float64), clip=0.2)
    got.loss_T.sum().backward()
    assert close(values_T.grad, [-0.7, -2.0]) and not got.clipped_T.any()


def mean(xs):
    xs = list(xs)
    return sum(xs) / len(xs)


@examples
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=10))
def test_explained_variance(pairs):
    returns, errors = [r for r, _ in pairs], [r - v for r, v in pairs]
    variance = mean((r - mean(returns)) ** 2 for r in returns)
    assume(variance > 1e-6)
    expected = 1 - mean((e - mean(errors)) ** 2 for e in errors) / variance
    got = explained_variance(
        returns=mean(returns),
        returns_squared=mean(r * r for r in returns),
        error=mean(errors),
        error_squared=mean(e * e for e in errors),
    )
    assert got == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3])
def test_equal_returns_leave_nothing_to_explain(value):
    xs = [value] * 7
    got = explained_variance(returns=mean(xs), returns_squared=mean(x * x for x in xs), error=0.5, error_squared=0.9)
    assert got == 0.0


ROWS = ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "entropy")

actor_losses = st.builds(
    ActorLoss,
    objective=st.sampled_from(["clip", "cispo", "policy_gradient"]),
    ratio=st.sampled_from(["token", "sequence", "sequence_token"]),
    clip=CLIPS,
    aggregation=st.sampled_from(["token_mean", "sequence_mean", "fixed_length"]),
    fixed_length=st.just(LONGEST),
    kl_coef=st.sampled_from([0.0, 0.3]),
    kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
    kl_cap=st.sampled_from([0.0, 0.3]),
    entropy_coef=st.sampled_from([0.0, 0.1]),
    correction=st.sampled_from([None, *CORRECTIONS]),
)
critic_losses = st.builds(
    CriticLoss,
    aggregation=st.sampled_from(["token_mean", "sequence_mean", "fixed_length"]),
    fixed_length=st.just(LONGEST),
    value_clip=st.sampled_from([0.0, 0.2]),
)


def actor_rows(case: Ragged) -> dict:
    """Every field; outside the mask there is junk, as in what a model gives for a prompt."""
    rows = {name: case.rows(-2, 0) for name in ROWS}
    rows["advantages"] = case.rows(-1, 1)
    return rows


def run(loss, case: Ragged, rows: dict, predicted: str, parts=None):
    """(mean loss, its gradient [T], metrics) from micro-batches as an engine makes them; one of all by default."""
    leaves = {name: flat(rows[name]).requires_grad_() for name in (predicted, "entropy") if name in rows}
    total, metrics = in_micro_batches(loss, case.batch(**rows), leaves, loss.denominator, parts, kept=1)
    total.backward()
    return float(total.detach()), leaves[predicted].grad, metrics


def tokens_of(loss: ActorLoss, case: Ragged, rows: dict):
    """Per sequence, per token: a dict of the quantities of the loss, straight from the oracles of the parts."""
    result = []
    for i, mask in enumerate(case.masks):
        row = {name: rows[name][i] for name in ROWS}
        ratios = ratio_oracle(loss.ratio, row["log_probs"], row["old_log_probs"], mask)
        weights = [1.0] * len(mask)
        if loss.correction:
            weights = weight_oracle(row["old_log_probs"], row["rollout_log_probs"], mask, loss.correction)
        tokens = []
        for t, r in enumerate(ratios):
            x, a, old, ref = (row[k][t] for k in ("log_probs", "advantages", "old_log_probs", "ref_log_probs"))
            policy = {
                "clip": lambda r=r, a=a: clip_oracle(r, a, loss.clip)[0],
                "cispo": lambda r=r, a=a, x=x: cispo_oracle(r, a, loss.clip, x)[0],
                "policy_gradient": lambda a=a, x=x: -a * x,
            }[loss.objective]()
            clipped = {
                "clip": clip_oracle(r, a, loss.clip)[1] == 0.0,
                "cispo": not 1 - loss.clip.low <= r <= 1 + loss.clip.high,
                "policy_gradient": False,
            }[loss.objective]
            kl = kl_oracle(loss.kl_estimator, x, ref)
            tokens.append(
                {
                    "loss": weights[t] * policy
                    + loss.kl_coef * (min(kl, loss.kl_cap) if loss.kl_cap else kl)
                    - loss.entropy_coef * row["entropy"][t],
                    "actor/ratio": r,
                    "actor/kl": kl_oracle("k3", x, ref),
                    "actor/approx_kl": math.exp(x - old) - 1 - (x - old),
                    "actor/entropy": row["entropy"][t],
                    "actor/importance_weight": weights[t],
                    "actor/importance_limited": weights[t] in (0.0, loss.correction and loss.correction.cap),
                    "actor/importance_squared": weights[t] ** 2,
                    "actor/clip_fraction": clipped,
                    "actor/clip_fraction_low": clipped and r < 1,
                    "actor/clip_fraction_high": clipped and r > 1,
                }
            )
        result.append(tokens)
    return result


def column(tokens, name):
    return [[token[name] for token in row] for row in tokens]


@examples
@given(ragged(), actor_losses)
def test_traps_5_and_6_actor_loss_and_metrics_however_split(case, loss):
    rows = actor_rows(case)
    whole, split = run(loss, case, rows, "log_probs"), run(loss, case, rows, "log_probs", case.split())
    tokens = tokens_of(loss, case, rows)
    expected = aggregate(loss.aggregation, column(tokens, "loss"), case.masks)
    for total, gradient, metrics in (whole, split):
        assert total == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert torch.allclose(gradient, whole[1], rtol=1e-12, atol=1e-12)
        for name in set(tokens[0][0]) & set(metrics):
            mean = aggregate("token_mean", column(tokens, name), case.masks)
            assert metrics[name] == pytest.approx(mean, rel=1e-9, abs=1e-9), name
        assert metrics.keys() == whole[2].keys()
    of_correction = {f"actor/importance_{name}" for name in ("weight", "limited", "squared")}
    assert whole[2].keys() == tokens[0][0].keys() - {"loss"} - (set() if loss.correction else of_correction)


@examples
@given(ragged(), actor_losses)
def test_actor_gradient_is_the_slope_of_the_oracle(case, loss):
    """Central differences of the hand-written loss, where no gradient is stopped and no kink is near."""
    assume(loss.objective != "cispo" and loss.ratio != "sequence_token")
    rows = actor_rows(case)
    ratios = column(tokens_of(loss, case, rows), "actor/ratio")
    assume(all(abs(r - kink) > 1e-3 for row in ratios for r in row for kink in kinks(loss.clip)))
    log_ratios_T = flat(rows["log_probs"]) - flat(rows["ref_log_probs"])
    kls = [kl_oracle(loss.kl_estimator, d, 0.0) for d in log_ratios_T.tolist()]
    assume(not loss.kl_cap or all(abs(kl - loss.kl_cap) > 1e-3 for kl in kls))
    gradient, step, at = run(loss, case, rows, "log_probs")[1], 1e-5, 0

    def value(i, t, shift):
        moved = [list(row) for row in rows["log_probs"]]
        moved[i][t] += shift
        tokens = tokens_of(loss, case, rows | {"log_probs": moved})
        return aggregate(loss.aggregation, column(tokens, "loss"), case.masks)

    for i, mask in enumerate(case.masks):
        for t in range(len(mask)):
            slope = (value(i, t, step) - value(i, t, -step)) / (2 * step)
            assert float(gradient[at]) == pytest.approx(slope, rel=1e-6, abs=1e-8)
            at += 1


def kinks(clip: Clip):
    return (1 - clip.low, 1 + clip.high, clip.dual)


@examples
@given(ragged(), actor_losses)
def test_fp32_as_engines_give_it(case, loss):
    """The same to fp32's precision, and nothing widens the loss; metrics are fp64 sums."""
    batch = case.batch(**actor_rows(case))
    narrow = dataclasses.replace(batch, token_fields={k: v.float() for k, v in batch.token_fields.items()})
    wide = dataclasses.replace(batch, token_fields={k: v.double() for k, v in narrow.token_fields.items()})
    ratios_T = wide.token_fields["log_probs"] - wide.token_fields["old_log_probs"]
    results = []
    for data in (wide, narrow):
        predictions = {name: data.token_fields[name] for name in ("log_probs", "entropy")}
        results.append(loss(data, predictions, {}))
    assert results[1][0].dtype == torch.float32 and results[1][1]["metrics"]["actor/ratio"].dtype == torch.float64
    assume(loss.correction is None or loss.correction.mode == "truncate")  # a mask is all or nothing
    size = float(ratios_T.abs().exp().sum()) + 10
    assert float(results[1][0]) == pytest.approx(float(results[0][0]), rel=1e-5, abs=1e-6 * size)


@examples
@given(ragged(), critic_losses)
def test_trap_5_the_critic_is_divided_as_the_actor_is(case, loss):
    rows = {name: case.rows(-1, 1) for name in ("values", "old_values", "returns")}
    whole, split = run(loss, case, rows, "values"), run(loss, case, rows, "values", case.split())
    of_row = [list(zip(*(rows[name][i] for name in rows), strict=True)) for i in range(len(case.masks))]
    of_value = [[value_oracle(v, old, r, loss.value_clip) for v, old, r in row] for row in of_row]
    losses, clipped = ([[token[i] for token in row] for row in of_value] for i in (0, 2))
    mean = lambda f: aggregate("token_mean", [[f(*x) for x in row] for row in of_row], case.masks)  # noqa: E731
    for total, gradient, metrics in (whole, split):
        assert total == pytest.approx(aggregate(loss.aggregation, losses, case.masks), abs=1e-9)
        assert torch.allclose(gradient, whole[1], rtol=1e-12, atol=1e-12)
        of_clip = aggregate("token_mean", clipped, case.masks)
        assert metrics["critic/clip_fraction"] == pytest.approx(of_clip, abs=1e-9)
        assert metrics["critic/value"] == pytest.approx(mean(lambda v, old, r: v), abs=1e-9)
        assert metrics["critic/returns"] == pytest.approx(mean(lambda v, old, r: r), abs=1e-9)
        assert metrics["critic/returns_squared"] == pytest.approx(mean(lambda v, old, r: r * r), abs=1e-9)
        assert metrics["critic/error"] == pytest.approx(mean(lambda v, old, r: r - v), abs=1e-9)
        assert metrics["critic/error_squared"] == pytest.approx(mean(lambda v, old, r: (r - v) ** 2), abs=1e-9)


@examples
@given(ragged(), actor_losses, st.sampled_from([math.nan, math.inf, -math.inf]))
def test_nothing_outside_the_mask_counts_whatever_it_is(case, loss, junk):
    rows = actor_rows(case)
    spoiled = {
        name: [[x if m else junk for x, m in zip(*pair, strict=True)] for pair in zip(row, case.masks, strict=True)]
        for name, row in rows.items()
    }
    clean, dirty = run(loss, case, rows, "log_probs"), run(loss, case, spoiled, "log_probs")
    assert clean[0] == dirty[0] and clean[2] == dirty[2] and torch.equal(clean[1], dirty[1])
    assert not clean[1][case.mask_T == 0].any()


def one_sequence(**fields) -> Batch:
    """A prompt of three tokens and a response of two: labels 1, 2 are the prompt's, 3 is the response's first token."""
    batch = make_batch([[10, 11, 12, 20, 21]], [[0, 0, 0, 1, 1]])
    given_T = {name: torch.tensor(values, dtype=torch.float64) for name, values in fields.items()}
    return dataclasses.replace(batch, token_fields=given_T)


@pytest.mark.parametrize("estimator, slope", [("k1", 1.0), ("k2", -1.0), ("k3", 1 - math.e)])
def test_trap_22_the_kl_has_a_gradient_and_is_reported_raw(estimator, slope):
    """Without advantages all that moves is the KL: d/d log p of k1 is 1, of k2 log p - log q, of k3 1 - q / p."""
    batch = one_sequence(advantages=[0.0] * 4, old_log_probs=[-3.0] * 4, ref_log_probs=[-2.0] * 4)
    log_probs_T = torch.full((4,), -3.0, dtype=torch.float64, requires_grad=True)
    loss = ActorLoss(kl_coef=0.5, kl_estimator=estimator)
    loss_sum, ctx = loss(batch, {"log_probs": log_probs_T}, {})
    loss_sum.backward()
    assert close(log_probs_T.grad, [0, 0, 0.5 * slope, 0.5 * slope])
    assert float(ctx["metrics"]["actor/kl"]) == pytest.approx(2 * (math.e - 2))  # a sum over two tokens, without 0.5
    equal = dataclasses.replace(batch, token_fields=batch.token_fields | {"ref_log_probs": log_probs_T.detach()})
    assert float(loss(equal, {"log_probs": log_probs_T}, {})[1]["metrics"]["actor/kl"]) == 0.0


@examples
@given(ragged(), actor_losses)
def test_trap_20_nothing_that_comes_in_is_written_to(case, loss):
    batch = case.batch(**actor_rows(case))
    ctx = {"metrics": {"before": 1.0}}
    predictions = {name: batch.token_fields[name] for name in ("log_probs", "entropy")}
    versions = {name: field._version for name, field in batch.token_fields.items()}
    result = loss(batch, predictions, ctx)[1]
    assert {name: field._version for name, field in batch.token_fields.items()} == versions
    assert ctx == {"metrics": {"before": 1.0}} and result["metrics"]["before"] == 1.0


def test_a_mini_batch_where_nothing_trains_is_zero():
    batch = dataclasses.replace(
        make_batch([[1, 2, 3]], [[0, 0, 0]]),
        token_fields={name: torch.zeros(2) for name in ("advantages", "old_log_probs")},
    )
    for aggregation in ("token_mean", "sequence_mean"):
        loss_sum, ctx = ActorLoss(aggregation=aggregation)(batch, {"log_probs": torch.zeros(2)}, {})
        assert float(loss_sum) == 0.0 and not any(map(float, ctx["metrics"].values()))


@pytest.mark.parametrize(
    "loss, predictions, message",
    [
        (ActorLoss(kl_coef=0.1), {}, "not 'ref_log_probs'"),
        (ActorLoss(correction=Correction("mask")), {}, "not 'rollout_log_probs'"),
        (ActorLoss(entropy_coef=0.1), {}, "needs ctx"),
        (ActorLoss(entropy_coef=0.1), {"entropy": torch.ones(4)}, "the entropy has no gradient"),
        (ActorLoss(), {"log_probs": torch.zeros(5)}, r"\(5,\), mask \(4,\)"),
        (ActorLoss(aggregation="fixed_length"), {}, "fixed_length is None"),
    ],
)
def test_what_would_be_missing_in_silence_is_refused(loss, predictions, message):
    batch = one_sequence(advantages=[1.0] * 4, old_log_probs=[-1.0] * 4)
    with pytest.raises(AssertionError, match=message):
        loss(batch, {"log_probs": torch.zeros(4, requires_grad=True)} | predictions, {})


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("far", [-3e4, -100.0, 100.0, 3e4])
def test_a_far_token_makes_neither_loss_nor_gradient_nor_metric_nan_or_infinite(far, advantage):
    """In fp32 exp(89) is infinite, and what is clipped of it has the gradient 0 * inf. far: log-ratio to all others."""
    others = ("old_log_probs", "ref_log_probs", "rollout_log_probs")
    batch = one_sequence(advantages=[advantage] * 4, **{name: [-4e4 - far] * 4 for name in others})
    narrow = dataclasses.replace(batch, token_fields={k: v.float() for k, v in batch.token_fields.items()})
    corrections = (None, Correction("truncate", "sequence"), Correction("mask"))
    for objective, ratio, estimator, correction in itertools.product(OBJECTIVES, RATIOS, KL_ESTIMATORS, corrections):
        parts = {"objective": objective, "ratio": ratio, "kl_estimator": estimator, "correction": correction}
        log_probs_T = torch.full((4,), -4e4, requires_grad=True)
        loss_sum, ctx = ActorLoss(kl_coef=0.1, **parts)(narrow, {"log_probs": log_probs_T}, {})
        loss_sum.backward()
        found = [float(loss_sum.detach()), *log_probs_T.grad.tolist(), *map(float, ctx["metrics"].values())]
        assert all(map(math.isfinite, found)), (parts, found)
