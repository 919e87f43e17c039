"""Rollouts that are written before they are scored: when they are taken again, and when not."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mrl.data.prompts import Prompt
from mrl.rollout.base import Trajectory, TrajectorySource
from mrl.rollout.recorded import KeptRollouts

PROMPTS = [Prompt(i, f"train.jsonl:{i + 1}", {"id": i}, [{"role": "user", "content": "é"}], [3, i]) for i in (4, 7)]


class Source(TrajectorySource):
    """Counts what it samples."""

    def __init__(self):
        self.calls = 0

    def answer(self, prompts, asked):
        self.calls += 1
        talk = [{"role": "assistant", "content": "\ud800"}]
        return [
            Trajectory(dataclasses.replace(p, content="in place of it", tokens=[1]), i, [1, 5, self.calls], [0, 1, 1],
                       [0.0, math.nextafter(-0.1, 0), -1e-300], "x", False, reward=0.5, conversation=talk, cut_by="turns")
            for p in prompts for i in range(asked.samples)
        ]  # fmt: skip

    def close(self):
        pass


class Start:
    """A start of a run: what it says, and how often it sampled."""

    def __init__(self, folder, *, origin="a", environment=None, run_id="one", made=4, **ahead):
        self.said, self.source = [], Source()
        origin = {"origin": origin, "environment": environment}
        self.kept = KeptRollouts(
            self.source, folder, origin=origin, on_main=lambda fn: fn(), say=self.said.append, **ahead
        )
        self.kept.begin(run_id, made)

    def sample(self, prompts=PROMPTS, *, step=5, samples=2, **how):
        return self.kept.sample(prompts, step=step, samples=samples, **how)


ASKED = [{}, {"round": 1}, {"series": "baseline", "greedy": True, "samples": 1}]


def test_a_later_start_is_given_the_same_bits_and_samples_nothing(tmp_path):
    first, second = Start(tmp_path / "pending"), Start(tmp_path / "pending")
    sampled = [first.sample(**how) for how in ASKED]
    assert [second.sample(**how) for how in ASKED] == sampled
    assert (first.source.calls, second.source.calls) == (3, 0) and first.said == []
    assert len(second.said) == 3 and "step 5: 4 samples are those in " in second.said[0]
    assert second.kept.earlier_s > 0 and first.kept.earlier_s == 0
    second.kept.forget()
    assert not (tmp_path / "pending").exists()


@pytest.mark.parametrize(
    ("start", "how", "calls"),
    [
        ({"run_id": "two"}, {}, 1),  # another run's checkpoint of the same step
        ({"run_id": "two"}, {"step": 1}, 0),  # before the first step nothing is restored, and the run has a new name
        ({"origin": "b"}, {"step": 1}, 1),
        ({}, {"prompts": PROMPTS[:1]}, 1),
        ({}, {"samples": 3}, 1),
        ({}, {"greedy": True}, 1),
        ({}, {"round": 2}, 1),
        ({}, {"series": "eval", "step": 4}, 1),
    ],
)
def test_what_was_sampled_otherwise_is_not_taken(tmp_path, start, how, calls):
    made = how.get("step", 5) - 1
    Start(tmp_path, made=made).sample(step=made + 1)
    later = Start(tmp_path, **{"made": made, **start})
    later.sample(**how)
    assert later.source.calls == calls


EDITED_ROW = [dataclasses.replace(prompt, row={"id": "mended"}) for prompt in PROMPTS]
OTHER_TEXT = [dataclasses.replace(prompt, tokens=[8, 9]) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("prompts", "environment", "calls"),
    [(EDITED_ROW, None, 0), (OTHER_TEXT, None, 1), (EDITED_ROW, "source text", 1), (PROMPTS, "source text", 0)],
)
def test_rows_that_were_changed_between_two_starts(tmp_path, prompts, environment, calls):
    Start(tmp_path, environment=environment).sample()
    later = Start(tmp_path, environment=environment)
    sampled = later.sample(prompts)
    assert later.source.calls == calls and sampled[0].prompt.row == prompts[0].row


def test_a_start_from_an_earlier_checkpoint_drops_samples_of_later_weights(tmp_path):
    Start(tmp_path).sample()
    later = Start(tmp_path, made=2)  # in the middle of a rollout's steps, so that the next samples are those of step 5
    later.sample()
    assert later.source.calls == 1


def test_files_of_other_weights_go(tmp_path):
    start = Start(tmp_path)
    for step, series in ((4, "eval"), (5, "step"), (5, "baseline")):
        start.sample(step=step, series=series)
    assert len(list(tmp_path.iterdir())) == 3
    start.sample(step=9)
    assert [file.name[:14] for file in tmp_path.iterdir()] == ["step_00000009_"]


def test_rollouts_ahead_stay_as_long_as_the_checkpoint_has_their_weights(tmp_path):
    """Two iterations of two steps ahead: rollouts of steps 5, 7 and 9 have the weights after 0, 2 and 4 steps."""
    two = {"ahead": 2, "steps": 2}
    start = Start(tmp_path, **two)
    for step, made in ((5, 0), (7, 2), (9, 4), (11, 6)):
        start.sample(step=step, made=made)
    assert len(list(tmp_path.iterdir())) == 3, "the rollout of step 5 was trained on before that of step 11 began"
    again = Start(tmp_path, made=4, **two)
    assert sorted(file.name[:13] for file in tmp_path.iterdir()) == ["step_00000007", "step_00000009"]
    for step, made in ((7, 2), (9, 4)):
        again.sample(step=step, made=made)
    assert again.source.calls == 0


def test_a_damaged_file_is_sampled_again(tmp_path):
    Start(tmp_path).sample()
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    later = Start(tmp_path)
    later.sample()
    assert later.source.calls == 1 and "cannot be read" in later.said[0]
