"""Checks of the keys of `mrl serve` against each other."""

from __future__ import annotations

import ipaddress
import os

from mrl.config.checks import check_backend, check_log, check_lora, check_micro_batch
from mrl.config.serve import ServeConfig
from mrl.errors import ConfigError

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
