"""The mutants of `mrl check`, `mrl generate` and `mrl eval`: a wrong verdict, a wrong number, or silence."""

from __future__ import annotations

from tests.mutants.mutant import of as _of

CHECK = (
    *_of(
        "check/compare.py",
        "check/test_compare.py",
        ("difference / max(expected.double().norm().item(), 1e-300)", "difference / max(actual.double().norm().item(), 1e-300)"),
        ("        return math.inf\n    return 0.0 if difference", "        return 0.0\n    return 0.0 if difference"),
    ),
    *_of(
        "check/compare.py",
        "check/test_compare.py",
        ("    if error <= bound:\n", "    if error <= 10 * bound:\n"),
        ("if not (errors.over or errors.missing or errors.unexpected):", "if not errors.over:"),
    ),
    *_of(
        "check/compare.py",
        "check/test_compare.py",
        ("times = max(1.0, UNSURE", "times = max(0.0, UNSURE"),
        ("certain=times * self.gradients > self.most,", "certain=False,"),
    ),
    *_of(
        "check/rows.py",
        "check/test_rows.py",
        ("if (was := batch.denominators.get(name)) != count:", "if (was := batch.denominators.get(name)) is None:"),
        ("masks = [[float(trains) for trains in example.mask[1:]]", "masks = [[float(trains) for trains in example.mask[:-1]]"),
    ),
    *_of(
        "check/reference.py",
        ("check/test_measure.py::test_what_is_narrow_is_the_last_choice",
         "check/test_measure.py::test_a_narrow_choice_is_seen_from_there_on[qwen3_moe]"),
        ("found.append(choices.narrow.cummax(0).values)", "found.append(choices.narrow)"),
        ("ordered_TE[:, count - 1], ordered_TE[:, count]", "ordered_TE[:, 0], ordered_TE[:, 1]"),
    ),
)  # fmt: skip

TABLES = tuple(
    f"inference/test_eval.py::test_{name}"
    for name in (
        "rows_are_paired_by_what_is_in_them",
        "a_comparison_is_printed_as_the_docs_have_it",
        "rewards_that_are_no_shares_are_no_percent",
        "what_two_results_do_not_share_is_said",
    )
)
GENERATE_AND_EVAL = (
    *_of(
        "inference/statistics.py",
        "inference/test_statistics.py",
        ("squared_error * (z / t) ** 2)", "squared_error * (z / t))"),
        ("math.comb(i, k - 1) / ways", "math.comb(i, k - 1) * k / count"),
    ),
    *_of(
        "inference/results.py",
        TABLES,
        ("for sign in (1, -1))", "for sign in (-1, 1))"),
        ('on_pairs = [{**of, "measures": own} for of, own in zip(results, comparison["of_pairs"], strict=True)]', "pass"),
    ),
    *_of(
        "inference/streaming.py",
        "inference/test_chat.py::test_what_is_written_is_the_whole_text",
        ("if not text.endswith(UNFINISHED):", "if text:"),
    ),
    *_of(
        "inference/generate.py",
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

OF_COMMANDS = (*CHECK, *GENERATE_AND_EVAL)
