"""The parts and the progress of a reinforcement-learning run; saved whole, and restored to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mrl import metrics
from mrl.algorithms.kl import KLController
from mrl.algorithms.recipes import Recipe
from mrl.config.load import to_dict
from mrl.config.ppo import PPOConfig
from mrl.config.resume import check_resume
from mrl.converters.hub import check_same_model
from mrl.data.prompts import PromptSource
from mrl.engine.atomic_checkpoint import ROLES, step_name
from mrl.errors import Stopped
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.stops import EndTokens
from mrl.trainers import common
from mrl.trainers.common import load_newest, say_other_choices, say_other_ends, stop_error
from mrl.trainers.console import Console
from mrl.trainers.rl.collect import Collector
from mrl.trainers.rl.evaluation import Evaluation
from mrl.trainers.rl.experience import Experience
from mrl.trainers.rl.notices import EqualRewards, TokenLimit
from mrl.trainers.rl.samplers import SyncedSampler
from mrl.trainers.rl.teachers import References
from mrl.trainers.run_directory import RunDirectory, StartState, is_own
from mrl.trainers.saves import CheckpointSaver
from mrl.trainers.signals import StopSignal


@dataclasses.dataclass
class Progress(common.Progress):
    """The progress of a run; saved with a checkpoint.

    A step is one mini-batch, by all roles that train; tokens are the actor's.
    """

    best: float | None = None  # the best value yet of checkpoint.best
    best_step: int | None = None  # the step that it came after
    moved: list[str] = dataclasses.field(default_factory=list)  # roles that have made a step with a gradient
    trained: list[str] = dataclasses.field(default_factory=list)  # roles whose every parameter has been seen to train
    exact: bool = False  # whether the training forward was found to give the old log-probs to the bit
    pending: dict[str, float] = dataclasses.field(default_factory=dict)  # metrics of a rollout that has no step yet


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Everything that the loop uses, made once."""

    config: PPOConfig
    recipe: Recipe
    total_steps: int
    folders: Mapping[str, str]  # role -> its model's folder
    fingerprints: Mapping[str, Mapping[str, str]]
    """Role -> what tells its model from others: of those that no checkpoint holds, a sample of the weights too."""
    dispatch: WorkerDispatch
    source: PromptSource
    collector: Collector
    sampling: SyncedSampler
    references: References | None
    kl: KLController
    evaluation: Evaluation | None
    directory: RunDirectory
    console: Console
    stop: StopSignal
    exact_sampler: bool  # whether the sampler has the actor's very arithmetic
    same_reference: bool | None
    """Whether the reference, which starts as the actor, computes in the same layout.

    None where it starts as another model, or there is none.
    """
    chat_template: str | None  # the text of data.chat_template, which the export gets too
    ends: EndTokens  # of completions: those that the export names
    token_limit: TokenLimit
    saves: CheckpointSaver
    equal_rewards: EqualRewards = dataclasses.field(default_factory=EqualRewards)

    def position(self, step: int) -> tuple[int, int]:
        """(iteration, its steps that are made), both from 0, after `step` steps."""
        return divmod(step, self.config.steps_per_iteration)

    @property
    def stop_requested(self) -> bool:
        """Whether a signal came to any rank. Collective."""
        return any(self.dispatch.max_over_ranks(self.stop.requested))


def save(
    trainer: Trainer,
    progress: Progress,
    experience: Experience | None,
    *,
    is_best: bool = False,
    going_on: bool = False,
) -> str:
    """Saves everything that the next step depends on. Returns the checkpoint's folder.

    is_best: it is named so when it is whole. going_on: training does, so it may be written in the background.
    """
    config, dispatch, directory = trainer.config, trainer.dispatch, trainer.directory
    if progress.step == trainer.total_steps:
        dispatch.on_main(directory.forget_export)
    trainer.console.doing("saving a checkpoint")
    state: dict[str, Any] = {
        "progress": dataclasses.asdict(progress),
        "data": trainer.source.state_dict(),
        "kl": trainer.kl.state_dict(),
        "experience": None if experience is None else experience.state_dict(),
        "models": dict(trainer.fingerprints),
        "config": to_dict(config),
        "chosen": dispatch.chosen,
        "end_tokens": dataclasses.asdict(trainer.ends),
    }
    root, remote, keep = str(directory.checkpoints), config.checkpoint.remote, config.checkpoint.keep
    name = step_name(progress.step)
    protect = () if progress.best_step is None else (step_name(progress.best_step),)

    def name_best() -> None:
        if is_best:
            directory.name_best(name, remote)

    if going_on and config.checkpoint.background:
        return trainer.saves.begin(
            root, progress.step, lambda: dispatch.stage_checkpoint(state), backend=ROLES, remote=remote, keep=keep,
            protect=protect, then=name_best,
        )  # fmt: skip
    saved = trainer.saves.now(
        lambda: dispatch.save_checkpoint(
            root, remote, global_step=progress.step, keep=keep, state=state, protect=protect
        )
    )
    dispatch.on_main(name_best)
    return saved


def restore(trainer: Trainer, start: StartState) -> tuple[Progress, Experience | None]:
    """Puts roles, data and KL controller where the checkpoint of `start` left them."""
    config, dispatch, directory = trainer.config, trainer.dispatch, trainer.directory
    start, state = load_newest(dispatch, directory, config, trainer.console, start, dispatch.load_checkpoint)
    if state is None:
        return Progress(run_id=dispatch.on_main(metrics.new_run_id)), None
    for note in check_resume(state["config"], to_dict(config)):
        trainer.console.say(f"changed since the checkpoint: {note}")
    say_other_choices(trainer.console, state.get("chosen", {}), dispatch.chosen)
    say_other_ends(trainer.console, state, trainer.ends)
    for role in trainer.folders:
        before, now = (_model_path(c, role) for c in (state["config"], to_dict(config)))
        found = trainer.fingerprints[role]
        check_same_model(state["models"].get(role), found, before=before, now=now, key=f"{role}.model.path")
    trainer.source.load_state_dict(state["data"])
    trainer.kl.load_state_dict(state["kl"])
    progress = Progress(**state["progress"])
    if not is_own(directory, start, state["config"], config.checkpoint):
        progress.run_id = dispatch.on_main(metrics.new_run_id)  # another run's page is not ours to write on
        progress.best = progress.best_step = None  # nor are its checkpoints here
    if _best_changed(state["config"]["checkpoint"], config):
        progress.best = progress.best_step = None
    best_step = progress.best_step
    if best_step is not None:  # a kill may have come between the save and the note
        dispatch.on_main(lambda: directory.name_best(step_name(best_step), config.checkpoint.remote))
    saved = state["experience"]
    return progress, None if saved is None else Experience.from_state_dict(saved)


def _best_changed(saved: Mapping[str, Any], config: PPOConfig) -> bool:
    """Returns whether another metric than the checkpoint's says what is best now."""
    return (saved["best"], saved["best_is"]) != (config.checkpoint.best, config.checkpoint.best_is)


def _model_path(config: Mapping[str, Any], role: str) -> str:
    """`ROLE.model.path` of a config as plain data; a role that names none has the actor's."""
    section: Any = config
    for name in role.split("."):
        section = section[name]
    return section["model"]["path"] or config["actor"]["model"]["path"]


def stopped_at(trainer: Trainer, progress: Progress, experience: Experience | None, saved: str | None) -> Stopped:
    """Returns the end of a run that a signal has stopped, with where in the iteration it is. saved: the checkpoint;
    None: none was due."""
    iteration, made = trainer.position(progress.step)
    count = trainer.config.steps_per_iteration
    where = f"at the start of iteration {iteration + 1}"
    if progress.step >= trainer.total_steps:
        where = "after the last iteration"
    elif experience is not None:
        where = f"within iteration {iteration + 1}, whose rollout is made, after {made} of its {count} steps"
    where += f" (step {progress.step} of {trainer.total_steps})"
    return stop_error(trainer.dispatch, trainer.stop, where=where, step=progress.step, saved=saved)
