"""Reinforcement learning, from a checked config to an exported policy: PPO with a critic, GRPO and their kin.

Every rank runs this program. An iteration samples a rollout, scores it, computes log-probs, values and advantages, and
makes `epochs * global_batch_size / mini_batch_size` optimizer steps on it. What is not here: ranks, micro-batches and
devices (the engines', behind WorkerDispatch), losses and advantages (mrl.algorithms), how completions are sampled
(mrl.rollout) and scored (rl/scoring.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import time

from mrl import metrics
from mrl.algorithms.recipes import in_words
from mrl.config.load import to_dict
from mrl.config.ppo import PPOConfig
from mrl.converters.adapter_folder import is_adapter
from mrl.errors import TrainingError, UserError
from mrl.rewards.scorer import faults_in_words
from mrl.trainers.common import (
    already_done,
    check_outside,
    export,
    is_due,
    log_without_evaluation,
    saved_before,
    say_all,
    say_done,
    say_left_out,
    say_mtp_layers,
)
from mrl.trainers.opening import say_choices, say_length, say_model
from mrl.trainers.rl.collect import ScoredRollout
from mrl.trainers.rl.experience import Experience
from mrl.trainers.rl.prepare import check_rollout, policy_metrics, prepare, rollout_metrics
from mrl.trainers.rl.setup import trainer_of
from mrl.trainers.rl.show import show_rollout
from mrl.trainers.rl.state import Progress, Trainer, restore, save, stopped_at
from mrl.trainers.rl.updates import end_iteration, train_actor, train_critic
from mrl.trainers.run_directory import StartState, choose_start, copy_missed
from mrl.trainers.throughput import FreedMemory, memory_gb


def run(config: PPOConfig, command_line: str = "") -> None:
    """Trains, or goes on training, until `train.steps` or `train.epochs` are done, and exports the policy.

    Called on every rank. Raises UserError for what the user can put right, and Stopped after a signal asked the run to
    stop and a checkpoint was saved.
    """
    with trainer_of(config) as trainer:
        dispatch, directory = trainer.dispatch, trainer.directory
        dispatch.on_main(lambda: check_outside(config))
        start = dispatch.on_main(lambda: choose_start(directory, config))
        wanted = config.checkpoint.export_hf
        lora, total = config.actor.model.lora, trainer.total_steps
        if already_done(dispatch, directory, trainer.console, start, total_steps=total, export_hf=wanted, lora=lora):
            dispatch.on_main(lambda: copy_missed(directory, start, config.checkpoint))
        else:
            train(trainer, start, command_line)


def train(trainer: Trainer, start: StartState, command_line: str) -> None:
    """From building the models to exporting the policy."""
    config, dispatch, directory, console = trainer.config, trainer.dispatch, trainer.directory, trainer.console
    say_choices(console, dispatch.engines)  # first: a run that ends for want of memory has said what was chosen
    console.doing("building the models")
    dispatch.init_model()
    without = {r: f for r, f in trainer.folders.items() if r != "actor" or config.actor.model.mtp is None}
    say_mtp_layers(dispatch, console, {f"{role}.model.path": folder for role, folder in without.items()})
    for role, engine in dispatch.engines.items():
        say_model(console, role, engine)
    for role, base in dispatch.bases.items():
        console.say(f"{role}: the {base} without its adapters")
    say_length(
        console, steps=trainer.total_steps, batch=config.train.global_batch_size, noun="sample",
        rows=len(trainer.source.dataset),
        per_epoch=len(trainer.source.dataset) / config.prompts_per_iteration * config.steps_per_iteration,
    )  # fmt: skip
    progress, experience = restore(trainer, start)
    trainer.collector.rollouts.begin(progress.run_id, progress.step)
    notes = [f"algorithm: {in_words(trainer.recipe)}", f"length: {trainer.total_steps} steps"]
    notes += [f"{name}: {value}" for name, value in dispatch.chosen.items()]
    console.doing("opening the logs")
    dispatch.on_main(lambda: directory.prepare(config, command_line, notes))
    log = metrics.open_metrics(
        directory.path,
        config.log,
        step=-1 if begins(progress, experience) else progress.logged,
        config=to_dict(config),
        run_id=progress.run_id,
        enabled=dispatch.is_main,
    )
    try:
        say_all(console, log.notes)
        console.start(progress.logged, trainer.total_steps)
        try:
            with trainer.saves.ended(console):
                loop(trainer, progress, experience, log)
        except TrainingError:
            # What a guard refused is sampled again: a sampler may be mended by then.
            trainer.collector.rollouts.forget()
            raise
        trainer.collector.rollouts.forget()
    finally:
        console.doing("closing the logs")
        log.close()
        console.close()
        say_left_out(console, "train", trainer.source.counts)
    trainer.stop.says = None  # the run ends by itself now
    if config.checkpoint.export_hf:
        folder, template = trainer.folders["actor"], trainer.chat_template
        write, model = functools.partial(dispatch.save_hf_model, "actor"), config.actor.model
        if is_adapter(pathlib.Path(model.path).expanduser()):
            model = dataclasses.replace(model, path=folder)  # adapters are over what was merged
        mtp, ends = model.mtp is not None, trainer.ends
        export(
            dispatch, directory, console, write, folder=folder, chat_template=template, ends=ends, model=model, mtp=mtp
        )
    say_done(dispatch, console, directory, steps=progress.step, tokens=progress.tokens)


def begins(progress: Progress, experience: Experience | None) -> bool:
    """Returns whether nothing is done yet, so that the line of step 0 is made (anew, where a start that was lost made
    it)."""
    return progress.step == 0 and experience is None


def loop(trainer: Trainer, progress: Progress, experience: Experience | None, log: metrics.MetricsLog) -> None:
    """Iterations of sampling and training until all steps are made; the last is saved. Raises Stopped after a signal.

    experience: of the iteration that a checkpoint has broken off, None at the start of one.
    """
    if trainer.stop_requested:
        raise stopped_at(trainer, progress, experience, saved=None)
    if begins(progress, experience):
        evaluate_before(trainer, progress, log)
    if progress.unlogged:  # a signal or an error came in the evaluation after this step
        finish_step(trainer, progress, experience, log, progress.unlogged)
    memory = FreedMemory()
    while progress.step < trainer.total_steps:
        if experience is None:
            collected = sample(trainer, progress, log)  # prompts, completions, rewards
            began_s = time.perf_counter()
            experience = prepare(trainer, progress, collected)  # log-probs, values, advantages
            check_rollout(trainer, progress, collected, experience)
            log_probs_s = time.perf_counter() - began_s
            progress.pending = rollout_metrics(trainer, collected, experience, log_probs_s=log_probs_s)
            progress.pending |= trainer.source.metrics
            finish_rollout(trainer, progress, collected, experience, log)
            del collected  # its texts and tokens would fill the memory of the next rollout

        row, experience = one_step(trainer, progress, experience)
        row, progress.pending = join(progress.pending, row), {}

        if trainer.position(progress.step)[1] == 0:
            end_iteration(trainer, progress, experience)  # KL coefficient, reference
            experience = None
        finish_step(trainer, progress, experience, log, row)
        memory.give_back()


def sample(trainer: Trainer, progress: Progress, log: metrics.MetricsLog) -> ScoredRollout:
    """Returns the completions and rewards of the next iteration."""
    trainer.console.doing(f"step {progress.step + 1}: prompts and weights for the sampler")
    with saved_before_errors(trainer, progress, None, log):
        prompts = trainer.collector.take(trainer.config.prompts_per_iteration)
        with trainer.sampling(progress.step):
            return trainer.collector.collect(prompts, progress.step + 1)


def one_step(trainer: Trainer, progress: Progress, experience: Experience) -> tuple[dict[str, float], Experience]:
    """Trains critic and actor on the next mini-batch; `progress` has made the step then.

    Returns its metrics, and the experience with the old log-probs that it may have lacked.
    """
    config, began_s = trainer.config, time.perf_counter()
    trainer.console.doing(f"step {progress.step + 1}: training")
    iteration, number = trainer.position(progress.step)
    assert iteration == experience.iteration, f"step {progress.step}: a rollout of iteration {experience.iteration}"
    batch = experience.mini_batch(number, size=config.mini_batch_size, seed=config.seed)
    row: dict[str, float] = {"iteration": iteration + 1}
    if trainer.recipe.needs_critic:
        row |= train_critic(trainer, progress, batch)
    if progress.step >= config.algorithm.critic_warmup:
        of_actor, log_probs_T = train_actor(trainer, progress, batch)
        row |= of_actor
        if not experience.has_old_log_probs:  # the step's own forward has given them
            experience = experience.with_old_log_probs(log_probs_T)
            row |= policy_metrics(trainer, experience)
        progress.tokens += batch.denominators["tokens"]
    progress.step += 1
    update_s = time.perf_counter() - began_s
    row |= trainer.saves.metrics()
    row |= {
        "train/tokens": progress.tokens,
        "perf/update_s": update_s,
        "perf/tokens_per_s": batch.num_tokens / update_s,
    }
    return row, experience


def finish_rollout(
    trainer: Trainer, progress: Progress, collected: ScoredRollout, experience: Experience, log: metrics.MetricsLog
) -> None:
    """Shows a rollout and what was wrong with its rows and rewards. After a signal it is saved, and Stopped raised."""
    show_rollout(trainer, progress.step + 1, collected, experience, log)
    faults = faults_in_words((*collected.scores.faults, *collected.greedy[1].faults))
    say_all(trainer.console, (*trainer.source.take_notes(), *faults))
    if trainer.stop_requested:
        log.sync()
        raise stopped_at(trainer, progress, experience, saved=save(trainer, progress, experience))


def finish_step(
    trainer: Trainer,
    progress: Progress,
    experience: Experience | None,
    log: metrics.MetricsLog,
    row: dict[str, float],
) -> None:
    """Evaluates, logs and saves after a step, as far as they are due. row: the metrics of the step."""
    config, dispatch, step = trainer.config, trainer.dispatch, progress.step
    if trainer.evaluation is not None and is_due(config.train.eval_every, step, trainer.total_steps):
        progress.unlogged = row  # a save within the evaluation holds the row, and the next start evaluates again
        with saved_before_errors(trainer, progress, experience, log), trainer.sampling(step):
            metrics_of_eval = trainer.evaluation.run(step)
        if metrics_of_eval is None:
            log_without_evaluation(dispatch, log, progress)
            raise stopped_at(trainer, progress, experience, saved=save(trainer, progress, experience))
        row |= metrics_of_eval

    stop_requested, row["perf/memory_gb"] = dispatch.max_over_ranks(trainer.stop.requested, memory_gb(dispatch.device))
    log.write(step, row)
    progress.unlogged = None
    trainer.console.step(step, row)

    is_best = note_best(trainer, progress, row)
    if stop_requested or is_best or is_due(config.checkpoint.every, step, trainer.total_steps):
        log.sync()
        going_on = not stop_requested and step < trainer.total_steps
        saved = save(trainer, progress, experience, is_best=is_best, going_on=going_on)
        if stop_requested:
            raise stopped_at(trainer, progress, experience, saved=saved)


def saved_before_errors(
    trainer: Trainer, progress: Progress, experience: Experience | None, log: metrics.MetricsLog
) -> contextlib.AbstractContextManager[None]:
    """`saved_before`, of errors that the user can put right (a bad row, a reward function)."""
    position = trainer.source.state_dict()

    def saves() -> str:
        trainer.source.load_state_dict(position)
        return save(trainer, progress, experience)

    return saved_before(UserError, trainer.dispatch, progress, log, saves)


def join(pending: dict[str, float], row: dict[str, float]) -> dict[str, float]:
    """Returns the metrics of a step; with those of its rollout where it is the first on it."""
    phases = [pending.get(f"perf/{phase}_s", 0.0) for phase in ("weights", "rollout", "reward", "log_probs")]
    return {**pending, **row, "perf/step_s": sum(phases) + row["perf/update_s"]}


def evaluate_before(trainer: Trainer, progress: Progress, log: metrics.MetricsLog) -> None:
    """Evaluates the policy before training, and writes the line of step 0."""
    if trainer.evaluation is None or trainer.config.train.eval_every is None:
        return
    trainer.console.doing("evaluating before training")
    with trainer.sampling(0):
        found = trainer.evaluation.run(0)
    if found is None:
        raise stopped_at(trainer, progress, None, saved=None)
    log.write(0, found)
    trainer.console.step(0, found)


def note_best(trainer: Trainer, progress: Progress, row: dict[str, float]) -> bool:
    """Returns whether the step has the best value yet of the metric in `checkpoint.best`."""
    checkpoint = trainer.config.checkpoint
    value = None if checkpoint.best is None else row.get(checkpoint.best)
    if value is None or math.isnan(value):  # no value is better than it
        return False
    sign = 1 if checkpoint.best_is == "highest" else -1
    if progress.best is not None and sign * value <= sign * progress.best:
        return False
    progress.best, progress.best_step = value, progress.step
    return True
