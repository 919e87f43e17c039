"""What teachers say of rows of `mrl sft` and of rollouts, each of its own sequences, against tables of their numbers; and the
labels made of it."""

import dataclasses

import pytest
import torch

from mrl.algorithms.distill import TEACHER, TEACHER_IDS, TEACHER_OF, TeacherDivergence
from mrl.batch import make_batch
from mrl.config.load import from_dict
from mrl.trainers.rl.roles import References, with_ids
from mrl.trainers.teacher import Teachers
from tests.trainers.tiny_runs import make_config

V = 7  # of the student
MASKS = [[0, 0, 1, 1, 1], [0, 1, 1], [0, 0, 1, 0, 1, 1], [0, 1], [0, 1, 1]]
TEACHERS = [1, 0, 1, 0, 0]  # of the sequences


def table(seed, rows):
    """[V, rows]: a teacher's logits after each token."""
    return torch.randn(V, rows, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(0, 3, (len(mask),), generator=generator).tolist() for mask in MASKS]
    return make_batch(sequences, MASKS, sequence_fields={TEACHER_OF: torch.tensor(TEACHERS)})


TEACHER_T = [number for number, mask in zip(TEACHERS, MASKS, strict=True) for _ in mask[1:]]


@pytest.mark.parametrize(
    ("rows", "top_k", "tail"),
    [
        ((V, V), None, False), ((V, V), 3, True), ((9, V), None, True), ((V, 9), 4, True), ((V, 3), None, True),
        ((9, 3), 4, True),
    ],
)  # fmt: skip
def test_ids_of_a_teacher_with_more_rows_or_fewer(tmp_path, batch, rows, top_k, tail):
    """Of `mrl sft`. What the student lacks is in the last bucket, which there is unless all teachers say all; one of fewer
    says fewer."""
    keys = {"model": {"path": "a"}, "top_k": top_k, "others": {"b": {"model": {"path": "b"}}}}
    teachers = Teachers(from_dict(make_config(tmp_path, tmp_path / "run", teacher=keys)))
    tables = [table(i, count).log_softmax(1) for i, count in enumerate(rows)]
    for one, log_probs in zip(teachers.each, tables, strict=True):
        one.vocab_size, one.own_vocab_size = V, log_probs.shape[1]

        def top(batch, log_probs=log_probs, count=one.ids_per_token):
            values, ids = log_probs[batch.tokens[batch.loss_mask != 0]].topk(count)
            return {"ids": ids.int(), "log_probs": values}

        one.top = top
    made, _ = teachers.prepare(batch)
    assert made.labels[:, 0].tolist() == batch.labels.tolist() and int(made.labels.max()) < V
    for t in batch.loss_mask.nonzero()[:, 0].tolist():
        of_teacher = tables[TEACHER_T[t]][batch.tokens[t]]
        likeliest = of_teacher.topk(teachers.each[TEACHER_T[t]].ids_per_token).indices.tolist()
        values = made.token_fields[TEACHER][t].tolist()
        said = [(i, v) for i, v in zip(made.labels[t, 1:].tolist(), values, strict=True) if v > -torch.inf]
        assert said == [(i, float(of_teacher[i])) for i in likeliest if i < V]
    assert teachers.loss_fn.tail is tail


def asked(logits, sizes):
    """A teacher that speaks of tokens that do not train, too; what it says of them may reach nothing."""

    def ask(batch, ctx):
        sizes.append(batch.num_sequences)
        log_probs = (logits[batch.tokens] / ctx["temperature"]).log_softmax(1)
        values, ids = log_probs.topk(ctx["top"])
        idle = (batch.loss_mask == 0)[:, None]
        said = log_probs.gather(1, batch.labels[:, None])[:, 0].masked_fill(idle[:, 0], torch.nan)
        return {
            "log_probs": said,
            "top_tokens": ids.masked_fill(idle, V - 1),
            "top_log_probs": values.masked_fill(idle, 9.0),
        }

    return ask


@pytest.mark.parametrize(
    ("rows", "top"),
    [((V, V), None), ((V, V), 3), ((9, 3), 4), ((3, 9), None)],
    ids=["whole", "top 3", "more and fewer", "all"],
)
def test_each_teacher_says_its_own_of_its_own_sequences(batch, rows, top):
    """Of `mrl ppo`. Rows of a teacher's output layer that the student lacks are in the tail, and one with fewer says fewer."""
    tables, sizes = [table(i, count) for i, count in enumerate(rows)], []
    ids = tuple(min(top or count, count) for count in rows)
    whole = all(count == of == V for count, of in zip(ids, rows, strict=True))
    one_of = {f"reference{i}": asked(logits, sizes) for i, logits in enumerate(tables)}
    references = References(one_of, ids, TeacherDivergence(kind="forward_kl", tail=not whole), V)
    found = references.say(batch, size=1, temperature=0.8)
    assert sizes == [1] * 5 and (TEACHER_IDS in found) != whole
    held = sum(field.element_size() for name, field in found.items() if name != "ref_log_probs")
    assert held == (4 if whole else 8)
    made = with_ids(dataclasses.replace(batch, token_fields=found))
    assert made.labels[:, 0].tolist() == batch.labels.tolist() and made.labels.dtype == torch.int64
    for t, (token, number) in enumerate(zip(batch.tokens.tolist(), TEACHER_T, strict=True)):
        values = made.token_fields[TEACHER][t]
        if batch.loss_mask[t] == 0:
            assert not values.any() and found["ref_log_probs"][t] == 0
            continue
        of_teacher = (tables[number][token] / 0.8).log_softmax(0)
        likeliest = of_teacher.topk(ids[number]).indices.tolist()
        said = {
            i: float(v) for i, v in zip(made.labels[t, 1:].tolist(), values.tolist(), strict=True) if v > -torch.inf
        }
        assert said == pytest.approx({i: float(of_teacher[i]) for i in likeliest if i < V})
        assert float(found["ref_log_probs"][t]) == pytest.approx(float(of_teacher[batch.labels[t]]))
