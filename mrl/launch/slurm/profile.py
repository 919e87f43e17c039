"""The options of a job: a site's defaults in a profile, with the command line's over them."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from mrl.config.build import build_section
from mrl.config.load import read_yaml
from mrl.launch.slurm.options import DEFAULT_PROFILE, Profile, SlurmConfig, check_options


def load_options(profile: str | None, given: Mapping[str, Any]) -> SlurmConfig:
    """Returns the profile's `slurm:` block with `given` (keys of SlurmConfig, dotted below servers) over it, checked.

    profile: None is DEFAULT_PROFILE, which need not exist. Lists and mappings are added to the profile's.
    """
    path = pathlib.Path(profile or DEFAULT_PROFILE).expanduser()
    raw = read_yaml(path) if profile is not None or path.is_file() else {}
    block = dict(raw.get("slurm") or {}) if isinstance(raw.get("slurm") or {}, Mapping) else raw["slurm"]
    if isinstance(block, dict):
        for name, value in given.items():
            _put(block, name, value)
        raw = {**raw, "slurm": block}
    options = build_section(Profile, raw, "", Profile).slurm
    check_options(options)
    return options


def _put(block: dict[str, Any], name: str, value: Any) -> None:
    section, dot, last = name.partition(".")
    if dot:
        below = block[section] = dict(block.get(section) or {})
        _put(below, last, value)
    elif isinstance(value, list) and isinstance(block.get(name), list):
        block[name] = [*block[name], *value]
    elif isinstance(value, dict) and isinstance(block.get(name), dict):
        block[name] = {**block[name], **value}
    else:
        block[name] = value
