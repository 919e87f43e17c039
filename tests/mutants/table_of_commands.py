"""The mutants of `mrl check`, `mrl doctor`, `mrl report`, `mrl generate` and `mrl eval`: a wrong verdict, a wrong number, or
silence."""

from __future__ import annotations

from tests.mutants.mutant import of as _of

CHECK = (
    *_of(
        "check/compare.py",
        "check/test_compare.py",
        ("difference / max(expected.double().norm().item(), 1e-300)", "difference / max(actual.double().norm().item(), 1e-300)"),
        ("        return math.inf\n    return 0.0 if difference", "        return 0.0\n    return 0.0 if difference"),
        ("over = [off for off in found if", "over = [off for off in found[:TOP] if"),
        ("common_factor(over), sorted(waiting), sorted(unexpected)", "common_factor(over), [], sorted(unexpected)"),
        ("update, gap = update * sure, gap * sure", "gap = gap * sure"),
        ("gradient.abs() > MARGIN * rounding * rms", "gradient.abs() > rounding * rms"),
    ),
    *_of(
        "check/verdict.py",
        "check/test_compare.py",
        ("    if error <= bound:\n", "    if error <= 10 * bound:\n"),
        ("if not (errors.over or errors.missing or errors.unexpected):", "if not errors.over:"),
        ("if decided is None or decided > bound:", "if decided is None:"),
        ('if not quantities or "initial weights" in quantities:', "if not quantities:"),
    ),
    *_of(
        "check/bounds.py",
        "check/test_compare.py",
        ("times = max(1.0, UNSURE", "times = max(0.0, UNSURE"),
        ("certain=times * self.gradients > self.most,", "certain=False,"),
    ),
    *_of(
        "check/rows.py",
        "check/test_rows.py",
        ("if (was := batch.denominators.get(name)) != count:", "if (was := batch.denominators.get(name)) is None:"),
        ("masks = [[float(trains) for trains in example.mask[1:]]", "masks = [[float(trains) for trains in example.mask[:-1]]"),
        ("if trains and i > 0), 0)", "if i > 0), 0)"),
    ),
    *_of(
        "check/routers.py",
        ("check/test_routers.py::test_what_is_narrow_is_the_last_choice",
         "check/test_routers.py::test_a_narrow_choice_is_seen_from_there_on[qwen3_moe]"),
        ("found.append(choices.narrow.cummax(0).values)", "found.append(choices.narrow)"),
        ("ordered_TE[:, count - 1], ordered_TE[:, count]", "ordered_TE[:, 0], ordered_TE[:, 1]"),
    ),
)  # fmt: skip

DOCTOR = (
    *_of(
        "doctor/gpus.py",
        "doctor/test_gpus.py",
        ("    if seen == here:\n", "    if seen:\n"),
        ('tuple(gpu["capability"]) < (8, 0)', 'tuple(gpu["capability"]) <= (8, 0)'),
        (r'r"\bNV\d+\b"', r'r"\bN\w+\b"'),
    ),
    *_of(
        "doctor/packages.py",
        "doctor/test_packages.py::test_other_versions_than_the_known",
        ("\\d+\", one)[:2] == re.findall(r\"\\d+\", other)[:2]", "\\d+\", one)[:1] == re.findall(r\"\\d+\", other)[:1]"),
    ),
    *_of(
        "doctor/gpu_packages.py",
        "doctor/test_gpu_packages.py",
        ("result is None and is_te and gpu", "result is None and is_te"),
    ),
    *_of(
        "doctor/limits.py",
        "doctor/test_machine.py::test_ulimits",
        ("    if 0 <= files < FEW_FILES:", "    if files < FEW_FILES:"),
    ),
    *_of(
        "doctor/network.py",
        "doctor/test_machine.py::test_names_of_interfaces_are_nccl_s",
        ("name not in fits] if excluded else fits", "name not in fits] if exact else fits"),
    ),
)  # fmt: skip

REPORT = (
    *_of(
        "report/curves.py",
        "report/test_curves.py",
        ("numpy.where(inside, part, numpy.inf).argmin()", "numpy.where(inside, part, -numpy.inf).argmin()"),
        ("kept = weight**number", "kept = weight"),
        ("smoothed[i] = total / weights", "smoothed[i] = total"),
        ("return sums / counts, counts", "return sums / numpy.diff(bounds), counts"),
    ),
    *_of(
        "report/metrics_file.py",
        "report/test_metrics_file.py",
        ("numpy.append(numpy.diff(steps[order]) > 0, True)", "numpy.append(True, numpy.diff(steps[order]) > 0)"),
        ("return numpy.cumsum(seconds)", "return seconds"),
        (" or file.read(len(self._tail)) != self._tail", ""),
        ("for name in (STEP_S, EVAL_S))", "for name in (STEP_S,))"),
        ("self._broken.append(self._lines + 1)", "pass"),
    ),
    *_of(
        "report/summary.py",
        "report/test_command.py::test_the_table_of_a_run",
        ('values.argmin() if goal == "low" else', 'values.argmin() if goal == "high" else'),
        ("run.table.steps[curve.rows[curve.finite]]", "run.table.steps[curve.finite.nonzero()[0]]"),
    ),
    *_of(
        "report/differences.py",
        ("report/test_page.py::test_differences_of_runs", "report/test_command.py::test_differences_as_json_are_json"),
        ("if any(repr(value) != repr(values[0])", "if any(value != values[0]"),
    ),
    *_of(
        "report/runs.py",
        "report/test_runs.py",
        ('"finished" if last_step >= total_steps else', '"finished" if last_step > total_steps else'),
        ("numpy.flatnonzero(numpy.diff(curve.values) < 0) + 1", "numpy.flatnonzero(numpy.diff(curve.values) < 0)"),
    ),
    *_of(
        "report/samples.py",
        "report/test_samples.py",
        ('row["advantages"][start:stop]', 'row["advantages"][: stop - start]'),
    ),
)  # fmt: skip

TABLES = tuple(
    f"inference/test_eval.py::test_{name}"
    for name in (
        "rows_are_paired_by_what_is_in_them",
        "a_comparison_is_printed_as_the_docs_have_it",
        "rewards_that_are_no_shares_are_no_percent",
        "what_two_results_do_not_share_is_said",
        "a_reward_of_ones_own_is_known_by_its_file_and_those_beside_it",
    )
)
GENERATE_AND_EVAL = (
    *_of(
        "inference/statistics.py",
        "inference/test_statistics.py",
        ("squared_error * (z / t) ** 2)", "squared_error * (z / t))"),
        ("math.comb(i, k - 1) / ways", "math.comb(i, k - 1) * k / count"),
        ("return min(1.0, 2 * ways / 2**count)", "return min(1.0, ways / 2**count)"),
        ("return sum(total >= seen for", "return sum(total > seen for"),
        ("return (1 + as_far) / (1 + RANDOM_SIGNS)", "return as_far / RANDOM_SIGNS"),
        ("half = t_quantile(0.5 + LEVEL / 2, count - 1)", "half = NormalDist().inv_cdf(0.5 + LEVEL / 2)"),
        ("max(0.0, abs(seen - count * difference) - 1) ** 2", "abs(seen - count * difference) ** 2"),
    ),
    *_of(
        "inference/results.py",
        TABLES,
        ("for sign in (1, -1))", "for sign in (-1, 1))"),
        ('on_pairs = [{**of, "measures": own} for of, own in zip(results, comparison["of_pairs"], strict=True)]', "pass"),
        ("counts['skipped'] + counts['dropped']", "counts['skipped']"),
        ("exact = greedy and statistics.is_binary(", "exact = statistics.is_binary("),
        ("digest.update(f", "str(f"),
        ('values["file of the reward"] = [of.get("reward_file") for of in (first, second)]', "pass"),
    ),
    *_of(
        "inference/streaming.py",
        "inference/test_streaming.py",
        ("if not text.endswith(UNFINISHED):", "if text:"),
    ),
    *_of(
        "inference/score.py",
        "inference/test_generate.py::test_scores_are_those_of_transformers[megatron]",
        ("if example.mask[i + 1]]", "if example.mask[i]]"),
    ),
    *_of(
        "inference/generate.py",
        ("inference/test_generate.py::test_text_on_the_terminal", "inference/test_generate.py::test_what_a_row_of_results_has"),
        ('{"tokens": "length", "turns": "turns"}', '{"tokens": "stop", "turns": "turns"}'),
        ('"log_probs": trajectory.log_probs[start:]', '"log_probs": trajectory.log_probs[:-start]'),
    ),
    *_of(
        "launch/inference.py",
        "inference/test_generate.py::test_is_refused_before_ranks_start",
        ("check_unread(raw, SAMPLING if greedy else SAMPLING[1:],", "check_unread(raw, SAMPLING[1:],"),
        ("return min(bounds, key=lambda bound: bound[0])", "return bounds[0]"),
    ),
)  # fmt: skip

OF_COMMANDS = (*CHECK, *DOCTOR, *REPORT, *GENERATE_AND_EVAL)
