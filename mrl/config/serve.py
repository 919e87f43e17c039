"""Every key of `mrl serve`, one model that clients train over HTTP, and checks of them against each other."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from typing import Literal

from mrl.config.checks import check_backend, check_log, check_lora, check_micro_batch
from mrl.config.schema import MAX_DEGREE, MAX_SECONDS, REQUIRED, EngineConfig, LogConfig, ModelConfig, key
from mrl.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServersConfig:
    kind: Literal["vllm", "sglang"] | None = key(
        None, "kind of the servers that draw samples; null draws them with the model's own engine"
    )
    urls: tuple[str, ...] = key((), "servers, as http://host:8000, that see output_dir under the same path")
    concurrency: int = key(128, "requests at a time at each server", minimum=1, maximum=MAX_DEGREE)
    timeout_s: float = key(600.0, "longest wait for an answer", above=0, maximum=MAX_SECONDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeKeys:
    host: str = key("127.0.0.1", "address to listen on; one that others reach needs a key in MRL_SERVE_KEY")
    port: int = key(8000, "port to listen on; 0 takes a free one", minimum=0, maximum=65535)
    name: str | None = key(None, "name of the model for clients; null is model.path as written")
    max_length: int = key(4096, "longest sequence in tokens: a datum, or a prompt with its completion", minimum=2)
    packing: bool = key(True, "pack sequences end to end without padding; false pads")
    max_models: int = key(64, "models that train at once; waiting ones are in host memory. More are refused", minimum=1)
    max_waiting: int = key(
        2000, "samples and model calls that wait at once; above it clients are told to retry", minimum=1
    )
    max_body_mb: int = key(64, "longest body of a request, in megabytes", minimum=1, maximum=2048)
    silent_s: float = key(
        600.0, "a client that is silent for this long loses its models, except what was saved", above=0
    )
    guards: bool = key(
        True, "check at each model's first step that gradients exist and are finite, and that replicas agree"
    )
    snapshots: int = key(4, "newest unnamed snapshots that are kept for each model", minimum=1)
    cache_tokens: int = key(65536, "tokens in the KV cache of a replica of the model while it samples", minimum=1)
    prefill_tokens: int = key(4096, "most prompt tokens in one forward", minimum=1)
    servers: ServersConfig = key(
        ServersConfig, "inference servers that draw samples while models train, with model.lora (docs/serve.md)"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    output_dir: str = key("runs/serve", "the server's directory, with all that is saved", may_change=True)
    seed: int = key(0, "seed of dropout", minimum=0, maximum=2**32 - 1)
    model: ModelConfig = key(
        REQUIRED, "the base model. With model.lora clients train adapters over it, else all its weights"
    )
    engine: EngineConfig = key(EngineConfig, "the engine and its layout")
    serve: ServeKeys = key(ServeKeys, "the server", may_change=True)
    log: LogConfig = key(LogConfig, "what is shown", may_change=True)


KEY = "MRL_SERVE_KEY"
"""The variable that has the key which clients send. It is in no config, which is printed and written to a file."""

PREFIX = "tml-"
"""What the client of tinker asks a key to begin with."""

MIN_KEY_LENGTH = 16


def check_serve(config: ServeConfig) -> None:
    """Raises ConfigError where keys contradict each other or one would be left unread."""
    keys, lora = config.serve, config.model.lora
    check_micro_batch(config.engine.micro_batch, keys.max_length, f"serve.max_length {keys.max_length}")
    check_backend(config.model, config.engine)
    check_lora(config.model)
    check_log(config.log)
    if lora is not None and lora.dropout:
        why = "would make what a model trains depend on the turns of others"
        raise ConfigError("model.lora.dropout", lora.dropout, why, "set it to 0")
    _check_servers(config)
    secret = secret_of_clients()
    if secret is None and not is_loopback(keys.host):
        fix = f"set {KEY} to {PREFIX} and a long secret, or listen on 127.0.0.1"
        raise ConfigError("serve.host", keys.host, "is reached by others, who would need no key", fix)
    if secret is not None and not (secret.startswith(PREFIX) and secret.isascii()):
        raise ConfigError(KEY, why=f"does not begin with {PREFIX}, or is not ASCII", fix=f"begin it with {PREFIX}")
    if secret is not None and len(secret) < MIN_KEY_LENGTH:
        why = f"has {len(secret)} characters, which can be guessed"
        raise ConfigError(KEY, why=why, fix=f"give at least {MIN_KEY_LENGTH}")
    if keys.cache_tokens < keys.max_length:
        why = f"is less than the {keys.max_length} tokens of serve.max_length"
        raise ConfigError("serve.cache_tokens", keys.cache_tokens, why, "raise it, or lower serve.max_length")


def _check_servers(config: ServeConfig) -> None:
    servers = config.serve.servers
    if (servers.kind is None) != (not servers.urls):
        lacking = "kind" if servers.kind is None else "urls"
        fix = "give vllm or sglang" if lacking == "kind" else "name the servers, as [http://node1:8000]"
        raise ConfigError(f"serve.servers.{lacking}", why="is missing beside the other key of servers", fix=fix)
    if servers.kind is not None and config.model.lora is None:
        why = "takes snapshots as adapters, and all weights train here"
        raise ConfigError("serve.servers.kind", servers.kind, why, "set model.lora, or leave the servers out")


def secret_of_clients() -> str | None:
    """Returns the key that clients must have; None if there is none."""
    return os.environ.get(KEY) or None


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
