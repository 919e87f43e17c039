"""Checks the step of `mrl ppo`: actor and critic on completions that transformers samples.

Advantages and returns are noise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch

from mrl.algorithms.losses import ActorLoss, CriticLoss
from mrl.algorithms.recipes import check_algorithm
from mrl.check import reference
from mrl.check.command import CommandCheck
from mrl.check.folder import CheckedModel
from mrl.check.reference import TokenWeights
from mrl.check.rows import Rows, counted
from mrl.check.subject import Subject
from mrl.config.command import Part
from mrl.config.ppo import PPOConfig
from mrl.config.roles import ROLES, role_configs
from mrl.data.dataset import Example
from mrl.data.mixture import train_rows
from mrl.data.prompts import PromptDataset, PromptSource
from mrl.data.tokenizer import load_tokenizer
from mrl.rollout.base import Trajectory, trajectories_to_batch
from mrl.weights.hf_config import read_hf_config, vocab_size_of

NEW_TOKENS = 24
"""Tokens that the actor samples after each prompt; rollout.max_new_tokens if that is less."""


class CheckedPPO(CommandCheck[PPOConfig]):
    def subjects(self, config: PPOConfig, parts: Sequence[Part], folders: Mapping[str, str]) -> list[Subject]:
        by_role = {part.role: part for part in parts}
        recipe = check_algorithm(config)
        # what does not train is not checked, so any folder serves
        configs = role_configs(config, dict.fromkeys(ROLES, folders["actor"]) | dict(folders), recipe)
        length, how = config.rollout.max_new_tokens, recipe.aggregation
        weights: dict[str, TokenWeights] = {
            "token_mean": reference.token_mean,
            "sequence_mean": reference.sequence_mean,
            "fixed_length": functools.partial(reference.fixed_length, length=length),
        }
        actor = ActorLoss(aggregation=how, fixed_length=length, objective="policy_gradient")
        loss = reference.Loss(reference.policy_gradient, weights[how], temperature=config.rollout.temperature)
        subjects = [Subject(by_role["actor"], configs["actor"], actor, actor.denominator, loss)]
        if "critic" in by_role:
            critic = CriticLoss(aggregation=how, fixed_length=length)
            loss = reference.Loss(reference.squared_error, weights[how], head="value")
            subjects.append(Subject(by_role["critic"], configs["critic"], critic, critic.denominator, loss))
        return subjects

    def rows(
        self, config: PPOConfig, subject: Subject, model: CheckedModel, *, sequences: int, length: int, device: str
    ) -> Rows:
        actor = reference.load(model.path).to(device).eval()
        return _completions(config, subject.config.model.path, actor, sequences=sequences, length=length)


def _completions(
    config: PPOConfig, folder: str, model: torch.nn.Module, *, sequences: int, length: int
) -> Rows:  # fmt: skip
    """Returns prompts with completions that `model` samples. folder: the actor's, with its tokenizer."""
    tokenizer = load_tokenizer(folder, config.actor.model.trust_remote_code, config.data.chat_template)
    vocab_size = vocab_size_of(read_hf_config(folder))
    dataset = train_rows(config.data, lambda data: PromptDataset(data, tokenizer, vocab_size=vocab_size))
    samples = min(config.rollout.samples_per_prompt, 2)
    prompts = PromptSource(dataset, seed=config.seed, shuffle=config.data.shuffle).take(max(1, sequences // samples))
    new = min(config.rollout.max_new_tokens, NEW_TOKENS)
    room = max(1, length - new)
    trajectories = []
    torch.manual_seed(config.seed)
    for prompt in prompts:
        ids = prompt.tokens[-room:]
        for sample, completion in enumerate(_sampled(model, ids, samples, new, config.rollout.temperature)):
            mask = [0] * len(ids) + [1] * len(completion)
            log_probs = [0.0] * len(mask)
            trajectories.append(Trajectory(prompt, sample, ids + completion, mask, log_probs, "", False))
    generator = torch.Generator().manual_seed(config.seed)
    fields = [
        {name: torch.randn(len(t.tokens) - 1, generator=generator) for name in ("advantages", "returns")}
        for t in trajectories
    ]
    batch = trajectories_to_batch(trajectories)
    noise = {name: torch.cat([of[name] for of in fields]) for name in ("advantages", "returns")}
    batch = dataclasses.replace(batch, token_fields={**noise, "old_values": torch.zeros(batch.num_tokens)})
    words = f"data.train: the first {len(prompts)} prompts, {samples} completions of each of at most {new} tokens"
    if any(len(prompt.tokens) > room for prompt in prompts):
        words += f", of each prompt the last {room} tokens"
    examples = [Example(t.tokens, t.mask, False) for t in trajectories]
    return Rows(examples, fields, batch, counted(f"{words}; advantages and returns are noise", batch))


@torch.no_grad()
def _sampled(
    model: torch.nn.Module, ids: list[int], samples: int, new: int, temperature: float
) -> list[list[int]]:  # fmt: skip
    """Returns completions of a prompt, drawn by transformers."""
    device = next(model.parameters()).device
    made = model.generate(  # type: ignore[operator]
        torch.tensor([ids], device=device), do_sample=True, temperature=temperature, max_new_tokens=new, top_k=0,
        num_return_sequences=samples, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return [row[len(ids) :].tolist() for row in made]


CHECKED = CheckedPPO()
