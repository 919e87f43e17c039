"""Checks of keys against each other, the number of processes and the model's config.json: pure arithmetic.

They run before any process starts. `mrl.config.build` has already checked each key on its own. A function with a `path`
checks a section of several roots, at its place in this one. Checks of `mrl ppo` alone are in `ppo_checks`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.config.answers import AnswersConfig
from mrl.config.backends import OWN_KEYS, check_supported, entry_point
from mrl.config.keys import join_key, non_default_keys
from mrl.config.megatron_speed import CPU_OFFLOAD_FIELD, PRECISION_AWARE
from mrl.config.ppo import PPOTrainConfig
from mrl.config.schema import (
    EngineConfig,
    LogConfig,
    MicroBatchConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SFTConfig,
    TrainConfig,
)
from mrl.config.sources import RowsConfig, Share, StreamedRowsConfig, StreamedShare, sources_of
from mrl.errors import ConfigError, Shown
from mrl.parallel import ParallelDims, divisors_near

DEFAULT_TOKENS = 4096
"""Tokens of a micro-batch that no key limits, unless the longest sequence has more."""

TRAINING_KEYS = (
    "recompute", "recompute_every", "recompute_modules", "fsdp.reshard_after_forward", "moe.aux_loss", "moe.z_loss",
    "cuda_graphs",
)  # fmt: skip
"""Keys of an engine that are for training alone."""

MAX_PASSES = 1000
"""How often one batch may have each row, which a run on a handful of rows does on purpose."""


def check_config(config: SFTConfig) -> None:
    """Raises ConfigError where keys of `config` contradict each other or one would be left unread."""
    max_length = config.data.max_length
    if not config.data.loss_on:
        raise ConfigError("data.loss_on", [], "names no role", "give roles, as in [assistant, tool], or all")
    check_train(config.train, config.data)
    check_stream(config.data, config.train)
    check_micro_batch(config.engine.micro_batch, max_length, f"data.max_length {max_length}")
    check_trained(config)


def check_trained(config: SFTConfig | AnswersConfig) -> None:
    """Checks the sections of the one trained model of a run on rows, and of its logs."""
    check_optimizer(config.optimizer)
    if config.train.steps is not None:
        check_schedule(config.optimizer, config.train.steps, f"train.steps {config.train.steps}")
    check_backend(config.model, config.engine)
    check_muon(config.optimizer, config.model, config.engine)
    check_lora(config.model)
    check_log(config.log)


def refuse_unread(section: object, path: str, reason: str, fix: str, names: Sequence[str] = ()) -> None:
    """Raises ConfigError for the first key of `section`, written at `path`, that is set although nothing reads it.

    names: of the keys and sections in `section` that are not read; () is all of them.
    """
    for key, value in non_default_keys(section, path):
        name = key.path.removeprefix(f"{path}.").partition(".")[0]
        if names and name not in names:
            continue
        if key.section is not None:
            raise ConfigError(key.path, why=f"is given and not used {reason}", fix=fix)
        raise ConfigError(key.path, value, f"is not used {reason}", fix)


def check_replicas(dims: ParallelDims, key: str, sequences: int, role: str = "") -> None:
    """Raises ConfigError if a data-parallel replica would get none of the `sequences` that `key` sets."""
    of_role = f" of the {role}" if role else ""
    if sequences < dims.dp:
        raise ConfigError(
            key,
            sequences,
            (
                f"is less than the {dims.dp} data-parallel replicas{of_role} ({dims.describe()} on "
                f"{dims.world_size} processes)"
            ),
            f"give at least {dims.dp} or use fewer processes",
        )


def check_batch(global_batch_size: int, rows_of_batch: int, rows: int) -> None:
    """Refuses a batch in which each row would be many times: the rows or the batch are others than was meant.

    rows_of_batch: rows that are read for it; of `mrl ppo` one for each prompt. rows: of data.train.
    """
    if rows_of_batch > MAX_PASSES * rows:
        raise ConfigError(
            "train.global_batch_size",
            global_batch_size,
            f"has each of the {rows} rows of data.train {math.ceil(rows_of_batch / rows)} times in one step",
            f"give {global_batch_size * rows // rows_of_batch} for each of them once, or more rows",
        )


def parallel_dims(parallel: ParallelConfig, world_size: int) -> ParallelDims:
    """Returns the degrees of the config on `world_size` processes, with auto and null resolved."""
    return ParallelDims(
        world_size=world_size,
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.expert_tp,
        sp=parallel.sequence_parallel,
    )


def smallest_world(parallel: ParallelConfig) -> int:
    """Returns the fewest processes that the layout fits on (one replica of the model)."""
    return parallel.pp * math.lcm(parallel.tp * parallel.cp, parallel.ep * parallel.expert_tp)


def micro_batch_tokens(micro_batch: MicroBatchConfig, max_length: int) -> int | None:
    """Returns the token budget of a micro-batch; None where micro-batches are cut by `size`. max_length: tokens of the
    longest sequence."""
    if micro_batch.size is not None:
        return None
    return micro_batch.token_limit or max(DEFAULT_TOKENS, max_length)


def check_train(train: TrainConfig | PPOTrainConfig, data: RowsConfig) -> None:
    """Raises ConfigError for two lengths, for keys of evaluation without data.eval, and for shares without sources."""
    if train.steps is not None and train.epochs is not None:
        raise ConfigError(
            "train.steps", train.steps, f"is given together with train.epochs {train.epochs:g}", "keep one of them"
        )
    if data.eval is None:
        names = [field.name for field in dataclasses.fields(train) if field.name.startswith("eval_")]
        refuse_unread(train, "train", "without data.eval", "set data.eval, or leave it out", names)
    _check_mix_by(data.train, data.mix_by)


def _check_mix_by(train: str | Sequence[Share], mix_by: str) -> None:
    """Raises ConfigError for shares without a list of sources, and for shares of tokens without weights.

    Without weights, shares are numbers of rows. If two sources had equally many rows, the one with shorter rows would
    then be repeated.
    """
    if mix_by == "rows":
        return
    if isinstance(train, str):
        why, fix = "is not used where data.train is one path", "give a list of sources, or leave it out"
        raise ConfigError("data.mix_by", mix_by, why, fix)
    if train[0].weight is None:
        why = "shares out by weights, and no source of data.train has one"
        raise ConfigError("data.mix_by", mix_by, why, "give a weight to every source, or leave it out")


def formats_of(data: Any) -> Mapping[str, str | None]:
    """Returns key -> form of row that it names, for all rows and for each source."""
    return {f"{key}.format": section.format for key, section in _sections(data).items()}


def _sections(data: Any) -> dict[str, Any]:
    """Returns the sections that say what rows of answers are."""
    return {"data": data, **dict(sources_of(data))}


def check_prompt_end(data: Any, form: str | None = None) -> None:
    """Raises ConfigError for a data.prompt_end of rows that are no pairs. form: of all rows, if the loss decides it."""
    for section, of in _sections(data).items():
        end = of.prompt_end
        of_rows = form or of.format or data.format
        if end is not None and (of.turns or data.turns):
            why = "is of raw text, and data.turns makes messages of a text, whose prompt they share"
            raise ConfigError(f"{section}.prompt_end", end, why, "keep one of them")
        if end is not None and of_rows not in ("auto", "preference"):
            why = f"is of the format preference, and rows have the format {of_rows}"
            raise ConfigError(f"{section}.prompt_end", end, why, "leave it out")


def check_lora(model: ModelConfig, path: str = "model") -> None:
    """Raises ConfigError for adapters over weights that no later run has."""
    if model.lora is not None and model.init == "random":
        raise ConfigError(
            f"{path}.init",
            "random",
            f"makes a base that no other run has, and {path}.lora trains adapters over one",
            f"set it to pretrained, or {path}.lora to null",
        )


def check_micro_batch(micro_batch: MicroBatchConfig, max_length: int, longest: str, path: str = "engine") -> None:
    """Raises ConfigError if the longest sequence does not fit in a micro-batch.

    longest: the keys that set `max_length`, with their values.
    """
    key = f"{path}.micro_batch"
    if micro_batch.tokens is not None and micro_batch.size is not None:
        raise ConfigError(
            f"{key}.tokens",
            micro_batch.tokens,
            f"is given together with {key}.size {micro_batch.size}",
            "keep one of them",
        )
    if micro_batch.token_limit is not None and micro_batch.token_limit < max_length:
        raise ConfigError(
            f"{key}.tokens",
            micro_batch.tokens,
            f"is less than {longest}, so a sequence may fit in no micro-batch",
            f"give at least {max_length}, or shorten them",
        )


def check_groups(config: AnswersConfig, engine: EngineConfig, path: str = "engine") -> None:
    """Raises ConfigError if a micro-batch does not hold whole groups of sequences. engine: of the section `path`."""
    size = engine.micro_batch.size
    if engine.batch_invariant and config.group > 1:
        why = f"needs micro-batches of one sequence, and one of {config.loss.name} holds both of a pair"
        raise ConfigError(f"{path}.batch_invariant", True, why, "leave it out")
    if size is not None and size % config.group:
        why = f"is odd, and a micro-batch of {config.loss.name} holds both sequences of a pair"
        raise ConfigError(f"{path}.micro_batch.size", size, why, f"give {size + 1}")
    longest, key = config.longest_group
    # no micro-batch has more places than its tokens then
    if engine.micro_batch.pad or engine.megatron.get("tp_comm_overlap") is True:
        cp = engine.parallel.cp
        longest = config.group * ParallelDims(cp, cp=cp).places_of(longest // config.group)
    check_micro_batch(engine.micro_batch, longest, key, path)


def check_optimizer(optimizer: OptimizerConfig, path: str = "optimizer") -> None:
    """Checks rates, and refuses keys that the schedule does not read."""
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(
            f"{path}.min_lr",
            Shown(f"{optimizer.min_lr:g}"),
            f"is above {path}.lr {optimizer.lr:g}",
            f"give at most {optimizer.lr:g}",
        )
    if optimizer.schedule == "constant":
        reason, fix = "by schedule constant, which never decays", "choose linear, cosine or wsd, or leave it out"
        refuse_unread(optimizer, path, reason, fix, ("min_lr", "decay_steps"))


def check_muon(optimizer: OptimizerConfig, model: ModelConfig, engine: EngineConfig, role: str = "") -> None:
    """Raises ConfigError for keys that do not go with muon, and for keys of muon without it.

    role: of these sections.
    """
    path = f"{role}." if role else ""
    if optimizer.name != "muon":
        reason, fix = f"by {path}optimizer.name {optimizer.name}", f"set {path}optimizer.name to muon, or leave it out"
        refuse_unread(optimizer.muon, f"{path}optimizer.muon", reason, fix)
        return
    against = [f"{path}engine.megatron.{field}, which is of AdamW" for field in (CPU_OFFLOAD_FIELD, PRECISION_AWARE)
               if engine.megatron.get(field)]  # fmt: skip
    if model.lora is not None:
        against.append(f"{path}model.lora: an adapter is no matrix of the model")
    if engine.backend != "megatron":
        against = [f"{path}engine.backend {engine.backend}, but with megatron alone"]
    if against:
        fix = f"leave one of them out, or set {path}optimizer.name to adamw"
        raise ConfigError(f"{path}optimizer.name", "muon", f"does not go with {against[0]}", fix)


def check_schedule(optimizer: OptimizerConfig, steps: int, length: str, path: str = "optimizer") -> None:
    """Raises ConfigError if warm-up or decay exceeds the `steps` of the run.

    length: what sets them, in words, as in "train.steps 100".
    """
    if optimizer.warmup_steps > steps:
        raise ConfigError(f"{path}.warmup_steps", optimizer.warmup_steps, f"is above {length}", f"give at most {steps}")
    if optimizer.schedule == "wsd" and optimizer.decay_steps is not None:
        room = steps - optimizer.warmup_steps
        if optimizer.decay_steps > room:
            raise ConfigError(
                f"{path}.decay_steps",
                optimizer.decay_steps,
                f"is above the {room} steps that {length} leaves after the warm-up",
                f"give at most {room}",
            )


def check_backend(model: ModelConfig, engine: EngineConfig, role: str = "") -> None:
    """Raises ConfigError for keys that the backend does not have. An engine of another package checks its own."""
    if engine.backend not in OWN_KEYS:
        entry_point(engine.backend, join_key(role, "engine"))
        return
    check_supported(engine.backend, OWN_KEYS[engine.backend], model, engine, role)
    check_host_optimizer(engine, role)
    check_recompute(engine, role)


def check_host_optimizer(engine: EngineConfig, role: str) -> None:
    """Raises ConfigError if an optimizer on the host is to be moved there between steps."""
    path = join_key(role, "engine")
    if engine.megatron.get(CPU_OFFLOAD_FIELD) and "optimizer" in engine.offload:
        why = f"is of what {path}.megatron.{CPU_OFFLOAD_FIELD} keeps on the host always"
        raise ConfigError(f"{path}.offload", "optimizer", why, "leave out one of them")


def check_recompute(engine: EngineConfig, role: str = "") -> None:
    """Raises ConfigError for keys that go with another choice of `recompute`."""
    path = join_key(role, "engine")
    for key, choice in (("recompute_every", "full"), ("recompute_modules", "selective")):
        if engine.recompute != choice:
            reason = f'by {path}.recompute "{engine.recompute}"'
            refuse_unread(engine, path, reason, f"set {path}.recompute to {choice}, or leave it out", (key,))


def check_replicate(engine: EngineConfig, processes: int) -> None:
    """Copies of the weights (HSDP) that fit the number of processes."""
    replicate = engine.fsdp.replicate
    if processes % replicate:
        fit = divisors_near(processes, replicate)
        raise ConfigError(
            "engine.fsdp.replicate", replicate, f"does not divide the {processes} processes", f"use one of {fit}"
        )


def check_never_trains(engine: EngineConfig, path: str, who: str) -> None:
    """Raises ConfigError for keys of an engine at `path` that are for training alone. who: never trains, in words."""
    for key, value in non_default_keys(engine, path):
        name = key.path.removeprefix(f"{path}.")
        if name in TRAINING_KEYS or (name == "offload" and set(value) != {"parameters"}):
            raise ConfigError(key.path, value, f"is for training, and {who} never trains", "leave it out")


def check_url(key: str, url: str) -> None:
    """Raises ConfigError for what no server is at."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(key, url, "is no URL", "write it as http://host:8000")


def check_log(log: LogConfig) -> None:
    """Raises ConfigError for keys that another key turns off."""
    if log.wandb.project is None:
        refuse_unread(log.wandb, "log.wandb", "without log.wandb.project", "set log.wandb.project")


def streamed_keys(data: RowsConfig) -> list[str]:
    """Returns the keys of the paths of data.train whose rows are read while training."""
    return [key for key, of in _paths(data) if _is_streamed(data, of)]


def check_stream(data: StreamedRowsConfig, train: TrainConfig) -> None:
    """Raises ConfigError for keys that need the number of rows, and for keys without use for streamed rows."""
    streamed = streamed_keys(data)
    _check_buffers(data, streamed)
    if not streamed:
        return
    if train.epochs is not None:
        why = f"counts rows, and those of {streamed[0]} are streamed: their number is not known"
        raise ConfigError("train.epochs", Shown(f"{train.epochs:g}"), why, "give train.steps in its place")
    if train.steps is None:
        why = f"is missing, and the rows of {streamed[0]} are streamed: their number is not known"
        raise ConfigError("train.steps", why=why, fix="give the steps of the run")
    for key, share in _paths(data):
        if share is None:
            continue
        if share.weight is None:
            why = (
                f"is missing, and the rows of {streamed[0]} are streamed: their number, which would be it, is not known"
            )
            raise ConfigError(f"{key.removesuffix('.path')}.weight", why=why, fix="give a weight to every source")
        if _is_streamed(data, share) and share.epochs is not None and share.epochs % 1:
            why, fix = "is no whole number, and the rows are streamed: their number is not known", "give whole passes"
            raise ConfigError(f"{key.removesuffix('.path')}.epochs", Shown(f"{share.epochs:g}"), why, fix)


def check_cache(data: RowsConfig, key: str, cache: bool) -> None:
    """Raises ConfigError for a cache of streamed rows, because it is computed over all rows first.

    key: of a role's `cache`.
    """
    streamed = streamed_keys(data)
    if cache and streamed:
        why = f"reads all rows before the first step, and those of {streamed[0]} are streamed"
        raise ConfigError(key, True, why, "set it to false, or leave stream out")


def _paths(data: RowsConfig) -> Iterator[tuple[str, Share | None]]:
    """Yields the key of each path of data.train, with its source where there is a list of them."""
    if isinstance(data.train, str):
        yield "data.train", None
        return
    yield from ((f"data.train[{i}].path", source) for i, source in enumerate(data.train))


def _is_streamed(data: RowsConfig, source: Share | None) -> bool:
    if not isinstance(data, StreamedRowsConfig):
        return False
    own = source.stream if isinstance(source, StreamedShare) else None
    return data.stream if own is None else own


def _check_buffers(data: StreamedRowsConfig, streamed: list[str]) -> None:
    """Raises ConfigError for a shuffle_buffer without streamed and shuffled rows."""
    given = [("data.shuffle_buffer", data.shuffle_buffer, bool(streamed))]
    for key, share in _paths(data):
        if isinstance(share, StreamedShare):
            name = f"{key.removesuffix('.path')}.shuffle_buffer"
            given.append((name, share.shuffle_buffer, _is_streamed(data, share)))
    for key, value, is_used in given:
        if value is None:
            continue
        if not is_used:
            fix = "set stream to true, or leave it out"
            raise ConfigError(key, value, "is not used by rows that are not streamed", fix)
        if not data.shuffle and value:
            raise ConfigError(key, value, "is not used with data.shuffle false", "leave it out, or shuffle")
