"""The mutants of metrics and of fields of rows: numbers that nothing trains on, and that a user decides by."""

from __future__ import annotations

from tests.mutants.mutant import of as _of

MEASURED = "trainers/rl/test_measured.py"
OF_METRICS = (
    *_of(
        "algorithms/losses.py",
        "algorithms/test_losses.py",
        ('"actor/clip_fraction_low": policy.clipped_T & (ratio_T < 1)', '"actor/clip_fraction_low": policy.clipped_T & (ratio_T > 1)'),
        ('"actor/importance_limited": weights.limited_T', '"actor/importance_limited": weights.weight_T == 0'),
    ),
    *_of(
        "algorithms/preference.py",
        "algorithms/test_preference.py::test_metrics_are_means_weighted_by_rows",
        ('"rewards/rejected": "rejected",', '"rewards/rejected": "chosen",'),
        ('"rewards/margin": "pairs",', '"rewards/margin": "chosen",'),
    ),
    *_of(
        "algorithms/distill.py",
        "algorithms/test_distill.py::test_each_teacher_has_the_mean_of_its_own_tokens",
        ('* (data.denominators["tokens"] / count)', ""),
    ),
    *_of(
        "trainers/rl/collect.py",
        MEASURED,
        ('"rollout/finished": len(finished) / len(lengths)', '"rollout/finished": len(finished) / groups'),
        ("(sum(lengths) + sum(beside)) / self.rollout_s", "sum(lengths) / self.rollout_s"),
    ),
    *_of("trainers/rl/updates.py", MEASURED, ('fields["old_log_probs"].double())[trained_T].abs()', 'fields["old_log_probs"].double())[trained_T]')),
    *_of("trainers/rl/roles.py", MEASURED, ('fields["ref_log_probs"].double(), "k1")\n    return', 'fields["ref_log_probs"].double(), "k3")\n    return')),
    *_of(
        "trainers/rl/evaluation.py",
        MEASURED,
        ("max(values[i : i + k])", "values[i]"),
        ("scoring.select(whole, range(start, end))", "whole"),
    ),
    *_of(
        "trainers/rows.py",
        "trainers/test_loops.py::test_an_evaluation_divides_the_sums_of_all_batches_once_by_what_each_mean_is_of",
        ("sums[name] += mean * made.denominators[means[name]]", 'sums[name] += mean * made.denominators["tokens"]'),
        ("all_sums[mean] += sums[mean]", "all_sums[mean] += sums[mean] / (counts[mean] or 1)"),
    ),
    *_of(
        "trainers/throughput.py",
        "trainers/test_throughput.py::test_speed_is_of_all_tokens_and_utilization_of_all_gpus",
        ("self.peak = peak * engine.world_size if", "self.peak = peak if"),
        ("labels = int((batch.loss_mask != 0).sum())", "labels = int(batch.loss_mask.sum())"),
    ),
    *_of(
        "inference/results.py",
        (
            "inference/test_eval.py::test_what_became_of_a_prompt_is_of_its_own_samples",
            "inference/test_eval.py::test_a_difference_is_of_the_first_less_the_second",
        ),
        ("1 - sum(finished) / len(finished)", "1 - sum(finished) / len(rows)"),
        ("statistics.is_bounded([*first_P, *second_P])", "statistics.is_bounded(first_P)"),
    ),
    *_of(
        "inference/statistics.py",
        "inference/test_statistics.py",
        ("seen = abs(math.fsum(differences_P)) * (1 - 1e-9)", "seen = math.fsum(differences_P) * (1 - 1e-9)"),
    ),
)  # fmt: skip
