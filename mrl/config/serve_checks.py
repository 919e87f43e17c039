"""Checks of the keys of `mrl serve` against each other."""

from __future__ import annotations

import ipaddress

from mrl.config.checks import check_backend, check_log, check_lora, check_micro_batch
from mrl.config.serve import ServeConfig
from mrl.errors import ConfigError

PREFIX = "tml-"
SHORTEST_KEY = 16


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
    if keys.api_key is None and not is_loopback(keys.host):
        fix = f"set serve.api_key to {PREFIX} and a long secret, or listen on 127.0.0.1"
        raise ConfigError("serve.host", keys.host, "is reached by others, who would need no key", fix)
    if keys.api_key is not None and not (keys.api_key.startswith(PREFIX) and keys.api_key.isascii()):
        fix = f"begin it with {PREFIX}, as the client asks"
        raise ConfigError("serve.api_key", why=f"does not begin with {PREFIX}, or is not ASCII", fix=fix)
    if keys.api_key is not None and len(keys.api_key) < SHORTEST_KEY and not is_loopback(keys.host):
        fix = f"give at least {SHORTEST_KEY} characters"
        raise ConfigError("serve.api_key", why=f"has {len(keys.api_key)} characters, which can be guessed", fix=fix)
    if keys.cache_tokens < keys.max_length:
        why = f"is less than the {keys.max_length} tokens of serve.max_length"
        raise ConfigError("serve.cache_tokens", keys.cache_tokens, why, "raise it, or lower serve.max_length")


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
