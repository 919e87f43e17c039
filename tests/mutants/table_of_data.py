"""The mutants of rows, their weights and their mixture: another order, another share, another loss."""

from __future__ import annotations

from tests.mutants.mutant import of as _of

OF_DATA = (
    *_of(
        "data/mixture.py",
        "data/test_mixture.py",
        ("self.weights[i] * given - weight * reads[i].given, -i)", "self.weights[i] * given - reads[i].given, -i)"),
        ("self.weights[i] * given - weight * reads[i].given, -i)", "-reads[i].given / self.weights[i], i)"),
    ),
    *_of(
        "data/stream.py",
        "data/test_mixture.py",
        ("most = epochs * int(flags.sum()) +", "most = epochs * len(flags) +"),
        ("            reads = [dataclasses.replace(read, given=0) for read in reads]\n", ""),
        ("_check_same(key, saved[\"data\"], entry[\"data\"])", "pass"),
    ),
    *_of(
        "trainers/teacher.py",
        ("trainers/test_teachers.py", "trainers/test_distill.py::test_a_cache_is_known_by_all_that_its_log_probs_depend_on"),
        ("here = ids < one.vocab_size", "here = ids < 10**9"),
        ("log_probs[trained] = -torch.inf", "log_probs[trained] = 0"),
    ),
    *_of(
        "roles/dispatch.py",
        "trainers/test_distill.py::test_a_teacher_has_no_dropout",
        ("with engine.eval_mode(), engine.without", "with torch.no_grad(), engine.without"),
    ),
    *_of("data/stream.py", "data/test_mixture.py", ("return (seed + int.from_bytes(", "return (int.from_bytes(")),
    *_of(
        "data/streamed.py",
        "data/test_streamed.py",
        ("start = at._replace(position=at.position // self._size * self._size)", "start = at"),
        ("start.position + len(rows), following[0])", "start.position + len(rows), start.mark)"),
    ),
    *_of(
        "data/remote.py",
        "data/test_streamed.py",
        ("self._file, self._file_at = self.of.open_at(self._at)", "self._file, self._file_at = self.of.open_at(0)[0], self._at"),
        ("return answer, offset if answer.status == 206 else 0", "return answer, offset"),
    ),
    *_of(
        "data/mixture.py",
        "data/test_streamed.py",
        ("return epochs is not None and read.epoch >= epochs", "return False"),
    ),
    *_of(
        "data/encode.py",
        "data/test_weights.py",
        ("mask[start:end] = [trained[turn]] * (end - start)", "mask[start:end] = [1] * (end - start)"),
        ('PROBE_CONTENTS = ("a", "7")', 'PROBE_CONTENTS = ("a", "a")'),
    ),
    *_of("data/formats.py", "data/test_weights.py", ("given=chat.given + bool(chat.given)", "given=chat.given")),
    *_of("data/dataset.py", "data/test_weights.py", ("mask=[weight * w for w in fitted.mask]", "mask=[w for w in fitted.mask]")),
    *_of(
        "algorithms/preference.py",
        "data/test_preferences.py",
        ("total = (weights_N * loss.of_margin(", "total = (loss.of_margin("),
        ("total = (weights_S * _kto(", "total = (_kto("),
    ),
    *_of("data/preferences.py", "data/test_preferences.py", ('"units": float(weights_S.sum()) / group', '"units": batch.num_sequences / group')),
    *_of(
        "algorithms/preference.py",
        "algorithms/test_preference.py::test_rewards_are_those_of_the_loss",
        ("Loss(_log_odds, _orpo, _mean_log_probs)", "Loss(_log_odds, _orpo, _log_odds)"),
    ),
    *_of("algorithms/scores.py", "algorithms/test_scores.py", ("errors_N.detach().abs()", "errors_N.detach()")),
    *_of(
        "algorithms/distill.py",
        "algorithms/test_distill.py",
        (".where(rest_q > MIN_TAIL, torch.zeros_like(of_tail))", ""),
    ),
    *_of("data/scored.py", "data/test_scored.py::test_a_batch_reads_the_last_token_and_counts_what_is_divided_by", ('_number(row["margin"], "margin")', 'abs(_number(row["margin"], "margin"))')),
    *_of(
        "trainers/dpo.py",
        "trainers/test_dpo.py::test_an_evaluation_of_kto_has_its_kl_and_the_margin_of_pairs",
        ("self._reference_of(dispatch, others))", "self._reference_of(dispatch, batch))"),
    ),
)  # fmt: skip
