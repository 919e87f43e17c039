"""Names of engines: mrl's own, and those that installed packages register. Nothing is imported to look a name up."""

from __future__ import annotations

from importlib import metadata

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
