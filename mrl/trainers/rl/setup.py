"""From a config to a Trainer: models, roles, data, sampler, rewards, each made once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl import metrics
from mrl.algorithms.configured import check_algorithm
from mrl.algorithms.recipes import Recipe, kl_controller
from mrl.config.checks import check_batch
from mrl.config.load import to_dict
from mrl.config.ppo import PPOConfig
from mrl.config.ppo_checks import check_schedules
from mrl.config.recipes import OPD_NAMES
from mrl.config.roles import (
    engine_of,
    frozen_roles,
    is_served,
    model_of,
    reference_is_base,
    rewrite_role_error_keys,
    role_configs,
    roles_of,
    teacher_names,
)
from mrl.convert.exporting import write_merged_copy
from mrl.converters.adapter_folder import is_adapter
from mrl.converters.hf_config import read_hf_config, vocab_size_of
from mrl.converters.hub import model_fingerprint, model_folder
from mrl.data.dataset import RowDataset
from mrl.data.mixture import MixedDataset, eval_rows, notes_of_rows, train_rows
from mrl.data.prompts import Prompt, PromptDataset, PromptSource, first_prompts
from mrl.data.stream import Report
from mrl.data.tokenizer import load_tokenizer
from mrl.engine.base import BaseEngine
from mrl.engine.collective import is_main, join_processes, on_main
from mrl.engine.registry import build_engine
from mrl.mcore_models.platform import device_type
from mrl.roles.dispatch import WorkerDispatch
from mrl.roles.reward_model import RewardModel
from mrl.rollout.base import Sampler, TrajectorySource
from mrl.rollout.kept import KeptRollouts
from mrl.rollout.recorded import RecordedRollouts
from mrl.rollout.rollouts import Rollouts
from mrl.rollout.stops import EndTokens
from mrl.trainers.common import say_all, say_left_out
from mrl.trainers.console import Console, open_console
from mrl.trainers.mixture_length import length_of_mixture
from mrl.trainers.rl.collect import Collector, take_together
from mrl.trainers.rl.evaluation import Evaluation
from mrl.trainers.rl.notices import TokenLimit
from mrl.trainers.rl.samplers import SyncedSampler, make_sampler
from mrl.trainers.rl.scoring import Scoring
from mrl.trainers.rl.show import show_evaluation
from mrl.trainers.rl.state import Trainer
from mrl.trainers.rl.teachers import check_vocabularies, references_of
from mrl.trainers.run_directory import RunDirectory
from mrl.trainers.run_lock import RunLock
from mrl.trainers.saves import CheckpointSaver, check_background
from mrl.trainers.signals import StopSignal
from mrl.trainers.task import FrozenModel
from mrl.words import pluralize


@contextlib.contextmanager
def trainer_of(config: PPOConfig) -> Iterator[Trainer]:
    """Everything that the run uses, with its directory locked; all of it ended afterwards.

    Models are built later, by `dispatch.init_model`. Raises UserError where something that the config names cannot be
    used.
    """
    metrics.check_packages(config.log)
    console = open_console(config.log.console, enabled=is_main(), every=config.log.every)
    with contextlib.closing(console), _trainer_of(config, console) as trainer:
        yield trainer


@contextlib.contextmanager
def _trainer_of(config: PPOConfig, console: Console) -> Iterator[Trainer]:
    console.doing("reading the models' folders and the data")
    recipe = check_algorithm(config)
    folders = {role: _model_folder(config, role) for role in roles_of(config, recipe)}
    vocab_size = vocab_size_of(read_hf_config(folders["actor"]))  # first: a wrong config.json fails the tokenizer too
    tokenizer = load_tokenizer(folders["actor"], config.actor.model.trust_remote_code, config.data.chat_template)
    check_vocabularies(config, folders, tokenizer)
    source, held_out = _rows(config, tokenizer, vocab_size)
    say_all(console, notes_of_rows(source.dataset, held_out))
    engines = _engines(config, folders, recipe)
    directory = RunDirectory(pathlib.Path(config.output_dir))
    with contextlib.ExitStack() as ends:
        dispatch = _dispatch(config, folders, engines)
        lock = RunLock(directory.path)
        ends.callback(lock.release)
        dispatch.on_main(lock.acquire)  # before anything of another run there could be touched
        if config.actor.model.lora is not None and "reference" in engines and config.algorithm.name not in OPD_NAMES:
            console.say(f"reference: is a second copy of the model, {_why_not_base(config)}")
        total_steps = _length(config, source, console)
        _set_total_steps(engines, total_steps, critic_warmup=config.algorithm.critic_warmup)
        first = [row for rows in (source.dataset, *held_out.values()) for row in rows.first_rows()]
        scores = _scoring(config, dispatch, folders, first, directory, console, total_steps=total_steps)
        ends.callback(scores.close)
        end_with = EndTokens.of(folders["actor"], tokenizer, source.dataset.encoders())
        rollouts, sampler = _rollouts(config, dispatch, tokenizer, folders["actor"], end_with, directory, console)
        ends.callback(rollouts.close)
        if sampler is not None:
            ends.callback(sampler.close)
        says = "the run saves and stops at the end of the rollout or step at hand" if console.shows else None
        stop = ends.enter_context(StopSignal(says))
        collector = Collector(
            lambda count: take_together(source, count, dispatch), rollouts, scores,
            prompts=config.prompts_per_iteration, samples=config.rollout.samples_per_prompt,
            rounds=config.algorithm.max_sampling_rounds if recipe.dynamic_sampling else None,
            greedy_answers=recipe.needs_greedy_answer, doing=console.doing,
        )  # fmt: skip
        evaluation = _evaluation(config, held_out, rollouts, scores, dispatch, console, directory, stop)
        yield Trainer(
            saves=CheckpointSaver(dispatch.device),
            config=config,
            recipe=recipe,
            total_steps=total_steps,
            folders=folders,
            fingerprints=dispatch.on_main(lambda: _fingerprints(config, folders)),
            dispatch=dispatch,
            source=source,
            collector=collector,
            sampling=SyncedSampler(sampler, dispatch, beside=config.rollout.backend not in ("native", "recorded")),
            references=references_of(config, folders, recipe, dispatch),
            kl=kl_controller(recipe),
            evaluation=evaluation,
            directory=directory,
            console=console,
            stop=stop,
            exact_sampler=rollouts.exact,
            same_reference=_same_reference(config, folders),
            chat_template=tokenizer.chat_template if config.data.chat_template is not None else None,
            ends=end_with,
            token_limit=TokenLimit(max_new_tokens=config.rollout.max_new_tokens),
        )


def _rows(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None
) -> tuple[PromptSource, dict[str, RowDataset[Prompt]]]:
    """Returns the prompts of data.train, and those of data.eval by name."""
    make = functools.partial(PromptDataset, tokenizer=tokenizer, vocab_size=vocab_size)
    prompts = train_rows(config.data, functools.partial(make, teachers=teacher_names(config)))
    source = PromptSource(prompts, seed=config.seed, shuffle=config.data.shuffle)
    return source, eval_rows(config.data, functools.partial(make, part="eval"))


def _model_folder(config: PPOConfig, role: str) -> str:
    model = model_of(config, role)
    with rewrite_role_error_keys(config, role):
        adapter = pathlib.Path(model.path).expanduser()
        if is_adapter(adapter):
            join_processes(device_type(engine_of(config, role).device))  # one of them merges
            return on_main(lambda: write_merged_copy(adapter, pathlib.Path(config.output_dir, "merged")))
        return model_folder(model.path, weights=model.init == "pretrained" and not is_served(config, role))


def _fingerprints(config: PPOConfig, folders: Mapping[str, str]) -> dict[str, dict[str, str]]:
    frozen = frozen_roles(config)
    return {
        role: FrozenModel(folder, is_read=not is_served(config, role)).fingerprint()
        if role in frozen
        else model_fingerprint(folder)
        for role, folder in folders.items()
    }


def _engines(config: PPOConfig, folders: Mapping[str, str], recipe: Recipe) -> dict[str, BaseEngine]:
    """Returns the engines of the roles, none of which has a model yet."""
    engines: dict[str, BaseEngine] = {}
    for role, role_config in role_configs(config, folders, recipe).items():
        with rewrite_role_error_keys(config, role):
            engines[role] = build_engine(role_config)
    by_key = {f"{role}.engine.backend": engine for role, engine in engines.items()}
    check_background(config.checkpoint.background, by_key)
    return engines


def _dispatch(config: PPOConfig, folders: Mapping[str, str], engines: Mapping[str, BaseEngine]) -> WorkerDispatch:
    bases = {"reference": "actor"} if "reference" in folders and reference_is_base(config) else {}
    offload_idle = _offload_idle(config, engines["actor"])
    return WorkerDispatch(engines, offload_idle=offload_idle, constant=frozen_roles(config), bases=bases)


def _offload_idle(config: PPOConfig, actor: BaseEngine) -> bool:
    """Returns whether what a role holds waits on the host while another one works."""
    if config.train.offload_idle == "auto":
        return actor.device.type == "cuda"
    return config.train.offload_idle == "always"


def _length(config: PPOConfig, source: PromptSource, console: Console) -> int:
    """Optimizer steps of the run: train.steps, or as many iterations as train.epochs passes over the prompts need."""
    train, per_iteration, rows = config.train, config.steps_per_iteration, len(source.dataset)
    check_batch(train.global_batch_size, config.prompts_per_iteration, rows)
    if isinstance(source.dataset, MixedDataset):
        return length_of_mixture(
            config, source.dataset, console, rows=config.prompts_per_iteration, each=per_iteration,
            check=functools.partial(check_schedules, config),
        )  # fmt: skip
    if train.steps is not None:
        return train.steps
    epochs = 1.0 if train.epochs is None else train.epochs
    usable = source.usable()
    iterations = max(1, math.ceil(Fraction(str(epochs)) * usable / config.prompts_per_iteration))
    steps = iterations * per_iteration
    length = f"the {pluralize(steps, 'step')} of {pluralize(epochs, 'epoch')}"
    made = f"{pluralize(iterations, 'iteration')}: {length}"
    console.say(f"data.train: {usable} of its {pluralize(rows, 'row')} can be used, which makes {made}")
    check_schedules(config, steps, length)
    return steps


def _set_total_steps(engines: Mapping[str, BaseEngine], total_steps: int, *, critic_warmup: int) -> None:
    """Gives the learning-rate schedules of the roles that train their lengths."""
    engines["actor"].set_total_steps(total_steps - critic_warmup)
    if "critic" in engines:
        engines["critic"].set_total_steps(total_steps)


def _reward_model(config: PPOConfig, dispatch: WorkerDispatch, folders: Mapping[str, str]) -> RewardModel | None:
    if "reward" not in folders:
        return None
    with rewrite_role_error_keys(config, "reward"):
        own = load_tokenizer(folders["reward"], config.actor.model.trust_remote_code)
    return RewardModel(dispatch, own, system=config.data.system)


def _scoring(
    config: PPOConfig,
    dispatch: WorkerDispatch,
    folders: Mapping[str, str],
    first: Sequence[tuple[dict[str, Any], str]],
    directory: RunDirectory,
    console: Console,
    *,
    total_steps: int,
) -> Scoring:
    console.doing("starting the reward functions")
    return Scoring(
        config.rewards, reports=directory.path / "failed", on_main=dispatch.on_main, say=console.say,
        first=first, reward_model=_reward_model(config, dispatch, folders),
        weight=config.reward.weight, total_steps=total_steps,
    )  # fmt: skip


def _rollouts(
    config: PPOConfig,
    dispatch: WorkerDispatch,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    ends: EndTokens,
    directory: RunDirectory,
    console: Console,
) -> tuple[TrajectorySource, Sampler | None]:
    """Returns the source of trajectories, and the sampler behind it; a replay has none."""
    console.doing("starting the sampler")
    say_all(console, ends.notes(tokenizer, "completions end there, too, and the export names it"))
    if config.rollout.backend == "recorded":
        return RecordedRollouts(config.rollout, on_main=dispatch.on_main), None
    sampler = make_sampler(
        config.rollout, dispatch, tokenizer, folder=folder, dtype=config.actor.model.dtype,
        max_length=config.max_length, output_dir=directory.path, progress=console.generated,
        lora=config.actor.model.lora,
    )  # fmt: skip
    say_all(console, sampler.notes)
    rollouts = Rollouts(
        sampler, tokenizer, config.rollout, seed=config.seed, end_tokens=ends.ids,
        system=config.data.system, max_prompt_length=config.data.max_prompt_length, on_main=dispatch.on_main,
    )  # fmt: skip
    kept = KeptRollouts(
        rollouts,
        directory.pending,
        origin=_origin(config, folder, ends, dispatch.world_size),
        on_main=dispatch.on_main,
        say=console.say,
    )
    return kept, sampler


def _origin(config: PPOConfig, folder: str, ends: EndTokens, world_size: int) -> dict[str, Any]:
    """Everything that the samples of given steps depend on. The weights are known by their files' sizes and times."""
    plain = to_dict(config)
    files = sorted(pathlib.Path(folder).glob("*.*"))
    environment = (config.rollout.environment or "").rpartition(":")[0]
    return {
        "config": {name: plain[name] for name in ("seed", "rollout", "data")},
        "actor": {name: plain["actor"][name] for name in ("model", "engine")},
        "model": [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()],
        "environment": pathlib.Path(environment).read_text(encoding="utf-8") if environment else None,
        "world_size": world_size,
        **({"end_tokens": ends.added} if ends.added else {}),  # an older mrl wrote no such key
    }


def _evaluation(
    config: PPOConfig,
    held_out: Mapping[str, RowDataset[Prompt]],
    rollouts: TrajectorySource,
    scores: Scoring,
    dispatch: WorkerDispatch,
    console: Console,
    directory: RunDirectory,
    stop: StopSignal,
) -> Evaluation | None:
    """Returns the evaluation on the sets of data.eval, whose prompts are all read now; None without."""
    if not held_out:
        return None
    sets: dict[str, list[Prompt]] = {}
    start = 0
    for name, rows in held_out.items():
        report = Report()
        prompts = first_prompts(rows, config.train.eval_prompts, report)
        sets[name] = [dataclasses.replace(prompt, index=start + prompt.index) for prompt in prompts]
        start += len(rows)
        say_left_out(console, f"eval.{name}".rstrip("."), report.counts, report.notes)
    k = config.train.eval_samples
    size = config.prompts_per_iteration * max(1, config.rollout.samples_per_prompt // k)
    return Evaluation(
        sets, rollouts, scores, samples=k, prompts_at_once=size, doing=console.doing,
        stop_requested=lambda: any(dispatch.max_over_ranks(stop.requested)),
        seen=lambda *evaluated: show_evaluation(config, dispatch, directory, console, *evaluated),
    )  # fmt: skip


def _why_not_base(config: PPOConfig) -> str:
    """Names the key that keeps the reference from being the actor with its adapters off."""
    own = config.reference
    given = {
        "reference.model.path": own.model.path,
        "reference.model.dtype": own.model.dtype,
        "reference.engine": own.engine,
        "reference.update_every": own.update_every,
    }
    key = next(key for key, value in given.items() if value is not None)
    return f"since {key} is set; where it is null the actor without its adapters is the reference"


def _same_reference(config: PPOConfig, folders: Mapping[str, str]) -> bool | None:
    """Returns whether the reference, which starts with the actor's weights, computes in the same layout; None where it
    has other weights."""
    if "reference" not in folders or os.path.realpath(folders["reference"]) != os.path.realpath(folders["actor"]):
        return None
    if model_of(config, "reference").dtype != config.actor.model.dtype:
        return None
    return engine_of(config, "reference") == config.actor.engine
