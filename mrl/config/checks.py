"""Checks of keys against each other, the number of processes and the model's config.json: pure arithmetic.

They run before any process starts. `mrl.config.build` has already checked each key on its own. A function with a `path`
checks a section that several roots have, and that is where this one has it; what only `mrl ppo` has is in `ppo_checks`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from mrl.config import backends
from mrl.config.keys import show
from mrl.config.schema import (
    EngineConfig,
    LogConfig,
    MicroBatchConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SFTConfig,
)
from mrl.errors import ConfigError, ModelError
from mrl.parallel import ParallelDims, divisors_near, stage_layers

MOST_PASSES = 1000
"""How often one batch may have each row, which a run on a handful of rows does on purpose."""


def check_config(config: SFTConfig) -> None:
    """Raises ConfigError where keys of `config` contradict each other or one would be left unread."""
    max_length = config.data.max_length
    _check_train(config)
    check_micro_batch(config.engine.micro_batch, max_length, f"data.max_length {max_length}")
    check_optimizer(config.optimizer)
    if config.train.steps is not None:
        check_schedule(config.optimizer, config.train.steps, f"train.steps {config.train.steps}")
    check_backend(config.engine)
    check_lora(config.model)
    check_log(config.log)


def check_replicas(dims: ParallelDims, key: str, sequences: int, role: str = "") -> None:
    """Every data-parallel replica gets one of the `sequences` that `key` sets, or more."""
    of_role = f" of the {role}" if role else ""
    if sequences < dims.dp:
        raise ConfigError(
            f"{key}: value {sequences} is less than the {dims.dp} data-parallel replicas{of_role} ({dims.describe()} on "
            f"{dims.world_size} processes); give at least {dims.dp} or use fewer processes"
        )


def check_batch(global_batch_size: int, rows_of_batch: int, rows: int) -> None:
    """Refuses a batch in which each row would be many times: the rows or the batch are others than was meant.

    rows_of_batch: rows that are read for it; of `mrl ppo` one for each prompt. rows: of data.train.
    """
    if rows_of_batch > MOST_PASSES * rows:
        raise ConfigError(
            f"train.global_batch_size: value {global_batch_size} has each of the {rows} rows of data.train "
            f"{math.ceil(rows_of_batch / rows)} times in one step; give {global_batch_size * rows // rows_of_batch} for each of them "
            "once, or more rows"
        )


def parallel_dims(parallel: ParallelConfig, world_size: int) -> ParallelDims:
    """The degrees of the config on `world_size` processes, with auto and null resolved."""
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
    """The fewest processes that the layout fits on (one replica of the model)."""
    return parallel.pp * math.lcm(parallel.tp * parallel.cp, parallel.ep * parallel.expert_tp)


def resolve_engine_tokens(config: SFTConfig) -> int | None:
    """The token budget of a micro-batch; None where micro-batches are cut by `size`."""
    return micro_batch_tokens(config.engine.micro_batch, config.data.max_length)


def micro_batch_tokens(micro_batch: MicroBatchConfig, max_length: int) -> int | None:
    """As `resolve_engine_tokens`, where the longest sequence has `max_length` tokens."""
    if micro_batch.size is not None:
        return None
    return micro_batch.tokens or max(4096, max_length)


def _check_train(config: SFTConfig) -> None:
    train, data = config.train, config.data
    if train.steps is not None and train.epochs is not None:
        raise ConfigError(
            f"train.steps: value {train.steps} is given together with train.epochs {train.epochs:g}; keep one of them"
        )
    if data.eval is None:
        for name in ("eval_every", "eval_batches"):
            if getattr(train, name) is not None:
                raise ConfigError(
                    f"train.{name}: value {getattr(train, name)} is not used without data.eval; set data.eval, or null here"
                )


def check_lora(model: ModelConfig, path: str = "model") -> None:
    """Adapters go over weights that are there again after the run."""
    for key in ("target_modules", "exclude_modules"):
        if model.lora is not None and not (value := getattr(model.lora, key)) and value is not None:
            raise ConfigError(
                f"{path}.lora.{key}: value {show(value)} names nothing; give all-linear, ends of names, or a regular expression"
            )
    if model.lora is not None and model.init == "random":
        raise ConfigError(
            f'{path}.init: value "random" makes a base that no other run has, and {path}.lora trains adapters over one; set it '
            f"to pretrained, or {path}.lora to null"
        )


def check_micro_batch(micro_batch: MicroBatchConfig, max_length: int, longest: str, path: str = "engine") -> None:
    """A budget that the longest sequence fits in. longest: the keys that set its `max_length`, with their values."""
    key = f"{path}.micro_batch"
    if micro_batch.tokens is not None and micro_batch.size is not None:
        raise ConfigError(
            f"{key}.tokens: value {micro_batch.tokens} is given together with {key}.size {micro_batch.size}; keep one of them"
        )
    if micro_batch.tokens is not None and micro_batch.tokens < max_length:
        raise ConfigError(
            f"{key}.tokens: value {micro_batch.tokens} is less than {longest}, so a sequence may fit in no micro-batch; "
            f"give at least {max_length}, or shorten them"
        )


def check_optimizer(optimizer: OptimizerConfig, path: str = "optimizer") -> None:
    """Rates, betas and what the schedule reads."""
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(
            f"{path}.min_lr: value {optimizer.min_lr:g} is above {path}.lr {optimizer.lr:g}; give at most {optimizer.lr:g}"
        )
    for beta in optimizer.betas:
        if not 0 <= beta < 1:
            raise ConfigError(f"{path}.betas: value {beta:g} is out of range; give two numbers from 0 to below 1")
    if optimizer.schedule == "constant":
        for name, unset in (("min_lr", 0.0), ("decay_steps", None)):
            if getattr(optimizer, name) != unset:
                raise ConfigError(
                    f"{path}.{name}: value {getattr(optimizer, name)} is not used by schedule constant, which never "
                    "decays; choose linear, cosine or wsd, or leave it out"
                )


def check_schedule(optimizer: OptimizerConfig, steps: int, length: str, path: str = "optimizer") -> None:
    """Warm-up and decay within the `steps` of the run. length: what sets them, in words, as in "train.steps 100"."""
    if optimizer.warmup_steps > steps:
        raise ConfigError(
            f"{path}.warmup_steps: value {optimizer.warmup_steps} is above {length}; give at most {steps}"
        )
    if optimizer.schedule == "wsd" and optimizer.decay_steps is not None:
        room = steps - optimizer.warmup_steps
        if optimizer.decay_steps > room:
            raise ConfigError(
                f"{path}.decay_steps: value {optimizer.decay_steps} is above the {room} steps that {length} leaves after the "
                f"warm-up; give at most {room}"
            )


def check_backend(engine: EngineConfig, path: str = "engine") -> None:
    """Keys that the backend does not have: errors, not ignored. Those of another package's engine, its class knows."""
    if engine.backend not in backends.OWN:
        backends.entry_point(engine.backend, path)
        return
    for name, value in engine.options.items():
        raise ConfigError(
            f"{path}.options.{name}: value {show(value)} is for an engine that another package registers, and {path}.backend "
            f"is {engine.backend}; leave it out"
        )
    if engine.recompute_every > 1 and engine.recompute != "full":
        raise ConfigError(
            f'{path}.recompute_every: value {engine.recompute_every} is not used by {path}.recompute "{engine.recompute}"; set '
            f"{path}.recompute to full, or leave it out"
        )
    if engine.backend != "fsdp":
        if engine.recompute_every > 1:
            raise ConfigError(
                f"{path}.recompute_every: value {engine.recompute_every} is not supported by backend {engine.backend}; leave it out, "
                f"or set {path}.backend to fsdp"
            )
        if "activations" in engine.offload:
            raise ConfigError(
                f"{path}.offload: value activations is not supported by backend {engine.backend}; leave it out (recompute saves "
                f"as much), or set {path}.backend to fsdp"
            )
        for field in dataclasses.fields(engine.fsdp):
            value = getattr(engine.fsdp, field.name)
            if value != field.default:
                raise ConfigError(
                    f"{path}.fsdp.{field.name}: value {str(value).lower()} is not used by backend {engine.backend}; leave it out, or "
                    f"set {path}.backend to fsdp"
                )
        return
    for name in ("tp", "pp", "vpp", "ep", "etp"):
        degree = getattr(engine.parallel, name)
        if degree is not None and degree > 1:
            raise ConfigError(
                f"{path}.parallel.{name}: value {degree} is not supported by backend fsdp, which splits data and, by cp, sequences; "
                f"set it to 1, or {path}.backend to megatron"
            )
    if engine.recompute == "selective":
        raise ConfigError(
            f'{path}.recompute: value "selective" is not supported by backend fsdp; set it to none or full, or '
            f"{path}.backend to megatron"
        )
    for name in ("aux_loss", "z_loss"):
        if getattr(engine.moe, name):
            raise ConfigError(
                f"{path}.moe.{name}: value {getattr(engine.moe, name):g} is not supported by backend fsdp; set it to 0, or "
                f"{path}.backend to megatron"
            )


def check_replicate(engine: EngineConfig, processes: int, path: str = "engine") -> None:
    """Copies of the weights (HSDP) that fit the number of processes."""
    replicate = engine.fsdp.replicate
    if processes % replicate:
        fit = divisors_near(processes, replicate)
        raise ConfigError(
            f"{path}.fsdp.replicate: value {replicate} does not divide the {processes} processes; use one of {fit}"
        )


def check_log(log: LogConfig) -> None:
    """Keys that another key turns off: they would be accepted and do nothing."""
    for name, unset in (("name", None), ("mode", "auto")):
        value = getattr(log.wandb, name)
        if log.wandb.project is None and value != unset:
            raise ConfigError(
                f"log.wandb.{name}: value {value!r} is not used without log.wandb.project; set log.wandb.project"
            )


def check_model(engine: EngineConfig, dims: ParallelDims, model: Mapping[str, Any], path: str = "engine") -> None:
    """Raises where keys ask for what the model has not. model: the content of its config.json.

    Whether its sizes can be split so, `mrl.mcore_models.layout` says.
    """
    if engine.backend == "fsdp" and dims.cp > 1:
        check_shared_sequences(dims.cp, model, path)
    if engine.backend != "megatron":
        return
    if isinstance(model.get("vision_config"), dict):
        raise ConfigError(
            f"{path}.backend: value 'megatron' runs models of text alone, and model_type {model.get('model_type')!r} reads images "
            f"too; set {path}.backend to fsdp"
        )
    stage_layers(_whole(model, "num_hidden_layers"), dims.pp, dims.vpp)
    if num_experts(model) is None:
        _check_dense(engine, dims, model, path)


def check_shared_sequences(cp: int, model: Mapping[str, Any], path: str = "engine") -> None:
    """Whether `cp` ranks of backend fsdp can share the sequences of the model. model: the content of its config.json.

    Of a model that mrl has no table for, which may call these otherwise, the engine tries it (mrl/engine/fsdp/probe.py).
    """
    model = model.get("text_config") or model
    heads = _whole(model, "num_attention_heads") if "num_attention_heads" in model else cp
    if heads % cp:
        fit = divisors_near(heads, cp)
        raise ConfigError(
            f"{path}.parallel.cp: value {cp} does not divide the model's {heads} attention heads, which backend fsdp splits over "
            f"its ranks; use one of {fit}"
        )


def check_positions(
    engine: EngineConfig, model: Mapping[str, Any], max_length: int, key: str, *, generates: bool
) -> None:
    """Whether backend fsdp can take sequences of `max_length` tokens of a model whose rotary embedding follows the length of a
    sequence. key: the keys that set it, with their values. generates: whether such a model samples them token by token.
    """
    kind, limit = following_positions(model) or (None, None)
    if engine.backend != "fsdp" or kind is None or not (generates or "text_config" in model):
        return
    if limit is None:  # a field of config.json that is not there
        limit = _whole(model.get("text_config") or model, "max_position_embeddings")
    if max_length > limit:
        why = "what is sampled token by token does not follow it as training does" if generates else "images do not"
        raise ConfigError(
            f'{key} is above the {limit} positions up to which the rotary embedding "{kind}" of the model is the same for all: '
            f"beyond, it follows the length of a sequence, and {why}; give at most {limit}, or use another model"
        )


def following_positions(model: Mapping[str, Any]) -> tuple[str, int | None] | None:
    """The kind of a rotary embedding that follows the length of a sequence, and the length up to which it is
    the same for all (None: config.json does not say); None where it does not. model: the content of its config.json.
    """
    model = model.get("text_config") or model
    for name in ("rope_parameters", "rope_scaling"):
        for kind, rope in _ropes(model.get(name)):
            if kind == "dynamic":
                return kind, model.get("max_position_embeddings")
            if kind == "longrope":
                original = rope.get("original_max_position_embeddings") or model.get("original_max_position_embeddings")
                return kind, original or model.get("max_position_embeddings")
    return None


def _ropes(rope: Any) -> list[tuple[Any, Mapping[str, Any]]]:
    """(kind, fields) of the rotary embeddings in a field of config.json, which may have one for each type of layer."""
    if not isinstance(rope, Mapping):
        return []
    return [(rope.get("rope_type", rope.get("type")), rope)] + [pair for part in rope.values() for pair in _ropes(part)]


def num_experts(model: Mapping[str, Any]) -> int | None:
    """Experts of an MoE layer as config.json names them; None for a dense model."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if model.get(name):
            return _whole(model, name)
    return None


def _check_dense(engine: EngineConfig, dims: ParallelDims, model: Mapping[str, Any], path: str) -> None:
    """Keys of experts and routers, for a model without any."""
    if dims.ep > 1 or dims.etp not in (1, dims.tp):
        name, degree = ("ep", dims.ep) if dims.ep > 1 else ("etp", dims.etp)
        raise ConfigError(
            f"{path}.parallel.{name}: value {degree} splits experts, and the model ({model.get('model_type')}) has none; "
            "leave it out"
        )
    for name in ("aux_loss", "z_loss"):
        value = getattr(engine.moe, name)
        if value:
            raise ConfigError(
                f"{path}.moe.{name}: value {value:g} is for a router, and the model ({model.get('model_type')}) has none; "
                "set it to 0"
            )


def _whole(model: Mapping[str, Any], name: str) -> int:
    value = model.get(name)
    if type(value) is not int or value < 1:
        raise ModelError(
            f"config.json: {name}: value {value!r} is not a whole number of at least 1; give the model's own"
        )
    return value
