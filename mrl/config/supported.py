"""The keys that an engine says it reads. Any other key that is set is an error."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

from mrl.config.keys import non_default_keys
from mrl.config.schema import EngineConfig, ModelConfig
from mrl.errors import ConfigError

ALWAYS = (
    "model.path",
    "model.init",
    "model.dtype",
    "model.trust_remote_code",
    "engine.backend",
    "engine.device",
    "engine.micro_batch.tokens",
    "engine.micro_batch.size",
)
"""Keys and sections that every engine reads, or whoever starts it."""

SAME_AS_LEFT_OUT = [("engine.parallel.sp", False), ("engine.parallel.etp", 1)]
"""Values that say what the default comes to where nothing is split."""


def check_supported(
    backend: str, supports: Collection[str], model: ModelConfig, engine: EngineConfig, role: str = ""
) -> None:
    """Raises ConfigError for a key of `model` or `engine` that does not hold its default and is not supported.

    supports: keys and sections, as "engine.parallel.cp". It may also name a choice of a key, an entry of a list or a
    name of a mapping: "engine.recompute.full", "engine.offload.optimizer", "engine.options.bucket_mb".

    role: the owner of these sections.
    """
    known, of_role = (*ALWAYS, *supports), f"{role}." if role else ""
    for key, value in itertools.chain(non_default_keys(model, "model"), non_default_keys(engine, "engine")):
        if _within(key.path, known) or (key.path, value) in SAME_AS_LEFT_OUT:
            continue
        below = [name.removeprefix(key.path + ".") for name in supports if name.startswith(key.path + ".")]
        wrong = [part for part in _parts(value) if str(part) not in below]
        if not wrong:
            continue
        if isinstance(value, Mapping):
            name, given = wrong[0], value[wrong[0]]
            why = f"is for an option that backend {backend} does not have"
            fix = f"its options are {', '.join(below)}" if below else "it has none: leave it out"
            raise ConfigError(f"{of_role}{key.path}.{name}", given, why, fix)
        fix = f"give {' or '.join(below)}, or leave it out" if below else "leave it out, or choose another backend"
        raise ConfigError(f"{of_role}{key.path}", wrong[0], f"is not supported by backend {backend}", fix)


def _within(path: str, names: Collection[str]) -> bool:
    return any(path == name or path.startswith(name + ".") for name in names)


def _parts(value: Any) -> list[Any]:
    """Returns the entries of a list or names of a mapping; another value is one part."""
    return list(value) if isinstance(value, tuple | list | Mapping) else [value]
