"""GRPO as a program of your own: sample, score, compare within groups, train. Runs on either engine.

    python examples/rl_loop.py                                   megatron, one process
    torchrun --nproc-per-node 2 examples/rl_loop.py megatron 2   megatron, tensor parallel over two
    torchrun --nproc-per-node 2 examples/rl_loop.py fsdp         FSDP2 over two

A tiny random model learns to count: its reward is the share of its tokens that are one more than the token before them.
Every layout prints the same numbers. Left out is what `mrl ppo` is for: text and chat templates, rewards in processes of
their own, evaluation, checkpoints and resume. Loss and advantages stand here in full; mrl.algorithms.recipes has them and
those of nine other algorithms as functions.

Dimensions: P prompts, G samples of each, S = P * G sequences, T tokens of all sequences laid end to end.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import tempfile

import torch
from transformers import Qwen3Config

from mrl.batch import Batch, make_batch
from mrl.config.schema import EngineConfig, ModelConfig, OptimizerConfig, ParallelConfig, RoleConfig
from mrl.engine.base import BaseEngine, GenerateRequest
from mrl.engine.registry import build_engine
from mrl.engine.sampling import SamplingKey, SamplingParams

VOCABULARY, NEW_TOKENS = 16, 8
P, G = 8, 8
ITERATIONS, MINI_BATCHES = 25, 2  # two optimizer steps on each rollout
TEMPERATURE, CLIP, KL_COEF = 1.0, 0.2, 0.001


def reward(prompt: list[int], completion: list[int]) -> float:
    """The share of the tokens that count on from the one before."""
    before = [*prompt[-1:], *completion[:-1]]
    return sum(token == (last + 1) % VOCABULARY for last, token in zip(before, completion, strict=True)) / NEW_TOKENS


def grpo_loss(data: Batch, predictions: dict[str, torch.Tensor], ctx: dict) -> tuple[torch.Tensor, dict]:
    """Shao 2024, eq. 3: the clipped objective and the KL to the reference (k3), a mean within each sequence.

    It is a sum over the sequences of a micro-batch, never a mean: the engine divides by those of the global mini-batch.
    """
    fields, log_probs_T = data.token_fields, predictions["log_probs"]
    ratio_T = torch.exp(log_probs_T - fields["old_log_probs"])
    clipped_T = ratio_T.clamp(1 - CLIP, 1 + CLIP)
    policy_T = torch.max(-ratio_T * fields["advantages"], -clipped_T * fields["advantages"])

    to_reference_T = fields["ref_log_probs"] - log_probs_T
    kl_T = torch.exp(to_reference_T) - to_reference_T - 1

    loss_T = (policy_T + KL_COEF * kl_T) * data.loss_mask
    loss_sum = sum(part.sum() / mask.sum() for part, mask in zip(
        loss_T.split(data.lengths.tolist()), data.loss_mask.split(data.lengths.tolist()), strict=True
    ))  # fmt: skip
    return loss_sum, ctx


def make_engine(folder: str, backend: str, tp: int) -> BaseEngine:
    """An engine with a model that starts from random weights, the same for the same seed."""
    engine = build_engine(
        RoleConfig(
            model=ModelConfig(path=folder, init="random", dtype="float32"),
            engine=EngineConfig(backend=backend, parallel=ParallelConfig(tp=tp)),
            optimizer=OptimizerConfig(lr=1e-2, schedule="constant", weight_decay=0.0),
            total_steps=ITERATIONS * MINI_BATCHES,
        )
    )
    engine.init_model()
    return engine


def sample(actor: BaseEngine, prompts: list[list[int]], iteration: int) -> list[list[int]]:
    """G completions of each prompt, [S] prompt-major: a function of the keys and the weights, on every rank the same."""
    requests = [
        GenerateRequest(
            prompt,
            max_new_tokens=NEW_TOKENS,
            sampling=SamplingParams(temperature=TEMPERATURE),
            key=SamplingKey(seed=0, step=iteration, prompt=p, sample=g),
        )
        for p, prompt in enumerate(prompts)
        for g in range(G)
    ]
    return [completion.tokens for completion in actor.generate(requests)]


def log_probs(engine: BaseEngine, batch: Batch) -> torch.Tensor:
    """[T]: of each token of a whole batch, by the engine's weights, without gradients."""
    engine.set_loss_fn(None)
    with engine.eval_mode():
        share, ctx = engine.shard_data(batch), {"temperature": TEMPERATURE}
        predictions, _ = engine.forward_backward_step(share, ctx, forward_only=True)
    return engine.unshard_data(predictions, batch)["log_probs"]


def main(backend: str = "megatron", tp: int = 1) -> list[float]:
    """Trains a tiny random model. Returns the mean reward of each iteration, the same on every rank."""
    numbers, mean_rewards = random.Random(0), []
    with tempfile.TemporaryDirectory() as folder:
        Qwen3Config(
            architectures=["Qwen3ForCausalLM"], vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        ).save_pretrained(folder)  # fmt: skip
        actor, reference = make_engine(folder, backend, tp), make_engine(folder, backend, tp)

    for iteration in range(ITERATIONS):
        # Rollout and rewards.
        prompts = [[numbers.randrange(VOCABULARY) for _ in range(3)] for _ in range(P)]
        completions = sample(actor, prompts, iteration)
        rewards_S = [reward(prompts[s // G], completion) for s, completion in enumerate(completions)]

        # Advantages: a sample is good where it is better than the others of its prompt.
        rewards_PG = torch.tensor(rewards_S).view(P, G)
        advantages_PG = (rewards_PG - rewards_PG.mean(1, keepdim=True)) / (rewards_PG.std(1, keepdim=True) + 1e-6)

        # The batch, of which only completions train; log-probs of the policy that sampled it, and of the reference.
        sequences = [prompts[s // G] + completion for s, completion in enumerate(completions)]
        masks = [[0.0] * 3 + [1.0] * len(completion) for completion in completions]
        batch = make_batch(sequences, masks)
        fields = {
            "advantages": advantages_PG.flatten().repeat_interleave(batch.lengths) * batch.loss_mask,
            "old_log_probs": log_probs(actor, batch),
            "ref_log_probs": log_probs(reference, batch),
        }
        batch = dataclasses.replace(batch, token_fields=fields)

        # Optimizer steps, each on a part of the rollout.
        actor.set_loss_fn(grpo_loss, denominator="sequences")
        order = numbers.sample(range(P * G), P * G)
        for part in range(MINI_BATCHES):
            mini_batch = batch.select(order[part::MINI_BATCHES]).with_denominators()
            actor.optimizer_zero_grad()
            with actor.train_mode():
                _, loss, _ = actor.forward_backward_step(actor.shard_data(mini_batch), {"temperature": TEMPERATURE})
            grad_norm = actor.optimizer_step()
            actor.lr_scheduler_step()

        mean_rewards.append(float(rewards_PG.mean()))
        if actor.is_main:
            print(f"iteration {iteration + 1:2}  reward {mean_rewards[-1]:.3f}  loss {loss:+.4f}  norm {grad_norm:.3f}")
    return mean_rewards


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
