"""`mrl ppo`: reinforcement learning; `algorithm.name` chooses ppo, grpo and others."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mrl.config.command import (
    SAMPLING_RANKS,
    Distill,
    Part,
    Phase,
    Phases,
    Server,
    TrainingCommand,
    describe_divergence,
    describe_layout,
    describe_micro_batch,
)
from mrl.config.ppo import PPOConfig
from mrl.config.rewards import FunctionReward
from mrl.config.roles import (
    TRAINED,
    describe_sampling,
    engine_of,
    is_served,
    model_of,
    possible_roles,
    reference_is_base,
    rewrite_role_error_keys,
    roles_of,
    sampling_engine,
    section_of,
    teachers_of,
)
from mrl.config.schema import JSD_BETA, RoleConfig
from mrl.errors import ConfigError, ModelError, quoted
from mrl.parallel import ParallelDims
from mrl.words import pluralize

ACTOR_FALLBACKS = (
    *(f"{role}.{key}" for role in ("critic", "reference", "reward") for key in ("engine", "model.dtype")),
    "critic.model.path", "reference.model.path",
)  # fmt: skip


class PPO(TrainingCommand[PPOConfig]):
    name = "ppo"
    help = """Train a model by reinforcement learning: ppo, grpo and others, as algorithm.name in the YAML file CONFIG
    says.

    KEY=VALUE sets any config key, as in algorithm.name=grpo; `mrl config ppo` lists them.
    """
    examples = """
        mrl ppo grpo.yaml
        mrl ppo grpo.yaml algorithm.name=ppo critic.engine.backend=fsdp
        mrl ppo grpo.yaml rollout.samples_per_prompt=16 --nproc 8
        mrl ppo grpo.yaml --dry-run"""
    root = PPOConfig
    trainer = "mrl.trainers.ppo:run"
    task = "mrl.trainers.rl.prompts:PromptsTask"
    checked = "mrl.check.steps:PPO"
    order = 2
    generates = merges_adapters = True
    null_fallbacks = {key: f"actor.{key.partition('.')[2]}" for key in ACTOR_FALLBACKS}

    def check(self, config: PPOConfig) -> None:
        from mrl.config.ppo_checks import check_ppo
        from mrl.config.teacher_checks import check_opd

        check_ppo(config)
        check_opd(config)

    def null_values(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        from mrl.algorithms.recipes import RECIPES

        recipe = RECIPES.get(data["algorithm"]["name"])  # a resume asks before the name is checked
        parts = {} if recipe is None else dataclasses.asdict(recipe)
        if data["rollout"].get("async_level"):
            parts["correction"] = "truncate"
        return {f"algorithm.{name}": value for name, value in parts.items()} | {
            "algorithm.mini_batch_size": data["train"]["global_batch_size"], "algorithm.distill.beta": JSD_BETA,
        }  # fmt: skip

    def parts(self, config: PPOConfig) -> list[Part]:
        return [
            Part(
                role, model_of(config, role), engine_of(config, role), "value" if role == "critic" else "lm",
                getattr(config, role).optimizer if role in TRAINED else None,
            )
            for role in possible_roles(config) if not is_served(config, role)
        ]  # fmt: skip

    def needed(self, config: PPOConfig) -> Sequence[str]:
        from mrl.algorithms.recipes import check_algorithm  # it imports torch

        return roles_of(config, check_algorithm(config))

    def rewrite_error_keys(self, config: PPOConfig, role: str) -> contextlib.AbstractContextManager[None]:
        return rewrite_role_error_keys(config, role)

    def longest(self, config: PPOConfig) -> tuple[int, str]:
        prompt, new = config.data.max_prompt_length, config.rollout.max_new_tokens
        return config.max_length, f"data.max_prompt_length {prompt} + rollout.max_new_tokens {new}"

    def rows_of_batch(self, config: PPOConfig) -> int:
        return config.prompts_per_iteration

    def smallest_batch(self, config: PPOConfig, role: str) -> tuple[str, int]:
        """Returns a mini-batch, or the rollout where the role never trains."""
        if role in TRAINED and config.algorithm.mini_batch_size is not None:
            return "algorithm.mini_batch_size", config.algorithm.mini_batch_size
        return super().smallest_batch(config, role)

    def processes_beside(self, config: PPOConfig) -> int:
        return config.rollout.ranks

    def parts_beside(self, config: PPOConfig, parts: Sequence[Part]) -> Sequence[Part]:
        if not config.rollout.ranks:
            return ()
        actor = next(part for part in parts if part.role == "actor")
        return [dataclasses.replace(actor, engine=sampling_engine(config), optimizer=None)]

    def check_processes(self, config: PPOConfig, parts: Sequence[Part], world_size: int) -> None:
        from mrl.config.ppo_checks import check_inside, check_stop_tokens
        from mrl.weights.hf_config import vocab_size_of  # it imports torch

        for part in parts:
            if part.role == "reward":
                _check_reward_model(config.reward.model.path, part.hf)
        actor = next(part for part in parts if part.role == "actor")
        check_inside(config.rollout, config.rollout.ranks or world_size, actor.hf)
        check_stop_tokens(config.rollout, vocab_size_of(actor.hf))
        if config.rollout.vllm_inside:
            from mrl.rollout.vllm import check_sampling  # it imports torch

            check_sampling(config.rollout)
        lora = config.actor.model.lora
        if config.rollout.server.lora == "adapter" and lora is not None and os.path.isdir(actor.model.path):
            from mrl.rollout.adapters import AdapterTraining, check_adapter_training

            check_adapter_training(AdapterTraining(actor.model.path, lora))  # of a hub id, the run looks

    def check_files(self, config: PPOConfig) -> None:
        """Checks that files with the user's code exist, and rollouts to replay."""
        functions = config.rewards.functions if config.rewards is not None else ()
        specs = {
            f"rewards.functions[{i}].function": reward.function
            for i, reward in enumerate(functions)
            if isinstance(reward, FunctionReward)
        }
        if config.rollout.environment is not None:
            specs["rollout.environment"] = config.rollout.environment
        for key, spec in specs.items():
            path = spec.rpartition(":")[0]
            if not os.path.isfile(path):
                raise ConfigError(
                    key, quoted(spec), f"names the file {path}, which does not exist", "give path.py:name"
                )
        replayed = config.rollout.path
        if replayed is not None and not os.path.isdir(os.path.expanduser(replayed)):
            fix = "give the samples folder of a run, as runs/demo/samples"
            raise ConfigError("rollout.path", quoted(replayed), "is no folder", fix)

    def check_code(self, config: PPOConfig) -> None:
        """Loads the reward functions and the environment."""
        from mrl.rollout.environment import load_environment

        self.check_rows(config, ())
        if config.rollout.environment is not None:
            load_environment(config.rollout.environment)

    def check_rows(self, config: PPOConfig, first: Sequence[tuple[dict[str, Any], str]]) -> None:
        """Loads the reward functions and checks the fields that they read, as a run does when it starts."""
        from mrl.rewards.functions import check_rewards

        if config.rewards is not None:
            check_rewards(config.rewards, first)

    def describe(self, config: PPOConfig, parts: Sequence[Part], layouts: Sequence[ParallelDims]) -> list[str]:
        from mrl.algorithms.recipes import configured_recipe, in_words

        train, per_iteration = config.train, config.steps_per_iteration
        lines = [
            f"{part.role}: {part.engine.backend} {describe_layout(dims)}, micro-batches of "
            f"{describe_micro_batch(part.engine, config.max_length)}"
            for part, dims in zip(parts, layouts, strict=True)
        ]
        lines += [
            f"{role}: at {section_of(config, role).server.url}"
            for role in teachers_of(config)
            if is_served(config, role)
        ]
        lines.append(
            f"algorithm: {in_words(configured_recipe(config.algorithm, async_level=config.rollout.async_level))}"
        )
        if config.algorithm.distill is not None:
            kind, ids = describe_divergence(config.algorithm.distill)
            at = f"at temperature {config.rollout.temperature:g}"
            lines.append(f"distill: {kind} to the teacher over {ids} {at}")
        lines.append(
            f"iteration: {config.prompts_per_iteration} prompts x {config.rollout.samples_per_prompt} samples, trained "
            f"on in {per_iteration} steps of {config.mini_batch_size} sequences"
        )
        if train.steps is not None:
            length = f"{train.steps} steps, {train.steps // per_iteration} iterations"
        else:
            length = (
                f"{pluralize(1 if train.epochs is None else train.epochs, 'epoch')} of the prompts, in whole iterations"
            )
        lines.append(f"length: {length}")
        gpu = config.actor.engine.device != "cpu"
        sampling = describe_sampling(config, layouts[0].world_size, gpu=gpu)
        if sampling is not None:
            lines.append(sampling)
        return lines

    def engine_config(self, config: PPOConfig, part: Part) -> RoleConfig:
        made = super().engine_config(config, part)
        return dataclasses.replace(made, head="value") if part.role == "reward" else made

    def phases(self, config: PPOConfig) -> Phases:
        from mrl.algorithms.recipes import configured_recipe

        recipe, rollout, size = (
            configured_recipe(config.algorithm, async_level=config.rollout.async_level),
            config.rollout,
            config.train.global_batch_size,
        )
        found, keys = [], config.algorithm.distill
        distill = None if keys is None else Distill(keys.loss, keys.resolved_beta, keys.top_k, rollout.temperature)
        if rollout.samples_itself:
            same = ("prefill_tokens", "temperature", "top_k", "top_p", "min_p")
            limits = {"cache_tokens": rollout.cache_limit} | {name: getattr(rollout, name) for name in same}
            name, of = ("sampling on other ranks", SAMPLING_RANKS) if rollout.ranks else ("sampling", "actor")
            found.append(Phase(name, of, "sample", size, **limits))
        elif rollout.vllm_inside:
            fraction = rollout.server.memory_fraction
            found.append(Phase("new weights to vLLM", "actor", "sample", size, handed_to_tp=rollout.server.tp))
            found.append(Phase("sampling by vLLM", "actor", "sample", size, engine_fraction=fraction))
        for role in self.needed(config):
            if is_served(config, role):
                continue
            of = "actor" if role == "reference" and reference_is_base(config) else role
            # the first update's own forward gives old log-probs where guards have found that both agree to the bit
            both = config.steps_per_iteration > 1 or not config.train.guards
            if role != "actor" or both or recipe.kl_in == "reward":
                of_teacher = distill if role.startswith("reference") else None
                # a teacher is asked a mini-batch at a time
                parts = max(1, size // config.mini_batch_size) if of_teacher else 1
                found.append(Phase(f"forward of the {role}", of, "forward", size, parts, distill=of_teacher))
        entropy: Literal["detached", "differentiable"] = "differentiable" if recipe.entropy_coef else "detached"
        for role in ("actor", "critic") if recipe.needs_critic else ("actor",):
            of_all = size * config.algorithm.epochs
            found.append(
                Phase(
                    f"update of the {role}", role, "train", of_all, steps=config.steps_per_iteration,
                    distill=distill if role == "actor" else None,
                )
            )  # fmt: skip
        served_tokens = size * rollout.max_new_tokens if rollout.async_level else 0
        return Phases(tuple(found), config.train.offload_idle != "never", entropy, served_tokens)

    def server(self, config: PPOConfig) -> Server | None:
        rollout = config.rollout
        if rollout.backend not in ("vllm", "sglang"):
            return None
        return Server(
            rollout.backend, config.actor.model, config.max_length, rollout.temperature, "rollout.server.urls"
        )


def _check_reward_model(path: str | None, hf: Mapping[str, Any]) -> None:
    """Raises ModelError for a language model. An adapter's config.json is that of its base, which may be one."""
    from mrl.weights.adapter_folder import is_adapter

    kinds = [
        name for name in hf.get("architectures") or () if name.endswith(("ForCausalLM", "ForConditionalGeneration"))
    ]
    if path is not None and kinds and not is_adapter(pathlib.Path(path)):
        fix = "give a sequence classifier with one label, as mrl rm makes"
        raise ModelError("reward.model.path", quoted(path), f"is a language model ({kinds[0]})", fix)


COMMAND = PPO()
