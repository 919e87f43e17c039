"""Checks of the keys of `mrl ppo` against each other: pure arithmetic, before any process starts.

`mrl.algorithms.recipes` checks keys that depend on the algorithm, such as the critic's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mrl.config.checks import (
    check_backend,
    check_log,
    check_lora,
    check_micro_batch,
    check_muon,
    check_never_trains,
    check_optimizer,
    check_schedule,
    check_train,
    check_url,
    refuse_unread,
)
from mrl.config.keys import join_names
from mrl.config.ppo import PPOConfig, RolloutConfig
from mrl.config.recipes import OPD_NAMES
from mrl.config.rewards import ENVIRONMENT, REWARD_MODEL, check_spec, label_of
from mrl.config.roles import TRAINED, engine_of, has_own_engine, is_served, model_of, possible_roles
from mrl.config.schema import EngineConfig
from mrl.errors import ConfigError, Shown
from mrl.metric_names import CONVERSATION_METRICS, PPO_METRICS
from mrl.parallel import divisors_near

SERVERS = ("vllm", "sglang")
IN_PROCESS_ONLY = ("memory_fraction", "tp")
SERVERS_ONLY = ("weights_dir", "handover", "lora", "bucket_mb", "concurrency", "timeout_s", "sleep")
NATIVE_ONLY = ("cache_tokens", "prefill_tokens", "cuda_graphs")
ENVIRONMENT_KEYS = ("max_turns", "max_turn_tokens", "environment_parts", "environment_timeout_s")
SAMPLING = ("top_k", "top_p", "min_p", "stop", "stop_tokens")
"""Keys that only decide what is sampled; the temperature is the trainer's too."""


def check_ppo(config: PPOConfig) -> None:
    """Raises ConfigError where keys of `config` contradict each other or one would be left unread."""
    _check_sizes(config)
    check_train(config.train, config.data)
    _check_length(config)
    for role in possible_roles(config):
        if has_own_engine(config, role) and not is_served(config, role):
            _check_engine(config, role, engine_of(config, role))
    for role in TRAINED:
        check_optimizer(getattr(config, role).optimizer, f"{role}.optimizer")
        check_muon(getattr(config, role).optimizer, model_of(config, role), engine_of(config, role), role)
        check_lora(model_of(config, role), f"{role}.model")
    lora = config.actor.model.lora
    if lora is not None and lora.dropout and config.train.guards:
        raise ConfigError(
            "actor.model.lora.dropout",
            Shown(f"{lora.dropout:g}"),
            "makes the trained policy another one than the policy that sampled",
            "set it to 0, or train.guards to false to go on with it",
        )
    _check_rewards(config)
    check_rollout(config)
    _check_async(config)
    _check_adapters_alone(config)
    check_cuda_graphs(config.rollout, config.actor.engine, "actor.engine")
    check_batch_invariant(config.rollout, config.actor.engine, "actor.engine")
    _check_best(config)
    check_log(config.log)


def check_schedules(config: PPOConfig, steps: int, length: str) -> None:
    """Raises ConfigError if a warm-up or decay exceeds a run of `steps`.

    length: what sets them, in words, as in "train.steps 100".
    """
    warmup = config.algorithm.critic_warmup
    if warmup >= steps:
        raise ConfigError(
            "algorithm.critic_warmup", warmup, f"leaves the actor none of {length}", f"give at most {steps - 1}"
        )
    check_schedule(config.critic.optimizer, steps, length, "critic.optimizer")
    if warmup:
        length = f"the {steps - warmup} steps that algorithm.critic_warmup {warmup} leaves of {length}"
    check_schedule(config.actor.optimizer, steps - warmup, length, "actor.optimizer")


def _check_sizes(config: PPOConfig) -> None:
    """Raises ConfigError if a rollout does not hold whole groups and whole mini-batches."""
    batch, samples, mini_batch = (
        config.train.global_batch_size,
        config.rollout.samples_per_prompt,
        config.mini_batch_size,
    )
    if batch % samples:
        raise ConfigError(
            "train.global_batch_size",
            batch,
            f"is not a multiple of rollout.samples_per_prompt {samples}",
            f"give {_nearest_multiples(batch, samples)}",
        )
    if batch % mini_batch:
        near = divisors_near(batch, mini_batch, most=2).replace(", ", " or ")
        raise ConfigError(
            "algorithm.mini_batch_size", mini_batch, f"does not divide train.global_batch_size {batch}", f"give {near}"
        )


def _check_length(config: PPOConfig) -> None:
    train, per_iteration = config.train, config.steps_per_iteration
    if train.steps is None:
        return
    if train.steps % per_iteration:
        raise ConfigError(
            "train.steps",
            train.steps,
            (
                f"is not a multiple of the {per_iteration} steps of an iteration (algorithm.epochs "
                f"{config.algorithm.epochs} times {train.global_batch_size} // {config.mini_batch_size} "
                "mini-batches)"
            ),
            f"give {_nearest_multiples(train.steps, per_iteration)}",
        )
    check_schedules(config, train.steps, f"train.steps {train.steps}")


def _nearest_multiples(value: int, of: int) -> str:
    """Returns the multiples of `of` on both sides of `value`: "8 or 12"."""
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def _check_engine(config: PPOConfig, role: str, engine: EngineConfig) -> None:
    path, data, rollout = f"{role}.engine", config.data, config.rollout
    check_backend(model_of(config, role), engine, role)
    longest = (
        f"data.max_prompt_length {data.max_prompt_length} and rollout.max_new_tokens {rollout.max_new_tokens} together"
    )
    check_micro_batch(engine.micro_batch, config.max_length, longest, path)
    devices = {engine.device, config.actor.engine.device}
    if devices == {"cpu", "cuda"}:
        raise ConfigError(
            f"{path}.device",
            engine.device,
            f"does not go with actor.engine.device {config.actor.engine.device}: all roles share the same processes",
            "give both the same, or leave this one out",
        )
    if engine.cuda_graphs and role in TRAINED and config.train.offload_idle != "never":
        why = f"captures its graphs again after each offload, and train.offload_idle is {config.train.offload_idle}"
        raise ConfigError(f"{path}.cuda_graphs", True, why, "set that to never, or leave this out")
    if role not in TRAINED:
        check_never_trains(engine, path, "the teacher" if role.startswith("reference.others.") else f"the {role}")


def _check_rewards(config: PPOConfig) -> None:
    """Raises ConfigError if nothing is rewarded, or if keys of a reward model have no model."""
    if config.reward.model.path is None:
        fix = "set reward.model.path, or leave it out"
        refuse_unread(config.reward, "reward", "without reward.model.path", fix)
    if config.algorithm.name in OPD_NAMES or is_rewarded(config):
        return
    functions = config.rewards.functions if config.rewards is not None else ()
    if config.reward.model.path is not None:
        key, value = "reward.weight", Shown("0")
    elif functions:
        key, value = "rewards.functions", Shown("has weight 0 throughout, which")
    else:
        key, value = "rewards", Shown("null")
    fix = "give rewards.functions with a weight, reward.model.path, or rollout.environment"
    raise ConfigError(key, value, "leaves nothing to learn from", fix)


REWARD_METRICS = ("reward/mean", "reward/std", "reward/min", "reward/max", "reward/equal_groups")
"""Metrics that there are where something is rewarded."""


def is_rewarded(config: PPOConfig) -> bool:
    """Returns whether functions, a model or an environment give rewards that weigh something."""
    functions = config.rewards.functions if config.rewards is not None else ()
    by_model = config.reward.model.path is not None and config.reward.weight != 0
    return config.rollout.environment is not None or by_model or any(function.weight for function in functions)


def check_rollout(config: Any) -> None:
    """Raises ConfigError where keys of `rollout` contradict each other, or one would be left unread.

    config: of a command whose model samples.
    """
    rollout = config.rollout
    if "" in rollout.stop:
        raise ConfigError("rollout.stop", "", "would end every completion at once", "give texts, or leave it out")
    if rollout.samples_itself and rollout.cache_tokens != "auto" and rollout.cache_tokens < config.max_length:
        raise ConfigError(
            "rollout.cache_tokens",
            rollout.cache_tokens,
            (
                f"is less than a sequence may have, data.max_prompt_length {config.data.max_prompt_length} "
                f"and rollout.max_new_tokens {rollout.max_new_tokens} together"
            ),
            f"give at least {config.max_length}",
        )
    if rollout.backend == "recorded" and rollout.path is None:
        why = 'leaves rollout.backend "recorded" nothing to replay'
        raise ConfigError("rollout.path", None, why, "give a folder with samples")
    if rollout.backend != "recorded" and rollout.path is not None:
        why = f"is not used by rollout.backend {rollout.backend}"
        raise ConfigError("rollout.path", rollout.path, why, "set it to recorded, or leave this out")
    if not rollout.samples_itself:
        fix = "leave it out, or set rollout.backend to native"
        refuse_unread(rollout, "rollout", f"by rollout.backend {rollout.backend}", fix, NATIVE_ONLY)
    if rollout.backend == "recorded":
        reason, fix = "by rollout.backend recorded, which samples nothing", "leave it out, or choose another backend"
        refuse_unread(rollout, "rollout", reason, fix, SAMPLING)
    _check_server(config)
    _check_environment(config)


def check_cuda_graphs(rollout: RolloutConfig, engine: EngineConfig, path: str) -> None:
    """Raises ConfigError if the engine that samples has no such steps. path: of the engine."""
    if rollout.cuda_graphs and engine.backend != "megatron":
        why = f"is not for {path}.backend {engine.backend}"
        raise ConfigError("rollout.cuda_graphs", True, why, "leave it out, or set that to megatron")


def check_batch_invariant(rollout: RolloutConfig, engine: EngineConfig, path: str) -> None:
    """Raises ConfigError where what samples is not invariant, though the engine at `path` is to be."""
    if not engine.batch_invariant:
        return
    key = f"{path}.batch_invariant"
    if rollout.backend in SERVERS:
        why = f"does not reach rollout.backend {rollout.backend}, whose samples depend on what shares their batch"
        raise ConfigError(key, True, why, "set that to native, or leave this out")
    if rollout.cuda_graphs:
        why = "samples one token at a time, and rollout.cuda_graphs is for steps of several sequences"
        raise ConfigError(key, True, why, "leave out one of them")


def _check_server(config: Any) -> None:
    backend, server, path = config.rollout.backend, config.rollout.server, "rollout.server"
    if config.rollout.samples_itself and config.rollout.ranks:
        unread = ("urls", "handover", "lora", "concurrency", "timeout_s", "sleep", "memory_fraction")
        refuse_unread(server, path, "by rollout.ranks", "leave it out, or use servers", unread)
    elif backend == "auto":
        fix = f"set that to {' or '.join(SERVERS)}, or leave this out"
        reason = "by rollout.backend auto, which never uses servers"
        refuse_unread(server, path, reason, fix, ("urls", *SERVERS_ONLY))
    elif backend not in SERVERS:
        fix = f"set it to {' or '.join(SERVERS)}, or leave this out"
        refuse_unread(server, path, f"by rollout.backend {backend}", fix)
    elif server.urls:
        fix = "leave it out, or leave out rollout.server.urls"
        refuse_unread(server, path, "by servers, which have their own", fix, IN_PROCESS_ONLY)
    elif backend == "sglang":
        raise ConfigError(
            "rollout.server.urls",
            [],
            "leaves rollout.backend sglang no server",
            "give their urls, as [http://host:30000]",
        )
    else:
        fix = "leave it out, or give rollout.server.urls"
        refuse_unread(server, path, "by vLLM inside the trainer", fix, SERVERS_ONLY)
    for url in server.urls:
        check_url("rollout.server.urls", url)


def _check_adapters_alone(config: PPOConfig) -> None:
    """Raises ConfigError where servers cannot get the actor's adapters alone, or other keys would be left unread."""
    server, model = config.rollout.server, config.actor.model
    if server.lora != "adapter":
        return
    if model.lora is None:
        why = "needs adapters, and actor.model.lora is null"
        raise ConfigError("rollout.server.lora", "adapter", why, "set it to merged, or train adapters")
    if model.mtp is not None:
        why = "hands no MTP layers over, and actor.model.mtp trains them"
        raise ConfigError("rollout.server.lora", "adapter", why, "set it to merged, or actor.model.mtp to null")
    if server.handover not in ("auto", "disk"):
        why = "is no way for adapters alone (rollout.server.lora adapter), which go as files"
        fix = "set it to auto, or rollout.server.lora to merged"
        raise ConfigError("rollout.server.handover", server.handover, why, fix)
    reason, fix = "by rollout.server.lora adapter, which writes one file", "leave it out, or set that to merged"
    refuse_unread(server, "rollout.server", reason, fix, ("bucket_mb",))


def check_inside(rollout: RolloutConfig, world_size: int, hf: Mapping[str, Any]) -> None:
    """Raises ConfigError if an engine inside the trainer cannot be split over `rollout.server.tp` processes.

    hf: the actor's config.json.
    """
    tp = rollout.server.tp
    if world_size % tp:
        near = divisors_near(world_size, tp, most=2).replace(", ", " or ")
        raise ConfigError(
            "rollout.server.tp", tp, f"does not divide the number of processes, {world_size}", f"give {near}"
        )
    text = hf.get("text_config")
    heads = (text if isinstance(text, Mapping) else hf).get("num_attention_heads")
    if isinstance(heads, int) and heads % tp:
        near = divisors_near(math.gcd(heads, world_size), tp, most=2).replace(", ", " or ")
        raise ConfigError(
            "rollout.server.tp", tp, f"does not divide the model's {heads} attention heads", f"give {near}"
        )


def check_stop_tokens(rollout: RolloutConfig, vocab_size: int | None) -> None:
    """Raises ConfigError for ids that the model does not have. vocab_size: None if config.json does not state it."""
    outside = [token for token in rollout.stop_tokens if vocab_size is not None and token >= vocab_size]
    if outside:
        why = f"is no token of the model: config.json has vocab_size {vocab_size}"
        raise ConfigError("rollout.stop_tokens", outside[0], why, "give ids of its tokenizer")


def _check_async(config: PPOConfig) -> None:
    """Raises ConfigError if nothing could sample while the run trains, or what it samples would be used wrongly."""
    rollout, level, key = config.rollout, config.rollout.async_level, "rollout.async_level"
    if rollout.ranks:
        _check_ranks(config)
    if not level:
        return
    if not rollout.ranks and (rollout.backend not in SERVERS or not rollout.server.urls):
        fix = "set rollout.backend to vllm or sglang, and rollout.server.urls, or rollout.ranks, or leave it out"
        raise ConfigError(key, level, "needs servers or ranks that sample while this run trains", fix)
    if not rollout.ranks and level > len(rollout.server.urls) and rollout.server.lora != "adapter":
        why = f"needs {level} groups of servers, as each holds one set of weights, and rollout.server.urls has "
        fix = "give more, or train adapters with rollout.server.lora adapter, which one server holds several of"
        raise ConfigError(key, level, why + str(len(rollout.server.urls)), fix)
    if rollout.server.sleep:
        why = "has servers sample while this run trains, and rollout.server.sleep has them sleep"
        raise ConfigError(key, level, why, "leave out one of them")
    if config.algorithm.correction == "none":
        why = f"leaves samples of older weights ({key} {level}) uncorrected"
        raise ConfigError("algorithm.correction", "none", why, "set it to truncate or mask, or leave it out: truncate")
    every, steps = config.train.eval_every, config.steps_per_iteration
    if every is not None and every % steps:
        why = f"is not a multiple of the {steps} steps of an iteration, and with {key} servers get weights between two"
        raise ConfigError("train.eval_every", every, why, f"give {_nearest_multiples(every, steps)}")


def _check_ranks(config: PPOConfig) -> None:
    """Raises ConfigError if ranks of their own cannot sample, or would not do so beside training."""
    rollout, key = config.rollout, "rollout.ranks"
    if not rollout.samples_itself:
        why = f"have the actor's engine sample, and rollout.backend is {rollout.backend}"
        raise ConfigError(key, rollout.ranks, why, "set that to native, or leave this out")
    if rollout.async_level != 1:
        why = f"is not for {key}, whose ranks sample one rollout ahead"
        raise ConfigError("rollout.async_level", rollout.async_level, why, "set it to 1")
    if config.actor.engine.backend == "fsdp" and rollout.server.tp > 1:
        why = "is for actor.engine.backend megatron: fsdp shards the model over all ranks"
        raise ConfigError("rollout.server.tp", rollout.server.tp, why, "leave it out")


def _check_environment(config: Any) -> None:
    rollout = config.rollout
    if rollout.environment is None:
        fix = "leave it out, or set rollout.environment"
        refuse_unread(rollout, "rollout", "without rollout.environment", fix, ENVIRONMENT_KEYS)
        return
    check_spec(rollout.environment, "rollout.environment", "my_env.py:Env")
    if rollout.backend == "recorded":
        raise ConfigError(
            "rollout.environment",
            rollout.environment,
            "cannot answer what rollout.backend recorded replays",
            "leave it out, or sample with another backend",
        )


def _check_best(config: PPOConfig) -> None:
    checkpoint = config.checkpoint
    if checkpoint.best is None:
        fix = "set checkpoint.best, or leave it out"
        refuse_unread(checkpoint, "checkpoint", "without checkpoint.best", fix, ("best_is",))
        return
    written = written_metrics(config)
    if checkpoint.best not in written:
        fix = f"give one of {join_names(written)}, or set data.eval for those of eval/"
        raise ConfigError("checkpoint.best", checkpoint.best, "is no metric that the run can be best at", fix)


def written_metrics(config: PPOConfig) -> list[str]:
    """Returns metrics by which a checkpoint can be the best: what is learned, and from what; no times and no
    counters."""
    labels = [label_of(function) for function in config.rewards.functions] if config.rewards is not None else []
    labels += [REWARD_MODEL] if config.reward.model.path is not None else []
    labels += [ENVIRONMENT] if config.rollout.environment is not None else []
    kinds = ("eval/", "reward/", "rollout/", "actor/", "critic/")
    names = [name for name in PPO_METRICS if name.startswith(kinds if config.data.eval is not None else kinds[1:])]
    if config.rollout.environment is None:
        names = [name for name in names if name not in CONVERSATION_METRICS]
    if config.algorithm.distill is None:
        names = [name for name in names if name not in ("actor/divergence", "actor/teacher_tail")]
    plain = [name for name in names if "<" not in name]
    if isinstance(config.data.eval, Mapping):
        plain += [f"eval/{of}/{name}" for of in config.data.eval for name in ("accuracy", "reward", "response_length")]
    others = config.reference.others
    filled = {"<label>": labels, "<teacher>": ["reference", *others] if others else []}
    return plain + [
        name.replace(place, value)
        for name in names
        for place, values in filled.items()
        if place in name
        for value in values
    ]
