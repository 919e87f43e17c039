"""What the loops of the trainers decide, with stand-ins for engines: until when they watch, what they remove, what they keep."""

from __future__ import annotations

import dataclasses
import json
import math
import time
import types

import pytest
import torch

from mrl.batch import make_batch
from mrl.config.load import from_dict, to_dict
from mrl.config.ppo import PPOConfig
from mrl.engine.base import GradNorm
from mrl.engine.guards import FaultKind, Problem
from mrl.errors import DamagedCheckpoint, TrainingError
from mrl.roles.dispatch import StepResult
from mrl.rollout.stops import EndTokens
from mrl.trainers import common, rows
from mrl.trainers import trainer as run
from mrl.trainers.common import CheckpointSaver, Progress
from mrl.trainers.rl import updates
from mrl.trainers.rl.experience import epoch_order
from mrl.trainers.rl.trainer import PPOTrainer
from mrl.trainers.rows import Evaluation, RowsTrainer
from mrl.trainers.run_directory import RunDirectory, StartState
from mrl.trainers.step_guard import StepGuard
from tests.config.test_load import PPO_BASE, base, merged
from tests.trainers.test_parts import make_checkpoint

WAITS, STAYS = Problem(FaultKind.WAITS, "a"), Problem(FaultKind.UNCHANGED, "a")


def there(**fields):
    """An object with these attributes, which calls what it is asked to call and says nothing."""
    calls = {"on_main": lambda fn: fn(), "doing": lambda what: None, "say": lambda line: None}
    return types.SimpleNamespace(**{**calls, "ends": EndTokens((), ()), **fields})


def trainer_of(kind, **parts):
    """A trainer that has these parts alone."""
    made = kind.__new__(kind)
    vars(made).update({"console": there(), "ends": EndTokens((), ())} | parts)
    return made


@pytest.mark.parametrize(
    ("found", "fails_at"), [([[WAITS], [STAYS]], 2), ([[WAITS], [WAITS], [STAYS]], 3), ([[WAITS], [], [STAYS]], None)]
)
def test_steps_are_watched_until_every_adapter_has_trained(tmp_path, found, fails_at):
    """A of an adapter trains a step after its B: the first step alone does not tell."""
    batch, failed, progress = make_batch([[1, 2, 3]], [[0.0, 1.0, 1.0]]), None, Progress()
    trainer = there(
        config=there(train=there(guards=True)), progress=progress, dispatch=there(), directory=RunDirectory(tmp_path)
    )
    for step in (1, 2, 3):
        guard = StepGuard(trainer, "model", batch, head="lm", may_be_zero=False)
        guard.before_update(1.0)
        try:
            guard.after_update(StepResult(GradNorm(1.0), 1e-3, found.pop(0) if guard.watches_parameters else []))
        except TrainingError as error:
            assert "a: it has a gradient but the step did not change it" in str(error)
            failed = step
            break
        progress.step = step
    assert failed == fails_at and found == ([] if fails_at else [[STAYS]])


@pytest.mark.parametrize(("step", "stays"), [(1, True), (2, False)])
def test_the_last_save_removes_the_export_of_a_shorter_run(tmp_path, monkeypatch, step, stays):
    """Else a kill before the new export leaves the old one, for the model of a run that is complete."""
    (tmp_path / "hf").mkdir()
    monkeypatch.setattr(rows, "model_fingerprint", lambda folder: {})
    folder = RunDirectory(tmp_path)
    model = there(config=there(model=there(path="m")))
    saver = there(save_checkpoint=lambda *args, **kwargs: folder.hf.exists(), chosen={}, engines={"model": model})
    parts = {"source": there(state_dict=dict), "fingerprints": {}, "total_steps": 2, "progress": Progress(step=step)}
    parts |= {"saves": CheckpointSaver(torch.device("cpu")), "dispatch": saver, "directory": folder}
    assert trainer_of(RowsTrainer, config=from_dict(base()), **parts).save() is stays
    folder.hf.mkdir(exist_ok=True)
    kl = there(state_dict=dict)
    assert (
        trainer_of(PPOTrainer, config=from_dict(PPO_BASE, PPOConfig), kl=kl, experience=None, **parts).save() is stays
    )


@pytest.mark.parametrize(
    ("own", "saved", "now", "best"),
    [
        (True, {"best": "reward/mean"}, {"best": "reward/mean"}, (0.5, 2)),
        (False, {"best": "reward/mean"}, {"best": "reward/mean"}, (None, None)),
        (True, {"best": "reward/mean"}, {"best": "reward/mean", "best_is": "lowest"}, (None, None)),
        (True, {"best": "reward/mean"}, {"best": "reward/std"}, (None, None)),
    ],
    ids=["as it was", "another run's checkpoint", "the lowest is the best now", "another metric"],
)
def test_the_best_value_is_gone_on_with_where_it_is_of_this_run_and_metric(
    tmp_path, monkeypatch, own, saved, now, best
):
    def config(checkpoint):
        return from_dict(merged(PPO_BASE, {"output_dir": str(tmp_path), "checkpoint": checkpoint}), PPOConfig)

    progress = dataclasses.asdict(Progress(step=4, best=0.5, best_step=2))
    parts = {"config": to_dict(config(saved)), "models": {}, "data": {}, "kl": {}, "experience": None}
    parts["chosen"] = {"actor.layer_spec": "te", "critic.layer_spec": "local", "reward.layer_spec": "te"}
    root = tmp_path / "checkpoints" if own else tmp_path / "other"
    found = StartState(str(root / "step_00000004"), 4, ""), parts | {"progress": progress}
    monkeypatch.setattr(run, "load_newest", lambda *args: found)
    now_chosen = {"actor.layer_spec": "local", "critic.layer_spec": "local"}
    loads, said = there(load_state_dict=lambda of: None, load_checkpoint=None, chosen=now_chosen, take_notes=list), []
    trainer = trainer_of(
        PPOTrainer, config=config(now), dispatch=loads, directory=RunDirectory(tmp_path), console=there(say=said.append),
        folders={}, source=loads, kl=loads, rollouts=there(begin=lambda run_id, step: None),
    )  # fmt: skip
    trainer.restore(None)
    made = trainer.progress
    assert (made.best, made.best_step) == best and made.step == 4
    assert said[-1] == "changed since the checkpoint: trained under actor.layer_spec te, now local"
    assert sum("layer_spec" in line for line in said) == 1


def test_no_number_is_never_the_best_and_the_next_one_is(tmp_path):
    checkpoint = {"best": "reward/mean", "best_is": "lowest"}
    config = from_dict(merged(PPO_BASE, {"output_dir": str(tmp_path), "checkpoint": checkpoint}), PPOConfig)
    progress = Progress(step=1)
    trainer = trainer_of(PPOTrainer, config=config, progress=progress)
    made = [trainer.is_best({"reward/mean": value}) for value in (math.nan, 0.5, math.nan, 0.7, 0.4)]
    assert made == [False, True, False, False, True] and progress.best == 0.4


def test_scores_are_shown_in_the_order_of_their_sequences(monkeypatch):
    order, seen = epoch_order(7, 3, 0, 6), []
    monkeypatch.setattr(updates, "has_equal_rewards", lambda batch, scores_S, recipe: seen.append(scores_S.tolist()))
    trainer = there(
        config=there(seed=7, train=there(guards=False)), recipe=None, said_equal_rewards=False, console=there(),
        progress=Progress(step=1),
    )  # fmt: skip
    collected = there(scores_S=torch.arange(6.0), trajectories=[])
    updates.check_rollout(trainer, collected, there(iteration=3, batch=there(num_sequences=6)))
    assert seen == [list(map(float, order))] and list(order) != sorted(order)


def test_an_evaluation_divides_the_sums_of_all_batches_once_by_what_each_mean_is_of(tmp_path):
    """Two sets; batches of other sizes, one of which has no rejected answer and so no mean of them."""
    batches = {
        "a": [(2.0, 5.0, {"x": 1.0, "y": 7.0}, {"tokens": 3, "n": 1, "m": 2}), (1.0, 0.0, {"x": 4.0}, {"tokens": 1, "n": 5, "m": 0})],
        "b": [(8.0, 1.0, {"x": -2.0, "y": 1.0}, {"tokens": 6, "n": 2, "m": 4})],
    }  # fmt: skip
    task = there(
        denominator="tokens", means={"x": "n", "y": "m"}, config=there(train=there(eval_batches=None)),
        eval_batches=lambda rows, report: (there(found=found, loss=loss, denominators=of) for loss, _, found, of in rows),
        prepare=lambda dispatch, batch: (batch, {}), means_of=lambda made, ctx: made.found, loss_fn=None,
    )  # fmt: skip
    dispatch = there(
        evaluate=lambda role, made, *_: (made.loss, made.found)
    )  # fmt: skip
    shown = there(doing=lambda what: None, detail=lambda what: None, say=lambda what: None)
    trainer = there(dispatch=dispatch, directory=RunDirectory(tmp_path), console=shown, stop_requested=False)
    made = Evaluation(trainer, task, batches)
    assert made.run(3) == pytest.approx(
        {
            "eval/loss": (2 * 3 + 1 * 1 + 8 * 6) / 10, "eval/x": (1 + 4 * 5 - 2 * 2) / 8, "eval/y": (7 * 2 + 1 * 4) / 6,
            "eval/a/loss": 7 / 4, "eval/a/x": 21 / 6, "eval/a/y": 7.0, "eval/b/loss": 8.0, "eval/b/x": -2.0, "eval/b/y": 1.0,
        }
    )  # fmt: skip


def test_the_seconds_of_a_save_are_said_once_by_the_step_after_it():
    saves, began_s = CheckpointSaver(torch.device("cpu")), time.perf_counter()
    assert saves.save(lambda: str(sum(range(10**6)))) == "499999500000"
    took_s = time.perf_counter() - began_s
    assert 0 < saves.metrics()["perf/save_held_s"] <= took_s and saves.metrics() == {}


STEP = {"step": 4, "train/loss": 1.0}


@pytest.mark.parametrize(
    ("step", "evaluates", "log", "done"),
    [
        (3, False, [STEP | {"step": 3}], False),
        (4, False, [STEP], True),
        (4, False, [], True),  # of a run whose log is gone nothing is to be made anew
        (4, False, [STEP | {"step": 2}], True),  # the last line alone can be made anew
        (4, False, [STEP | {"step": 3}], False),  # a kill came between the save of the last step and its line
        (4, True, [STEP], False),  # or in the evaluation behind it
        (4, True, [STEP | {"eval/loss": 1.0}], True),
        (5, False, [STEP | {"step": 5}], True),
    ],
)
def test_a_run_is_done_when_its_last_line_is_written(tmp_path, step, evaluates, log, done):
    folder, said = RunDirectory(tmp_path), []
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    (tmp_path / "config.yaml").write_text(f"data: {{eval: {'rows.jsonl' if evaluates else 'null'}}}\n")
    lora, ranks, shown = from_dict(base()).model.lora, there(), there(say=said.append)

    def is_done(**wanted):
        start = StartState(str(tmp_path), step, "resuming")
        return common.already_done(ranks, folder, shown, start, total_steps=4, **{"lora": lora} | wanted)

    assert is_done(export_hf=False) is done
    assert (said == ["resuming"]) is not done
    assert not is_done(export_hf=True), "the export is to be made"
    folder.hf.mkdir()
    assert is_done(export_hf=True) is done


def test_evaluations_and_saves_are_due_every_so_many_steps_and_at_the_end():
    due = [[step for step in range(1, 8) if common.is_due(every, step, 7)] for every in (3, 7, None)]
    assert due == [[3, 6, 7], [7], [7]]


def test_a_damaged_checkpoint_gives_way_to_an_older_one_and_not_to_the_beginning(tmp_path):
    older, newest = (make_checkpoint(tmp_path / "checkpoints", step) for step in (2, 4))
    config, said = from_dict(base() | {"output_dir": str(tmp_path)}), []
    asked, shown = [], there(say=said.append)

    def load(path):
        asked.append(path)
        if path == newest:
            raise DamagedCheckpoint(path, why="is damaged")
        return {"of": path}

    newest_first = StartState(newest, 4, "resuming from the newest")
    start, state = common.load_newest(there(), RunDirectory(tmp_path), config, shown, newest_first, load)
    assert asked == [newest, older] and (start.checkpoint, start.step, state) == (older, 2, {"of": older})
    assert said[0].startswith("passed over ") and said[1] == f"resuming from {older}, after step 2"
    start, state = common.load_newest(there(), RunDirectory(tmp_path), config, shown, StartState(None, 0, ""), load)
    assert (start.checkpoint, state) == (None, None)


def test_the_last_good_checkpoint_is_from_before_the_step_that_failed(tmp_path):
    folder = RunDirectory(tmp_path)
    assert common.last_good(there(), folder, 4) == "no good checkpoint had been saved"
    first, second, failed = (make_checkpoint(folder.checkpoints, step) for step in (1, 2, 4))
    suspect = f"{failed} holds the very state that failed"
    assert common.last_good(there(), folder, 4) == f"the last good checkpoint is {second}; {suspect}"
    assert common.last_good(there(), folder, 3) == f"the last good checkpoint is {second}"
    assert common.last_good(there(), folder, 1).startswith(f"no good checkpoint had been saved; {first} holds")


def test_a_step_whose_evaluation_was_broken_off_is_not_logged_yet():
    """Its line comes before the save, without an evaluation, and the next start writes it anew."""
    written = []
    log = there(
        write=lambda step, row: written.append((step, row["train/loss"])), sync=lambda: written.append("synced")
    )
    ranks = there(max_over_ranks=lambda *values: list(values), device=torch.device("cpu"))
    for unlogged, logged in (({"train/loss": 1.0}, 3), (None, 4)):
        progress = Progress(step=4, unlogged=unlogged)
        run.Trainer.log_without_evaluation(there(dispatch=ranks, log=log, progress=progress))
        assert progress.logged == logged
    assert written == [(4, 1.0), "synced", "synced"]
