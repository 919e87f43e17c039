"""GRPO as a program of your own, on either engine: the loop of `mrl ppo`, without what surrounds it.

    CONFIG="examples/arithmetic/grpo.yaml output_dir=runs/my-grpo"
    python examples/arithmetic/quickstart.py --sft-only                   # makes the model that grpo.yaml names
    python examples/rl_loop.py $CONFIG
    torchrun --nproc-per-node 2 examples/rl_loop.py $CONFIG actor.engine='{parallel: {tp: 2}}'
    torchrun --nproc-per-node 2 examples/rl_loop.py $CONFIG actor.engine='{backend: fsdp}'

It reads a config of `mrl ppo` and refuses other algorithms. The numbers are the same if the config has the same reward.
Kill it and start it again: it resumes from its last checkpoint. Every layout samples the same, within rounding.

`mrl ppo` also has other algorithms, critics, reward models, inference servers, evaluation, guards and logs.

Dimensions: P prompts, G samples of each, S = P * G sequences, T tokens of all sequences laid end to end.
"""

from __future__ import annotations

import dataclasses
import sys

import torch

from mrl.algorithms.recipes import RECIPES, check_algorithm
from mrl.batch import Batch
from mrl.config.load import load_config
from mrl.config.ppo import PPOConfig
from mrl.config.roles import role_configs
from mrl.data.prompts import PromptDataset, PromptSource
from mrl.data.tokenizer import load_tokenizer
from mrl.engine.atomic_checkpoint import find_checkpoint
from mrl.engine.base import BaseEngine
from mrl.engine.registry import build_engine
from mrl.rollout.base import trajectories_to_batch
from mrl.rollout.native import EngineSampler
from mrl.rollout.rollouts import Rollouts
from mrl.rollout.stops import EndTokens
from mrl.trainers.rl.experience import epoch_order
from mrl.weights.hub import model_folder


def reward(completion: str, row: dict) -> float:
    """Returns 1 for the right answer. row: the data row."""
    return float(completion.strip() == row["answer"])


def grpo_loss(data: Batch, predictions: dict[str, torch.Tensor], ctx: dict) -> tuple[torch.Tensor, dict]:
    """Returns the clipped objective and a KL to the reference, a mean within each sequence (Shao 2024, eq. 3).

    It is a sum over sequences, never a mean: the engine divides by those of the global mini-batch.
    """
    fields, log_probs_T = data.token_fields, predictions["log_probs"]
    ratio_T = torch.exp(log_probs_T - fields["old_log_probs"])
    clipped_T = ratio_T.clamp(1 - ctx["clip_low"], 1 + ctx["clip_high"])
    loss_T = -torch.minimum(ratio_T * fields["advantages"], clipped_T * fields["advantages"])
    if "ref_log_probs" in fields:
        difference_T = log_probs_T - fields["ref_log_probs"]
        loss_T = loss_T + ctx["kl_coef"] * (torch.expm1(-difference_T) + difference_T)
    weights_T = torch.cat([mask / mask.sum() for mask in data.loss_mask.split(data.lengths.tolist())])
    return (loss_T * weights_T).sum(), ctx


def log_probs(engine: BaseEngine, batch: Batch, size: int, ctx: dict) -> torch.Tensor:
    """Returns [T]: log-probs of a rollout's tokens, by mini-batches of `size`, so that the first ratios are exactly 1."""
    parts = []
    engine.set_loss_fn(None)
    with engine.eval_mode():
        for start in range(0, batch.num_sequences, size):
            part = batch.select(range(start, start + size))
            predictions, _ = engine.forward_backward_step(engine.shard_data(part), ctx, forward_only=True)
            parts.append(engine.unshard_data(predictions, part)["log_probs"].cpu())
    return torch.cat(parts).masked_fill(batch.loss_mask == 0, 0.0)


def main(path: str, *overrides: str) -> list[dict[str, float]]:
    """Trains by the config at `path`, with `key=value` over it. Returns a row for each step of this start."""
    config = load_config(path, overrides, PPOConfig)
    recipe, steps, size = check_algorithm(config), config.train.steps, config.mini_batch_size
    ctx = {name: getattr(recipe, name) for name in ("clip_low", "clip_high", "kl_coef")}  # for grpo_loss
    here = dataclasses.replace(RECIPES["grpo"], **ctx, kl_in="none" if recipe.kl_in == "none" else "loss")
    assert recipe == here, f"this loop has the algorithm {here}, and the config asks for {recipe}"
    assert steps is not None and config.rollout.backend == "native", "give train.steps, and rollout.backend native"
    ctx["temperature"] = config.rollout.temperature  # for the engine
    # The data: rows whose prompts are rendered by the tokenizer's chat template.
    folder = model_folder(config.actor.model.path)
    tokenizer = load_tokenizer(folder, chat_template=config.data.chat_template)
    source = PromptSource(PromptDataset(config.data, tokenizer), seed=config.seed, shuffle=config.data.shuffle)

    # The roles, each an engine: the actor trains, and a reference is the model that it started as.
    folders = {"actor": folder} | ({"reference": folder} if recipe.needs_reference else {})
    engines = {role: build_engine(one) for role, one in role_configs(config, folders, recipe).items()}
    actor, reference = engines["actor"], engines.get("reference")
    actor.set_total_steps(steps)
    for engine in engines.values():
        engine.init_model()
    sampler, end_tokens = EngineSampler(actor.generate, tokenizer), EndTokens.of(folder, tokenizer).ids
    rollouts = Rollouts(sampler, tokenizer, config.rollout, seed=config.seed, end_tokens=end_tokens)

    # Resume. A checkpoint has the actor, its optimizer, schedule and random states, and what `state` holds.
    step, rows, checkpoints = 0, [], f"{config.output_dir}/checkpoints"
    if actor.on_main(lambda: find_checkpoint(checkpoints)):
        state = actor.load_checkpoint(checkpoints)
        step = state["step"]
        source.load_state_dict(state["data"])

    while step < steps:
        # Rollout by the actor's own weights, and rewards. The samples of a prompt are neighbours.
        iteration, samples = step // config.steps_per_iteration, config.rollout.samples_per_prompt
        trajectories = rollouts.sample(source.take(config.prompts_per_iteration), step=step + 1, samples=samples)
        rewards_S = torch.tensor([reward(t.text, t.prompt.row) for t in trajectories], dtype=torch.float64)
        # A sample is good if it is better than the others of its prompt.
        advantages_S = torch.cat([(group - group.mean()) / (group.std() + 1e-6) for group in rewards_S.split(samples)])
        # The batch, of which only completions train, with log-probs of the policy that sampled it and of the reference.
        order = epoch_order(config.seed, iteration, 0, len(trajectories))
        batch, advantages_S = trajectories_to_batch(trajectories).select(order), advantages_S[order].float()
        fields = {
            "advantages": advantages_S.repeat_interleave(batch.lengths) * batch.loss_mask,
            "old_log_probs": log_probs(actor, batch, size, ctx),
        }
        if reference is not None:
            fields["ref_log_probs"] = log_probs(reference, batch, size, ctx)
        batch = dataclasses.replace(batch, token_fields=fields)

        # Optimizer steps, each on a part of the rollout; a later epoch has another order.
        actor.set_loss_fn(grpo_loss, denominator="sequences")
        for epoch in range(config.algorithm.epochs):
            order = range(len(trajectories)) if epoch == 0 else epoch_order(config.seed, iteration, epoch, len(order))
            for start in range(0, len(order), size):
                mini_batch = batch.select(order[start : start + size]).with_denominators()
                actor.optimizer_zero_grad()
                with actor.train_mode():
                    _, loss, _ = actor.forward_backward_step(actor.shard_data(mini_batch), ctx)
                grad_norm = actor.optimizer_step()
                actor.lr_scheduler_step()
                step += 1
                rows.append({"reward": float(rewards_S.mean()), "loss": loss, "norm": float(grad_norm)})
                if actor.is_main:
                    print(f"step {step}", *(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
        if step >= steps or step % (config.checkpoint.every or steps) < config.steps_per_iteration:
            state = {"step": step, "data": source.state_dict()}
            actor.save_checkpoint(checkpoints, global_step=step, max_ckpt_to_keep=config.checkpoint.keep, state=state)

    actor.export_hf(f"{config.output_dir}/hf")  # for transformers
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:])
