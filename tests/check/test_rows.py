"""The batch of a check: the first rows of the data, shortened where something trains, and compared with its rows.

The losses that a check takes its gradients of, in plain torch, are those that engines are given: values and slopes.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from mrl.algorithms.preference import LossSettings, PreferenceLoss, with_reference
from mrl.algorithms.scores import ScoreLoss
from mrl.batch import Batch
from mrl.check.folder import CheckedModel
from mrl.check.rows import Rows, first_rows, shortened
from mrl.check.run import read_config
from mrl.check.steps import SFT, PreferenceOracle, ScoreOracle
from mrl.config.command import Part
from mrl.config.dpo import ROWS
from mrl.config.load import from_dict
from mrl.config.schema import OneTeacherConfig, TeacherConfig, TeacherModelConfig
from mrl.data import preferences
from mrl.data.batches import BatchSource, batch_of
from mrl.data.dataset import Example, SFTDataset
from mrl.data.preferences import Answer, Preference
from mrl.data.scored import ScoredRow, ScoredSequence, scored_batch
from mrl.data.tokenizer import load_tokenizer
from tests.check.works import make_configs
from tests.trainers import tiny_runs


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    inputs = tmp_path_factory.mktemp("inputs")
    tiny_runs.make_inputs(inputs)
    return from_dict(tiny_runs.make_config(inputs, inputs / "run"))


def rows_of(config, *, sequences: int, length: int) -> Rows:
    of_batch = config.train.global_batch_size
    return first_rows(
        config.data, config.model, of_batch=of_batch, seed=config.seed, sequences=sequences, length=length
    )  # fmt: skip


def test_they_are_the_first_of_the_run(config):
    rows = rows_of(config, sequences=3, length=64)
    dataset = SFTDataset(config.data, load_tokenizer(config.model.path))
    first = BatchSource(dataset, global_batch_size=4, seed=config.seed, prefetch=False).next()
    assert torch.equal(rows.batch.tokens, first.select(range(3)).tokens)
    assert torch.equal(rows.batch.loss_mask, first.select(range(3)).loss_mask)
    assert rows.words.startswith("data.train: the first 3 of the 4 sequences of the first batch (")
    assert not rows.problems()
    assert rows_of(config, sequences=9, length=64).batch.num_sequences == 4


def test_a_long_row_is_cut_where_it_trains():
    row = Example(list(range(100)), [0] * 60 + [1] * 40, False)
    short = shortened(row, 20)
    assert short.ids == list(range(50, 70)) and sum(short.mask) == 10
    at_the_end = shortened(Example(list(range(100)), [0] * 99 + [1], False), 20)
    assert at_the_end.ids == list(range(80, 100)) and sum(at_the_end.mask) == 1
    assert shortened(row, 100) is row
    with_image = dataclasses.replace(row, multi_modal_inputs={"pixel_values": torch.zeros(1)})
    assert shortened(with_image, 20) is with_image


def test_shortened_rows_are_said(config):
    rows = rows_of(config, sequences=4, length=8)
    assert "of each at most 8 tokens around the first that trains" in rows.words and rows.batch.max_length == 7
    assert not rows.problems()


EXAMPLES = [Example([5, 6, 7, 8, 9, 4], [0, 0, 0, 1, 1, 0], False), Example([5, 6, 7], [0, 0, 1], False)]


def problems(**changes) -> list[str]:
    batch = batch_of(EXAMPLES)
    changed = {name: change(getattr(batch, name)) for name, change in changes.items()}
    return Rows(EXAMPLES, (), dataclasses.replace(batch, **changed), "").problems()


def test_a_batch_that_is_not_its_rows_is_found():
    assert problems() == []
    earlier = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    assert problems(loss_mask=lambda m: earlier) == [
        "loss mask: wrong at 2 of 5 places of sequence 0; they are those 1 earlier"
    ]
    later = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    assert problems(loss_mask=lambda m: later) == [
        "loss mask: wrong at 2 of 5 places of sequence 0; they are those 1 later"
    ]
    assert problems(labels=lambda labels: labels.roll(1)) == [
        "labels: wrong at 5 of 5 places of sequence 0; they are those 1 earlier"
    ]
    assert problems(denominators=lambda d: {**d, "tokens": 5.0}) == ["denominators: tokens is 5.0, and the rows have 3"]
    assert "lengths: the sequences have [2, 5]" in problems(lengths=lambda lengths: lengths.flip(0))[0]


def test_a_teacher_is_left_out_and_that_is_said(config):
    one = OneTeacherConfig(model=TeacherModelConfig(path=config.model.path))
    own = dataclasses.replace(
        config, teacher=TeacherConfig(model=one.model, others={"math": one}),
        data=dataclasses.replace(config.data, teacher="math"),
    )  # fmt: skip
    [subject] = SFT.subjects(own, [Part("", own.model, own.engine)], {"": own.model.path})
    made = CheckedModel(own.model.path, 0, "pretrained", "")
    rows = SFT.rows(own, subject, made, sequences=2, length=64, device="cpu")
    assert rows.words.endswith("; the loss is that of labels alone, without the teacher")


@pytest.mark.parametrize("name", ["dpo", "kto", "rm"])
def test_rows_of_answers(name, tmp_path):
    """As engines take them and as the reference does; a long answer is cut, and a pair keeps both of its answers."""
    make_configs(tmp_path)
    command, config = read_config(str(tmp_path / f"{name}.yaml"), ["model.lora=null"])
    checked, folder = pkgutil.resolve_name(command.checked), str(tmp_path / "model")
    [subject] = checked.subjects(
        config, [Part("", config.model, config.engine, optimizer=config.optimizer)], {"": folder}
    )
    made = CheckedModel(folder, 0, "pretrained", "")
    rows = checked.rows(config, subject, made, sequences=3, length=200, device="cpu")
    assert not rows.problems() and rows.batch.num_sequences == 6 and rows.batch.group == (1 if name == "kto" else 2)
    assert (
        rows.words.startswith("data.train: the first 3 of the 4 rows of the first batch")
        and "at most" not in rows.words
    )
    assert rows.ctx == ({"kl": 10.0} if name == "kto" else {})
    short = checked.rows(config, subject, made, sequences=3, length=4, device="cpu")
    assert not short.problems() and short.batch.max_length <= rows.batch.max_length


LENGTHS, TRAINED = (5, 7, 4, 9, 6, 8), (2, 3, 1, 4, 2, 2)
WEIGHTS = (1.0, 0.25, 3.0)


def same(oracle: Callable, group: int, batch: Batch, fields: Sequence[dict[str, float | Tensor]], engine: Callable):
    """engine: (values [T]) -> the sum that an engine divides by the batch's units."""
    values_T = -3 * torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    ours_T, theirs_T = (values_T.clone().requires_grad_() for _ in range(2))
    parts, masks = theirs_T.split(batch.lengths.tolist()), batch.loss_mask.split(batch.lengths.tolist())
    fields = [{name: torch.as_tensor(value) for name, value in of_one.items()} for of_one in fields]
    total = sum(
        oracle(parts[i : i + group], masks[i : i + group], fields[i : i + group]) for i in range(0, len(parts), group)
    )
    total.backward()
    of_engine = engine(ours_T) / batch.denominators["units"]
    of_engine.backward()
    assert float(total.detach()) == pytest.approx(float(of_engine.detach()), rel=1e-6)
    assert torch.allclose(ours_T.grad, theirs_T.grad, rtol=1e-5, atol=1e-9) and ours_T.grad.any()


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        *((name, {}) for name in ROWS),
        ("dpo", {"label_smoothing": 0.2, "length_normalized": True, "sft_weight": 0.5}),
        ("dpo", {"reference_free": True}),
        ("ipo", {"length_normalized": True, "beta": 0.3}),
        ("kto", {"desirable_weight": 1.5, "undesirable_weight": 0.5, "sft_weight": 0.5}),
        ("simpo", {"gamma": 0.3, "sft_weight": 2.0}),
    ],
)
def test_losses_on_preferences(name, changed):
    by, group = {**ROWS[name], **changed}, 1 if name == "kto" else 2
    answers = [
        Answer(list(range(n)), [0] * (n - count) + [1] * count, i % 2 == 0)
        for i, (n, count) in enumerate(zip(LENGTHS, TRAINED, strict=True))
    ]
    rows = [Preference((answers[2 * i], answers[2 * i + 1]), weight) for i, weight in enumerate(WEIGHTS)]
    refs = [-2.0, -4.0, -1.0, -7.0, -3.0, -2.5]
    batch = with_reference(preferences.batch_of(rows, group=group), torch.tensor(refs, dtype=torch.float64))
    fields = [
        {
            "weight": WEIGHTS[i // 2], "chosen": i % 2 == 0, "reference": refs[i], "kl": 0.7,
            "units": sum(WEIGHTS) * (2 // group), "chosen_tokens": 2 * 1.0 + 1 * 0.25 + 2 * 3.0,
        }
        for i in range(6)
    ]  # fmt: skip
    loss = PreferenceLoss(name, LossSettings(**by))
    same(PreferenceOracle(name, by), group, batch, fields, lambda v: loss(batch, {"log_probs": v}, {"kl": 0.7})[0])


@pytest.mark.parametrize("name", ["bradley_terry", "regression", "steps"])
def test_losses_on_scores(name):
    group = 2 if name == "bradley_terry" else 1
    places = [(n - 3, n - 1) if name == "steps" else (n - 1,) for n in LENGTHS]
    targets = [(0.0, 0.3) if name == "steps" else (i - 1.5,) for i in range(6)]
    sequences = [ScoredSequence(list(range(n)), at, of) for n, at, of in zip(LENGTHS, places, targets, strict=True)]
    rows = [
        ScoredRow(tuple(sequences[i : i + group]), margin=0.1 * i if group == 2 else 0.0, weight=1 + i / 2)
        for i in range(0, 6, group)
    ]
    batch = scored_batch(rows, group=group)
    fields = [
        {
            "targets": torch.zeros(n).index_put((torch.tensor(at),), torch.tensor(of)), "margin": rows[i // group].margin,
            "weight": rows[i // group].weight, "units": sum(row.weight * len(s.places) for row in rows for s in row.sequences) / group,
        }
        for i, (n, at, of) in enumerate(zip(LENGTHS, places, targets, strict=True))
    ]  # fmt: skip
    loss = ScoreLoss(name, 0.05 if group == 2 else 0.0)
    same(ScoreOracle(name, loss.centering), group, batch, fields, lambda v: loss(batch, {"values": v}, {})[0])
