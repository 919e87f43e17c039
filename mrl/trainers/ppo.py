"""Reinforcement learning, from a checked config to an exported policy: PPO with a critic, GRPO and their kin.

Every rank runs this program. An iteration samples a rollout, scores it, computes log-probs, values and advantages, and makes
`epochs * global_batch_size / mini_batch_size` optimizer steps on it. What is not here: ranks, micro-batches and devices (the
engines', behind WorkerDispatch), losses and advantages (mrl.algorithms), how completions are sampled (mrl.rollout) and
scored (rl/scoring.py).
"""

from __future__ import annotations

import functools

from mrl import metrics
from mrl.algorithms.recipes import in_words
from mrl.config.load import to_dict
from mrl.config.ppo import PPOConfig
from mrl.engine.atomic_checkpoint import step_name
from mrl.errors import TrainingError, UserError
from mrl.rewards.scorer import faults_in_words
from mrl.trainers.common import (
    already_done,
    check_outside,
    export,
    log_without_evaluation,
    say_adapters,
    say_all,
    say_done,
    say_left_out,
    say_unread,
)
from mrl.trainers.rl.experience import Experience
from mrl.trainers.rl.setup import trainer_of
from mrl.trainers.rl.show import show_rollout
from mrl.trainers.rl.state import Progress, Trainer, restore, save, stopped_at
from mrl.trainers.rl.steps import end_iteration, one_step, prepare
from mrl.trainers.run_directory import Start, choose_start, copy_missed
from mrl.trainers.throughput import memory_gb


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


def train(trainer: Trainer, start: Start, command_line: str) -> None:
    """From building the models to exporting the policy."""
    config, dispatch, directory, console = trainer.config, trainer.dispatch, trainer.directory, trainer.console
    console.doing("building the models")
    dispatch.init_model()
    say_unread(dispatch, console, {f"{role}.model.path": folder for role, folder in trainer.folders.items()})
    for role, engine in dispatch.engines.items():
        say_adapters(console, f"{role}.model.lora", engine.config)
    progress, experience = restore(trainer, start)
    trainer.collector.rollouts.begin(progress.run_id, progress.step)
    notes = [f"algorithm: {in_words(trainer.recipe)}", f"length: {trainer.total_steps} steps"]
    console.doing("opening the logs")
    dispatch.on_main(lambda: directory.prepare(config, command_line, notes))
    log = metrics.open_metrics(
        directory.path, config.log, step=-1 if begins(progress, experience) else progress.logged, config=to_dict(config),
        run_id=progress.run_id, enabled=dispatch.is_main,
    )  # fmt: skip
    try:
        say_all(console, log.notes)
        console.start(progress.logged, trainer.total_steps)
        try:
            loop(trainer, progress, experience, log)
        except TrainingError:
            trainer.collector.rollouts.forget()  # what a guard refused is sampled again: a sampler may be mended by then
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
        write = functools.partial(dispatch.save_hf_model, "actor")
        export(dispatch, directory, console, write, folder=folder, chat_template=template, model=config.actor.model)
    say_done(dispatch, console, directory, steps=progress.step, tokens=progress.tokens)


def begins(progress: Progress, experience: Experience | None) -> bool:
    """Whether nothing is done yet, so that the line of step 0 is to be made, also where a start that was lost made it."""
    return progress.step == 0 and experience is None


def loop(trainer: Trainer, progress: Progress, experience: Experience | None, log: metrics.MetricsLog) -> None:
    """Iterations of sampling and training until all steps are made; the last is saved. Raises Stopped after a signal.

    experience: of the iteration that a checkpoint has broken off, None at the start of one.
    """
    if trainer.stop_requested:
        raise stopped_at(trainer, progress, experience, saved=None)
    if begins(progress, experience):
        evaluate_before(trainer, progress, log)
    while progress.step < trainer.total_steps or progress.unlogged:
        if not progress.unlogged:
            if experience is None:
                experience = sample(trainer, progress, log)
            row, experience = one_step(trainer, progress, experience)
            progress.unlogged = join(progress.pending, row)
            progress.pending = {}
            if trainer.position(progress.step)[1] == 0:
                end_iteration(trainer, progress, experience)
                experience = None
        finish_step(trainer, progress, experience, log)


def sample(trainer: Trainer, progress: Progress, log: metrics.MetricsLog) -> Experience:
    """The rollout of the next iteration, ready to be trained on; its metrics wait in `progress.pending`.

    What the user can put right (a bad row, a reward function) raises after a save of the state before.
    """
    before = trainer.source.state_dict()
    trainer.console.doing(f"step {progress.step + 1}: prompts and weights for the sampler")
    try:
        prompts = trainer.collector.take(trainer.config.prompts_per_iteration)
        with trainer.sampling(progress.step):
            collected = trainer.collector.collect(prompts, progress.step + 1)
    except UserError as error:
        if not progress.step:
            raise
        trainer.source.load_state_dict(before)
        raise saved_before(trainer, progress, None, error, log) from error
    experience, progress.pending = prepare(trainer, progress, collected)
    show_rollout(trainer, progress.step + 1, collected, experience, log)
    faults = faults_in_words((*collected.scores.faults, *collected.greedy[1].faults))
    say_all(trainer.console, (*trainer.source.take_notes(), *faults))
    if trainer.stop_requested:
        log.sync()
        raise stopped_at(trainer, progress, experience, saved=save(trainer, progress, experience))
    return experience


def saved_before(
    trainer: Trainer, progress: Progress, experience: Experience | None, error: UserError, log: metrics.MetricsLog
) -> UserError:
    """Saves what was done before an error that the user can put right, and says so in it."""
    log_without_evaluation(trainer.dispatch, log, progress)
    saved = save(trainer, progress, experience)
    return type(error)(f"{error}; steps 1 to {progress.step} are saved in {saved}")


def join(pending: dict[str, float], row: dict[str, float]) -> dict[str, float]:
    """The metrics of a step; with those of its rollout where it is the first on it."""
    phases = [pending.get(f"perf/{phase}_s", 0.0) for phase in ("rollout", "reward", "log_probs")]
    return {**pending, **row, "perf/step_s": sum(phases) + row["perf/update_s"]}


def evaluate_before(trainer: Trainer, progress: Progress, log: metrics.MetricsLog) -> None:
    """How good the policy is before training: the line of step 0."""
    if trainer.evaluation is None or trainer.config.train.eval_every is None:
        return
    trainer.console.doing("evaluating before training")
    with trainer.sampling(0):
        found = trainer.evaluation.run(0)
    if found is None:
        raise stopped_at(trainer, progress, None, saved=None)
    log.write(0, found)
    trainer.console.step(0, found)


def finish_step(trainer: Trainer, progress: Progress, experience: Experience | None, log: metrics.MetricsLog) -> None:
    """Evaluates, logs and saves after a step, as far as they are due. Raises Stopped after a signal."""
    config, dispatch, row = trainer.config, trainer.dispatch, progress.unlogged
    due = lambda every: progress.step == trainer.total_steps or (every is not None and progress.step % every == 0)  # noqa: E731
    if trainer.evaluation is not None and due(config.train.eval_every):
        try:
            with trainer.sampling(progress.step):
                found = trainer.evaluation.run(progress.step)
        except UserError as error:
            raise saved_before(trainer, progress, experience, error, log) from error
        if found is None:
            log_without_evaluation(dispatch, log, progress)
            raise stopped_at(trainer, progress, experience, saved=save(trainer, progress, experience))
        row |= found
    stop_requested, row["perf/memory_gb"] = dispatch.max_over_ranks(trainer.stop.requested, memory_gb(dispatch.device))
    log.write(progress.step, row)
    trainer.console.step(progress.step, row)
    progress.unlogged = None
    is_best = note_best(trainer, progress, row)
    if stop_requested or is_best or due(config.checkpoint.every):
        log.sync()
        saved = save(trainer, progress, experience)
        if is_best:
            dispatch.on_main(lambda: trainer.directory.name_best(step_name(progress.step), config.checkpoint.remote))
        if stop_requested:
            raise stopped_at(trainer, progress, experience, saved=saved)


def note_best(trainer: Trainer, progress: Progress, row: dict[str, float]) -> bool:
    """Whether the step has the best value yet of the metric in `checkpoint.best`."""
    checkpoint = trainer.config.checkpoint
    value = None if checkpoint.best is None else row.get(checkpoint.best)
    if value is None:
        return False
    sign = 1 if checkpoint.best_is == "highest" else -1
    if progress.best is not None and sign * value <= sign * progress.best:
        return False
    progress.best, progress.best_step = value, progress.step
    return True
