"""Names of engines: mrl's own, and those that installed packages register. Nothing is imported to look a name up."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from importlib import metadata
from typing import Any

from mrl.config.keys import non_default_keys
from mrl.config.schema import EngineConfig, ModelConfig
from mrl.errors import ConfigError

GROUP = "mrl.engines"
"""The entry-point group of engines: `name = "package.module:EngineClass"` (see docs/backends.md)."""

OWN_KEYS: dict[str, tuple[str, ...]] = {
    "megatron": (
        "model.lora", "model.mtp", "engine.parallel", "engine.recompute", "engine.recompute_modules", "engine.moe",
        "engine.offload", "engine.layer_spec", "engine.attention", "engine.megatron", "engine.batch_invariant",
        "engine.micro_batch", "engine.cuda_graphs",
    ),
    "fsdp": (
        "model.lora", "engine.parallel.cp", "engine.parallel.sp", "engine.recompute.full", "engine.recompute_every",
        "engine.offload", "engine.fsdp",
    ),
}  # fmt: skip
"""mrl's own engines and what each supports (`mrl.engine.checks.EngineChecks.supports`)."""


def entry_points_of(group: str) -> dict[str, list[metadata.EntryPoint]]:
    """Returns what installed packages register in a group, by name."""
    entry_points: dict[str, list[metadata.EntryPoint]] = {}
    for entry in metadata.entry_points(group=group):
        entry_points.setdefault(entry.name, []).append(entry)
    return entry_points


def package_of(entry: metadata.EntryPoint) -> str:
    """Returns the package that registers `entry`, with its version."""
    return "a package without a name" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def entry_point(name: str, path: str = "engine") -> metadata.EntryPoint:
    """Returns the one engine of an installed package with this name. Raises ConfigError where there are none or
    several."""
    engines = entry_points_of(GROUP)
    entries = engines.get(name, [])
    if len(entries) == 1:
        return entries[0]
    if entries:
        packages = " and ".join(sorted(map(package_of, entries)))
        raise ConfigError(
            f"{path}.backend", name, f"is registered by {len(entries)} packages, {packages}", "uninstall all but one"
        )
    names = [*OWN_KEYS, *sorted(set(engines) - set(OWN_KEYS))]
    fix = f"give one of {', '.join(names)}, or install a package that registers it under {GROUP}"
    raise ConfigError(f"{path}.backend", name, "is no engine", fix)


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
