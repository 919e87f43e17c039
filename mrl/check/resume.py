"""Whether a run that is resumed is the run that went on: two steps of the trainer, and the second one again from the
checkpoint of the first, in new processes; compared bit by bit.

The trainer's own code does all of it: rows, steps, saving, loading. What would take long or reach outside is smaller or
off: two steps of a few rows, no evaluation, no export, no servers, no logs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl import metrics
from mrl.check.folder import CheckedModel
from mrl.check.layouts import Layout
from mrl.check.rows import Rows
from mrl.check.verdict import Problem
from mrl.config.command import TrainingCommand
from mrl.config.ppo import PPOConfig, RewardModelConfig, SamplesConfig, ServerConfig
from mrl.config.rewards import FunctionReward, RewardsConfig
from mrl.config.schema import EngineConfig, MicroBatchConfig, ModelConfig, OptimizerConfig, SFTConfig, WandbConfig
from mrl.engine.atomic_checkpoint import step_name
from mrl.engine.torch_dist.reader import METADATA, TorchDistReader
from mrl.launch.local import launch

TOP = 3
NEW_TOKENS = 12
REWARD = '''"""A reward that is noise: what a check resumes with, in place of the user's."""
import hashlib


def score(completion):
    return hashlib.sha256(completion.encode()).digest()[0] / 255
'''


def resume_problems(
    command: TrainingCommand, config: Any, *, models: Mapping[str, CheckedModel], layouts: Mapping[str, Layout],
    rows: Rows, place: Path, dtype: Any,
) -> list[Problem]:  # fmt: skip
    """Returns what differs between a run that went on and one that was resumed. models, layouts: of each role.

    Raises UserError or RankFailed where a run fails.
    """
    place.mkdir()
    processes = max(layout.processes for layout in layouts.values())
    small = _small(config, rows, place, processes)
    small = _with_models(small, models, layouts, dtype)
    whole = dataclasses.replace(small, output_dir=str(place / "whole"))
    launch(command.trainer, whole, "", processes, quiet=True)
    first = place / "whole" / "checkpoints" / step_name(1)
    checkpoint = dataclasses.replace(small.checkpoint, resume=str(first))
    resumed = dataclasses.replace(small, output_dir=str(place / "resumed"), checkpoint=checkpoint)
    launch(command.trainer, resumed, "", processes, quiet=True)
    return [*_steps(whole, resumed), *_states(whole, resumed)]


# -- two small runs ----------------------------------------------------------------------------------------------------


def _small(config: Any, rows: Rows, place: Path, processes: int) -> Any:
    """Returns the config of two steps."""
    checkpoint = dataclasses.replace(config.checkpoint, every=1, keep=None, resume="auto", remote=None, export_hf=False)
    log = dataclasses.replace(config.log, console="none", wandb=WandbConfig(), tensorboard=False)
    train = dataclasses.replace(config.train, steps=2, epochs=None, eval_every=None, guards=False)
    config = dataclasses.replace(config, checkpoint=checkpoint, log=log, train=train)
    if isinstance(config, SFTConfig):
        return _small_sft(config, rows, place, processes)
    return _small_ppo(config, place, processes)


def _small_sft(config: SFTConfig, rows: Rows, place: Path, processes: int) -> SFTConfig:
    """Returns a config of the rows of the check, in tokens."""
    batch = max(processes, len(rows.examples) // 2)
    train = dataclasses.replace(config.train, global_batch_size=batch, eval_batches=None)
    data = dataclasses.replace(
        config.data, train=_write_rows(rows, place), eval=None, split=None, columns={}, format="tokenized",
        loss_on="all" if config.data.loss_on == "last" else config.data.loss_on, max_length=rows.longest,
        truncation="error",
    )  # fmt: skip
    return dataclasses.replace(config, train=train, data=data, optimizer=_at_once(config.optimizer))


def _small_ppo(config: PPOConfig, place: Path, processes: int) -> PPOConfig:
    """Returns a config whose actor samples a few tokens itself, which the user's functions do not score: where they
    score all alike, nothing would train."""
    (place / "reward.py").write_text(REWARD, encoding="utf-8")
    noise = FunctionReward(function=f"{place / 'reward.py'}:score")
    samples = min(config.rollout.samples_per_prompt, 2)
    rollout = dataclasses.replace(
        config.rollout, backend="native", samples_per_prompt=samples, environment=None, path=None,
        max_new_tokens=min(config.rollout.max_new_tokens, NEW_TOKENS), server=ServerConfig(),
    )  # fmt: skip
    algorithm = dataclasses.replace(
        config.algorithm, mini_batch_size=None, epochs=1, critic_warmup=0, dynamic_sampling=None, correction=None
    )
    train = dataclasses.replace(config.train, global_batch_size=samples * max(4, processes), eval_prompts=None)
    actor, critic = config.actor, config.critic
    return dataclasses.replace(
        config,
        actor=dataclasses.replace(actor, optimizer=_at_once(actor.optimizer)),
        critic=dataclasses.replace(critic, optimizer=_at_once(critic.optimizer)),
        reward=RewardModelConfig(),
        rewards=RewardsConfig(functions=(noise,), workers=1),
        rollout=rollout,
        algorithm=algorithm,
        train=train,
        data=dataclasses.replace(config.data, eval=None),
        checkpoint=dataclasses.replace(config.checkpoint, best=None),
        log=dataclasses.replace(config.log, samples=SamplesConfig(every=None), table=0),
    )


def _at_once(optimizer: OptimizerConfig) -> OptimizerConfig:
    """Returns an optimizer whose schedule fits in two steps."""
    return dataclasses.replace(optimizer, warmup_steps=0, decay_steps=None)


def _write_rows(rows: Rows, place: Path) -> str:
    """Writes the rows of the check in tokens."""
    path = place / "rows.jsonl"
    lines = [json.dumps({"input_ids": e.ids, "loss_mask": [int(bool(m)) for m in e.mask]}) for e in rows.examples]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def _with_models(
    config: Any, models: Mapping[str, CheckedModel], layouts: Mapping[str, Layout], dtype: Any
) -> Any:  # fmt: skip
    """Returns the config on the folders and layouts of the check."""

    def model(own: ModelConfig, role: str) -> ModelConfig:
        return dataclasses.replace(own, path=models[role].path, init=models[role].init, dtype=dtype)

    def engine(own: EngineConfig, role: str) -> EngineConfig:
        fsdp = dataclasses.replace(own.fsdp, replicate=1)
        size = MicroBatchConfig(size=2)
        return dataclasses.replace(own, parallel=layouts[role].parallel, micro_batch=size, fsdp=fsdp)

    if isinstance(config, SFTConfig):
        return dataclasses.replace(config, model=model(config.model, ""), engine=engine(config.engine, ""))
    actor = config.actor
    actor = dataclasses.replace(actor, model=model(actor.model, "actor"), engine=engine(actor.engine, "actor"))
    config = dataclasses.replace(config, actor=actor)
    if "critic" in models:
        critic = config.critic
        of_critic = dataclasses.replace(critic.model, path=models["critic"].path, dtype=dtype)
        own = engine(critic.engine or config.actor.engine, "critic")
        config = dataclasses.replace(config, critic=dataclasses.replace(critic, model=of_critic, engine=own))
    reference = config.reference
    path = reference.model.path and models["actor"].path
    of_reference = dataclasses.replace(reference.model, path=path, dtype=reference.model.dtype and dtype)
    own_engine = reference.engine and engine(reference.engine, "actor")
    return dataclasses.replace(
        config, reference=dataclasses.replace(reference, model=of_reference, engine=own_engine)
    )  # fmt: skip


# -- bit by bit --------------------------------------------------------------------------------------------------------


def _steps(whole: Any, resumed: Any) -> Iterator[Problem]:
    """Yields the metrics of the second step that differ."""
    found = [metrics.read(Path(config.output_dir, "metrics.jsonl"))[-1] for config in (whole, resumed)]
    for name in sorted(found[0].keys() | found[1].keys()):
        before, after = (of.get(name) for of in found)
        if before != after and not name.startswith(("perf/", "rollout/tokens_per_s")):
            yield Problem("step after a resume", f"{name} is {after!r}, not {before!r}")


def _states(whole: Any, resumed: Any) -> Iterator[Problem]:
    """Yields what is said of the tensors that differ in the checkpoints of the second step."""
    saved = [Path(config.output_dir, "checkpoints", step_name(2)) for config in (whole, resumed)]
    folders = sorted(path.parent.relative_to(saved[0]) for path in saved[0].rglob(METADATA))
    differ: list[str] = []
    count = 0
    for folder in folders:
        with contextlib.ExitStack() as stack:
            a, b = (stack.enter_context(contextlib.closing(TorchDistReader(path / folder))) for path in saved)
            role = "".join(f"{part}." for part in folder.parts if part != "mcore")
            count += len(a.tensors)
            differ += [role + name for name in sorted(a.tensors.keys() ^ b.tensors.keys())]
            both = sorted(a.tensors.keys() & b.tensors.keys())
            differ += [role + name for name in both if not _equal(a, b, name)]
    if differ:
        names = sorted(differ, key=lambda name: ("optimizer." in name, name))  # a weight says more than its moments
        more = f" and {len(names) - TOP} more" if len(names) > TOP else ""
        text = f"{len(names)} of {count} tensors are not the same bits: {', '.join(names[:TOP])}{more}"
        yield Problem("state after a resume", text, names[0])


def _equal(a: TorchDistReader, b: TorchDistReader, name: str) -> bool:
    if a.tensors[name].shape != b.tensors[name].shape:
        return False
    region = [(0, n) for n in a.tensors[name].shape]
    return _same_bits(a.read(name, region), b.read(name, region))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    flat: Sequence[Tensor] = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and torch.equal(*flat)
