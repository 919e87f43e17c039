"""Reinforcement learning, from a checked config to an exported policy: PPO with a critic, GRPO and their kin.

Every rank runs this program. An iteration samples a rollout, scores it, computes log-probs, values and advantages, and
makes `epochs * global_batch_size / mini_batch_size` optimizer steps on it. Not here: the run around the loop
(trainer.py), ranks, micro-batches and devices (the engines', behind WorkerDispatch), losses and advantages
(mrl.algorithms), how completions are sampled (mrl.rollout) and scored (rl/scoring.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from mrl.config.ppo import PPOConfig
from mrl.rewards.scorer import faults_in_words
from mrl.trainers.common import say_all
from mrl.trainers.rl.collect import ScoredRollout, with_models
from mrl.trainers.rl.experience import Experience
from mrl.trainers.rl.launched import LaunchedRollouts
from mrl.trainers.rl.rollout_ranks import joined_worlds
from mrl.trainers.rl.show import show_rollout
from mrl.trainers.rl.trainer import PPOTrainer, trainer_of
from mrl.trainers.rl.updates import (
    check_rollout,
    end_iteration,
    policy_metrics,
    prepare,
    rollout_metrics,
    train_actor,
    train_critic,
)
from mrl.trainers.throughput import FreedMemory


def run(config: PPOConfig, command_line: str = "") -> None:
    """Trains, or goes on training, until `train.steps` or `train.epochs` are done, and exports the policy.

    Called on every rank. Raises UserError for what the user can put right, and Stopped after a signal asked the run to
    stop and a checkpoint was saved.
    """
    with joined_worlds(config) as ranks_url:
        if ranks_url is not None:  # else this rank has sampled
            with trainer_of(config, ranks_url) as trainer:
                trainer.run(loop, command_line)


def loop(trainer: PPOTrainer) -> None:
    """Iterations of sampling and training until all steps are made; the last is saved. Raises Stopped after a signal.

    A run that resumed within an iteration continues with its saved experience.
    """
    progress, memory = trainer.progress, FreedMemory()
    while progress.step < trainer.total_steps:
        if trainer.experience is None:
            collected, of_rollout = sample(trainer)  # prompts, completions, rewards
            began_s = time.perf_counter()
            trainer.experience = prepare(trainer, collected)  # log-probs, values, advantages
            check_rollout(trainer, collected, trainer.experience)
            log_probs_s = time.perf_counter() - began_s
            progress.pending = rollout_metrics(trainer, collected, trainer.experience, log_probs_s=log_probs_s)
            progress.pending |= of_rollout
            if trainer.launched is not None:
                trainer.launched.trained()
            finish_rollout(trainer, collected, trainer.experience)
            del collected  # its texts and tokens would fill the memory of the next rollout

        row, trainer.experience = one_step(trainer, trainer.experience)
        row, progress.pending = join(progress.pending, row), {}

        if trainer.position(progress.step)[1] == 0:
            end_iteration(trainer, trainer.experience)  # KL coefficient, reference
            trainer.experience = None
        trainer.finish_step(row)
        memory.give_back()


def sample(trainer: PPOTrainer) -> tuple[ScoredRollout, Mapping[str, float]]:
    """Returns the completions and rewards of the next iteration, and metrics of how they came."""
    step = trainer.progress.step
    if trainer.launched is not None:
        return take_launched(trainer, trainer.launched)
    trainer.console.doing(f"step {step + 1}: prompts and weights for the sampler")
    with trainer.saved_before_errors():
        prompts = trainer.collector.take(trainer.config.prompts_per_iteration)
        with trainer.sampling(step):
            return trainer.collector.collect(prompts, step + 1), trainer.source.metrics


def take_launched(trainer: PPOTrainer, launched: LaunchedRollouts) -> tuple[ScoredRollout, Mapping[str, float]]:
    """Returns what servers sampled meanwhile, as `sample`, and launches the rollout after it.

    Between the two the servers are idle: they get the trainer's weights, and held-out prompts if they are due.
    """
    progress, steps = trainer.progress, trainer.config.steps_per_iteration
    step = progress.step
    iteration = step // steps
    with trainer.saved_before_errors():
        end = min(iteration + launched.level, -(-trainer.total_steps // steps))
        for later in range(launched.next_iteration(iteration), end):  # at the start, or after an error
            if step:
                trainer.console.say(
                    f"iteration {later + 1}: its rollout is not in the checkpoint, as the run had ended, its "
                    "servers had failed or a second signal had come, so the newest weights sample it; this is not the "
                    "unbroken run"
                )
            trainer.choose_group(later)
            trainer.sampling.sync(step)
            launched.launch(later, step)
        trainer.console.doing(f"step {step + 1}: waiting for its rollout")
        taken = launched.wait(iteration)
        if taken is None:
            trainer.log_without_evaluation()
            raise trainer.stopped(trainer.save())
        trainer.choose_group(iteration)
        trainer.sampling.sync(step)
    say_all(trainer.console, taken.notes)
    trainer.finish_waiting()
    if trainer.stop_requested:  # before another rollout is launched, for which the save would wait
        trainer.log.sync()
        raise trainer.stopped(trainer.save())
    later = launched.next_iteration(iteration + 1)
    if later == iteration + launched.level and later * steps < trainer.total_steps:
        launched.launch(later, step)
    began_s = time.perf_counter()
    row = launched.take_metrics(taken)
    if trainer.scores.reward_model is None:
        return taken.rollout, row
    trainer.console.doing(f"step {step + 1}: scoring")
    with trainer.saved_before_errors():
        rollout = with_models(taken.rollout, trainer.scores)
    return rollout, {**row, "perf/reward_model_s": time.perf_counter() - began_s}


def one_step(trainer: PPOTrainer, experience: Experience) -> tuple[dict[str, float], Experience]:
    """Trains critic and actor on the next mini-batch; `progress` has made the step then.

    Returns its metrics, and the experience with the old log-probs that it may have lacked.
    """
    config, progress, began_s = trainer.config, trainer.progress, time.perf_counter()
    trainer.console.doing(f"step {progress.step + 1}: training")
    iteration, number = trainer.position(progress.step)
    assert iteration == experience.iteration, f"step {progress.step}: a rollout of iteration {experience.iteration}"
    batch = experience.mini_batch(number, size=config.mini_batch_size, seed=config.seed)
    row: dict[str, float] = {"iteration": iteration + 1}
    if trainer.recipe.needs_critic:
        row |= train_critic(trainer, batch)
    if progress.step >= config.algorithm.critic_warmup:
        of_actor, log_probs_T = train_actor(trainer, batch)
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


def finish_rollout(trainer: PPOTrainer, collected: ScoredRollout, experience: Experience) -> None:
    """Shows a rollout and what was wrong with its rows and rewards. After a signal it is saved, and Stopped raised."""
    show_rollout(trainer, trainer.progress.step + 1, collected, experience)
    faults = faults_in_words((*collected.scores.faults, *collected.greedy[1].faults))
    say_all(trainer.console, (*trainer.take_notes(), *faults))
    if trainer.stop_requested:
        trainer.log.sync()
        raise trainer.stopped(trainer.save())


def join(pending: dict[str, float], row: dict[str, float]) -> dict[str, float]:
    """Returns the metrics of a step; with those of its rollout where it is the first on it."""
    sampled = ("rollout_wait", "reward_model") if "perf/rollout_wait_s" in pending else ("rollout", "reward")
    phases = [pending.get(f"perf/{phase}_s", 0.0) for phase in ("weights", *sampled, "log_probs")]
    return {**pending, **row, "perf/step_s": sum(phases) + row["perf/update_s"]}
