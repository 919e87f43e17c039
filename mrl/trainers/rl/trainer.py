"""The trainer of `mrl ppo`: its parts, what its checkpoints hold, and where it is in an iteration."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mrl.algorithms.recipes import check_algorithm, in_words, kl_controller
from mrl.config.load import to_dict
from mrl.config.ppo import PPOConfig
from mrl.config.ppo_checks import check_schedules
from mrl.config.roles import roles_of
from mrl.config.schema import ModelConfig
from mrl.data.mixture import notes_of_rows
from mrl.data.prompts import Prompt, PromptSource
from mrl.data.tokenizer import load_tokenizer
from mrl.engine.atomic_checkpoint import step_name
from mrl.errors import Stopped, TrainingError, UserError
from mrl.rewards.scorer import Scores
from mrl.rollout.base import SharedRollouts, TrajectorySource
from mrl.rollout.ranks import init_ranks
from mrl.rollout.servers import ServerSampler
from mrl.rollout.stops import EndTokens
from mrl.trainers.common import CheckpointSaver, is_due, say_all, say_mtp_layers
from mrl.trainers.console import Console
from mrl.trainers.opening import length_of, say_choices, say_length, say_model
from mrl.trainers.rl.collect import Collector, take_together
from mrl.trainers.rl.evaluation import evaluation_of
from mrl.trainers.rl.experience import Experience
from mrl.trainers.rl.launched import LaunchedRollouts
from mrl.trainers.rl.prompts import PromptsTask
from mrl.trainers.rl.roles import (
    check_vocabularies,
    make_dispatch,
    references_of,
    role_fingerprints,
    role_folder,
)
from mrl.trainers.rl.samplers import open_rollouts
from mrl.trainers.rl.scoring import Scoring, scoring_of
from mrl.trainers.run_directory import StartState
from mrl.trainers.trainer import Trainer, console_of
from mrl.weights.hf_config import read_hf_config
from mrl.weights.hub import check_same_model
from mrl.words import pluralize


class PPOTrainer(Trainer):
    """Trains an actor, and a critic if the algorithm has one, on rollouts."""

    role = "actor"
    saves_before = UserError  # a bad row's, a reward function's

    config: PPOConfig
    source: PromptSource
    launched: LaunchedRollouts | None = None  # with rollout.async_level

    def __init__(self, config: PPOConfig, console: Console, closing: contextlib.ExitStack, ranks_url: str = "") -> None:
        """Makes each part once. Models are built later, by `build`.

        ranks_url: of the sampling ranks, with rollout.ranks. Raises UserError if something that the config names cannot
        be used.
        """
        super().__init__(config, console, closing)
        self.experience: Experience | None = None  # of the iteration at hand; None at the start of one
        self._ranks_url = ranks_url
        self.said_equal_rewards = False
        console.doing("reading the models' folders and the data")
        self._open_models()
        task, folder = PromptsTask(config), self.folders["actor"]
        prompts, held_out = self.open_rows(task, folder, read_hf_config(folder))
        self.source = task.source(prompts)
        say_all(console, notes_of_rows(prompts, held_out))
        self.dispatch = make_dispatch(config, self.folders, self.recipe)
        self.saves = CheckpointSaver(self.dispatch.device)
        self.lock()
        self.references = references_of(self, self.folders, self.recipe)
        self.total_steps = length_of(
            config, prompts, console, rows=config.prompts_per_iteration, each=config.steps_per_iteration,
            check=functools.partial(check_schedules, config),
        )  # fmt: skip
        engines = self.dispatch.engines
        engines["actor"].set_total_steps(self.total_steps - config.algorithm.critic_warmup)
        if "critic" in engines:
            engines["critic"].set_total_steps(self.total_steps)
        first = [row for rows in (prompts, *held_out.values()) for row in rows.first_rows()]
        scores = scoring_of(self, self.folders, first)
        self.ends = EndTokens.of(folder, self.tokenizer, prompts.encoders())
        if config.rollout.async_level:
            who = "ranks of their own" if config.rollout.ranks else "servers"
            console.say(
                f"rollout.async_level {config.rollout.async_level}: {who} sample "
                f"{pluralize(config.rollout.async_level, 'rollout')} ahead of training; algorithm.correction: "
                f"{self.recipe.correction}"
            )
        self.rollouts, self.samplings = open_rollouts(self, ranks_url)
        self.sampling = self.samplings[0]
        self.watch_signals("rollout or step")
        self.collector = self._collector(
            lambda count: take_together(self.source, count, self.dispatch), self.rollouts, scores.score, console.doing
        )
        if config.rollout.async_level:
            self.launched = self._launched(scores)
        self.scores = scores
        self.evaluation = evaluation_of(self, held_out, self.rollouts, scores)
        self.kl = kl_controller(self.recipe)
        self.fingerprints = self.dispatch.on_main(lambda: role_fingerprints(config, self.folders))

    def _open_models(self) -> None:
        """Finds the folders of all roles' models, and reads the actor's tokenizer."""
        config = self.config
        self.recipe = check_algorithm(config)
        self.folders = {role: role_folder(config, role) for role in roles_of(config, self.recipe)}
        folder = self.folders["actor"]
        read_hf_config(folder)  # first: a wrong config.json fails the tokenizer too
        self.tokenizer = load_tokenizer(folder, config.actor.model.trust_remote_code, config.data.chat_template)
        check_vocabularies(config, self.folders, self.tokenizer)

    def _collector(
        self,
        take: Callable[[int], list[Prompt]],
        rollouts: TrajectorySource,
        score: Callable[..., Scores],
        doing: Callable[[str], None] = lambda what: None,
    ) -> Collector:
        config = self.config
        return Collector(
            take, rollouts, score, prompts=config.prompts_per_iteration, samples=config.rollout.samples_per_prompt,
            rounds=config.algorithm.max_sampling_rounds if self.recipe.dynamic_sampling else None,
            greedy_answers=self.recipe.needs_greedy_answer, doing=doing,
        )  # fmt: skip

    def _launched(self, scores: Scoring) -> LaunchedRollouts:
        rollouts, samplers = self.rollouts, [sampling.sampler for sampling in self.samplings]
        assert isinstance(rollouts, SharedRollouts)
        launched = LaunchedRollouts(
            self.source,
            lambda take: [self._collector(take, source, scores.on_this_process) for source in rollouts.ahead],
            samplers=[sampler for sampler in samplers if isinstance(sampler, ServerSampler)],
            level=self.config.rollout.async_level,
            steps=self.config.steps_per_iteration,
            dispatch=self.dispatch,
            say=self.console.say,
            hurried=lambda: self.stop.hurried,
        )
        self.closing.callback(launched.close)
        return launched

    def choose_group(self, iteration: int) -> None:
        """Makes the servers that sample this iteration those that `sampling` syncs and evaluates with."""
        group = iteration % len(self.samplings)
        self.sampling = self.samplings[group]
        if isinstance(self.rollouts, SharedRollouts):
            self.rollouts.group = group

    @property
    def model(self) -> ModelConfig:
        return self.config.actor.model

    @property
    def begins(self) -> bool:
        return self.progress.step == 0 and self.experience is None

    def position(self, step: int) -> tuple[int, int]:
        """(iteration, its steps that are made), both from 0, after `step` steps."""
        return divmod(step, self.config.steps_per_iteration)

    @property
    def where(self) -> str:
        step, count = self.progress.step, self.config.steps_per_iteration
        iteration, made = self.position(step)
        where = f"at the start of iteration {iteration + 1}"
        if step >= self.total_steps:
            where = "after the last iteration"
        elif self.experience is not None:
            where = f"within iteration {iteration + 1}, whose rollout is made, after {made} of its {count} steps"
        return f"{where} (step {step} of {self.total_steps})"

    # -- the run ------------------------------------------------------------------------------------------------------

    def build(self, start: StartState) -> StartState:
        dispatch, console, config = self.dispatch, self.console, self.config
        say_choices(console, dispatch.engines)  # first: a run that ends for want of memory has said what was chosen
        console.doing("building the models")
        if config.rollout.ranks:
            dispatch.on_main(lambda: init_ranks(self._ranks_url, dispatch.engines["actor"].chosen))
        dispatch.init_model()
        without = {r: f for r, f in self.folders.items() if r != "actor" or config.actor.model.mtp is None}
        say_mtp_layers(dispatch, console, {f"{role}.model.path": folder for role, folder in without.items()})
        for role, engine in dispatch.engines.items():
            say_model(console, role, engine)
        for role, base in dispatch.bases.items():
            console.say(f"{role}: the {base} without its adapters")
        rows = len(self.source.dataset)
        say_length(
            console, steps=self.total_steps, batch=config.train.global_batch_size, noun="sample", rows=rows,
            per_epoch=rows / config.prompts_per_iteration * config.steps_per_iteration,
        )  # fmt: skip
        return start

    def notes(self) -> list[str]:
        return [f"algorithm: {in_words(self.recipe)}", *super().notes()]

    def restore(self, start: StartState) -> None:
        super().restore(start)
        self.rollouts.begin(self.progress.run_id, self.progress.step)

    def make_steps(self, loop: Callable[[Any], None]) -> None:
        def ends_launched(trainer: Any) -> None:
            """A save in the background would wait for rollouts that nobody wants."""
            try:
                loop(trainer)
            except BaseException as error:
                saves = isinstance(error, UserError | Stopped) and not isinstance(error, TrainingError)
                if self.launched is not None and not saves:
                    self.launched.close()
                raise

        try:
            super().make_steps(ends_launched)
        except TrainingError:
            # What a guard refused is sampled again: a sampler may be mended by then.
            self.rollouts.forget()
            raise
        self.rollouts.forget()

    def evaluate(self, step: int) -> dict[str, float] | None:
        with self.sampling(step):
            return super().evaluate(step)

    def finish_step(self, row: dict[str, float]) -> None:
        """Does as `Trainer.finish_step`. While servers sample with other weights an evaluation waits for the next sync:
        `finish_waiting` makes it."""
        step, every = self.progress.step, self.config.train.eval_every
        due = self.evaluation is not None and is_due(every, step, self.total_steps)
        if self.launched is not None and step == self.total_steps:
            self.launched.drop()  # of a longer run, whose train.steps were lowered
        if self.launched is not None and self.launched.in_flight and due:
            self.progress.unlogged = row
        else:
            super().finish_step(row)

    def finish_waiting(self) -> None:
        """Finishes a step whose evaluation waited. The sampler has the weights after it, and nothing is sampled."""
        if self.progress.unlogged:
            super().finish_step(self.progress.unlogged)

    def is_best(self, row: Mapping[str, float]) -> bool:
        checkpoint, progress = self.config.checkpoint, self.progress
        value = None if checkpoint.best is None else row.get(checkpoint.best)
        if value is None or math.isnan(value):  # no value is better than it
            return False
        sign = 1 if checkpoint.best_is == "highest" else -1
        if progress.best is not None and sign * value <= sign * progress.best:
            return False
        progress.best, progress.best_step = value, progress.step
        return True

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def take_notes(self) -> list[str]:
        return super().take_notes() if self.launched is None else []  # they come with the rollouts

    def position_before_rows(self) -> Mapping[str, Any] | None:
        return super().position_before_rows() if self.launched is None else None

    def state_to_come(self, position: Mapping[str, Any] | None, *, holds: bool) -> Callable[[], dict[str, Any]]:
        if self.launched is None:
            return super().state_to_come(position, holds=holds)
        assert position is None, "what is launched has its own"
        return self.launched.state_to_come(holds=holds)

    def own_state(self) -> dict[str, Any]:
        return {
            "kl": self.kl.state_dict(),
            "experience": None if self.experience is None else self.experience.state_dict(),
            "models": dict(self.fingerprints),
        }

    def check_models(self, state: Mapping[str, Any]) -> None:
        for role in self.folders:
            before, now = (_model_path(c, role) for c in (state["config"], to_dict(self.config)))
            found = self.fingerprints[role]
            check_same_model(state["models"].get(role), found, before=before, now=now, key=f"{role}.model.path")

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.kl.load_state_dict(state["kl"])
        saved, checkpoint = state["config"]["checkpoint"], self.config.checkpoint
        if (saved["best"], saved["best_is"]) != (checkpoint.best, checkpoint.best_is):
            self.progress.best = self.progress.best_step = None
        best_step = self.progress.best_step
        if best_step is not None:  # a kill may have come between the save and the note
            self.dispatch.on_main(lambda: self.directory.name_best(step_name(best_step), checkpoint.remote))
        if state["experience"] is not None:
            self.experience = Experience.from_state_dict(state["experience"])
        if self.launched is not None:
            self.launched.load_state_dict(state.get("launched", ()))


def _model_path(config: Mapping[str, Any], role: str) -> str:
    """`ROLE.model.path` of a config as plain data; a role that names none has the actor's."""
    section: Any = config
    for name in role.split("."):
        section = section[name]
    return section["model"]["path"] or config["actor"]["model"]["path"]


@contextlib.contextmanager
def trainer_of(config: PPOConfig, ranks_url: str = "") -> Iterator[PPOTrainer]:
    """Gives the trainer of a run, with the run's directory locked; all parts are ended afterwards. ranks_url: as of
    PPOTrainer."""
    with console_of(config) as console, contextlib.ExitStack() as closing:
        yield PPOTrainer(config, console, closing, ranks_url)
