"""The models of a config that train, each with its loss as engines take it and as plain torch has it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from mrl.algorithms.configured import check_algorithm
from mrl.algorithms.losses import ActorLoss, CriticLoss
from mrl.algorithms.sft import sft_loss
from mrl.check import reference
from mrl.check.layouts import Layout
from mrl.check.reference import TokenLoss, TokenWeights
from mrl.config.command import Part
from mrl.config.ppo import PPOConfig
from mrl.config.roles import role_configs
from mrl.config.schema import MicroBatchConfig, OptimizerConfig, RoleConfig, SFTConfig
from mrl.engine.base import LossFn
from mrl.trainers import sft

TRAINED = ("", "actor", "critic")


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that trains."""

    part: Part
    config: RoleConfig  # as the run builds it
    loss_fn: LossFn
    denominator: str
    token_loss: TokenLoss
    token_weights: TokenWeights = reference.token_mean
    temperature: float = 1.0

    @property
    def name(self) -> str:
        return self.part.role or "model"

    @property
    def optimizer(self) -> OptimizerConfig:
        """AdamW as configured, at its peak rate: a warm-up's first step may change nothing."""
        assert self.config.optimizer is not None
        return dataclasses.replace(
            self.config.optimizer, schedule="constant", warmup_steps=0, min_lr=0.0, decay_steps=None
        )

    @property
    def has_router_losses(self) -> bool:
        return bool(self.config.engine.moe.aux_loss or self.config.engine.moe.z_loss)

    def on(self, layout: Layout, *, path: str, init: Any, dtype: Any, micro_batch: MicroBatchConfig) -> RoleConfig:
        """Returns what an engine of a layout is built from. path, init: of the folder of the check."""
        config, lora = self.config, self.config.model.lora
        replicate = config.engine.fsdp.replicate
        if layout.processes % replicate or layout.processes == replicate:
            replicate = 1
        lora = lora and dataclasses.replace(lora, dropout=0.0)
        return dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, path=path, init=init, dtype=dtype, lora=lora),
            engine=dataclasses.replace(
                config.engine, parallel=layout.parallel, micro_batch=micro_batch,
                fsdp=dataclasses.replace(config.engine.fsdp, replicate=replicate),
            ),
            optimizer=self.optimizer,
        )  # fmt: skip


def subjects_of(config: SFTConfig | PPOConfig, parts: list[Part], folders: dict[str, str]) -> list[Subject]:
    """Returns the models that train. folders: that each role's model.path stands for."""
    by_role = {part.role: part for part in parts}
    if isinstance(config, SFTConfig):
        made = sft.role_config(config, folders[""])
        return [Subject(by_role[""], made, sft_loss, "tokens", reference.negative_log_prob)]
    recipe = check_algorithm(config)
    configs = role_configs(config, folders, recipe)
    length, how = config.rollout.max_new_tokens, recipe.aggregation
    weights: dict[str, TokenWeights] = {
        "token_mean": reference.token_mean,
        "sequence_mean": reference.sequence_mean,
        "fixed_length": functools.partial(reference.fixed_length, length=length),
    }
    actor = ActorLoss(aggregation=how, fixed_length=length, objective="policy_gradient")
    critic = CriticLoss(aggregation=how, fixed_length=length)
    temperature = config.rollout.temperature
    subjects = [
        Subject(
            by_role["actor"], configs["actor"], actor, actor.denominator, reference.policy_gradient, weights[how],
            temperature,
        )
    ]  # fmt: skip
    if recipe.needs_critic:
        subjects.append(
            Subject(
                by_role["critic"], configs["critic"], critic, critic.denominator, reference.squared_error, weights[how]
            )
        )
    return subjects
