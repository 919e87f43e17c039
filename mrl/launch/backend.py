"""`rollout.backend: auto`: vLLM inside the trainer if it can sample there, else native. Chosen once in a run's life."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.config.command import Part, TrainingCommand
from mrl.config.keys import value_at
from mrl.config.ppo_checks import with_backend
from mrl.errors import ConfigError, one_line
from mrl.launch import automatic, preflight
from mrl.launch.environment import JoinedWorld
from mrl.rollout import vllm_start
from mrl.rollout.vllm_start import KEY, check_version, installed

ASK_S = 55.0
"""Longest time in which vLLM is imported and says whether it takes the model."""


def is_auto(config: Any) -> bool:
    return _backend(config) == "auto"


def _backend(config: Any) -> str | None:
    """Returns `rollout.backend` of a command that samples."""
    rollout = getattr(config, "rollout", None)
    return None if rollout is None else rollout.backend


def kept(config: Any) -> tuple[Any, list[str]]:
    """Returns the config with the backend of the run that it resumes in place of auto, and a line.

    The run's config.yaml says it, if that lies around the checkpoint.
    """
    found = automatic.resumed_yaml(config) if is_auto(config) else None
    if found is not None:
        saved = value_at(found[1], KEY)
        if saved in ("native", "vllm"):
            return with_backend(config, saved), [f"{KEY}: {saved} (auto; {found[0]} has it)"]
    return config, []


def choose(
    command: TrainingCommand, config: Any, parts: Sequence[Part], world_size: int, joined: JoinedWorld | None
) -> tuple[Any, list[str]]:
    """Returns the config with a backend in place of auto, and a line. All ranks get the choice of the first one.

    Raises ConfigError if vLLM is to be the backend inside the trainer, and is absent or too old.
    """
    if not is_auto(config):
        if _backend(config) == "vllm" and not config.rollout.server.urls:
            check_version(installed())
        return config, []

    def chosen() -> tuple[Any, list[str]]:
        why, _ = why_native(command, config, parts, world_size, fixed=True)
        if why is None:
            return with_backend(config, "vllm"), [f"{KEY}: vllm (auto; vLLM {installed()} takes the model)"]
        return with_backend(config, "native"), [f"{KEY}: native (auto; {why})"]

    if joined is None or config.rollout.ranks:  # with ranks the keys decide, and these processes are two worlds
        return chosen()
    from mrl.engine import collective
    from mrl.ops import devices

    collective.join_processes(devices.device_type())
    return collective.on_main(chosen)


def describe_here(
    command: TrainingCommand, config: Any, parts: Sequence[Part], world_size: int, *, fixed: bool
) -> list[str]:
    """Returns a line on what auto is, or would be on this machine: the run may start on another one."""
    if not is_auto(config):
        return []
    why, everywhere = why_native(command, config, parts, world_size, fixed=fixed)
    if everywhere:
        return [f"{KEY}: auto is native ({why})"]
    here = f"vllm, {installed()}" if why is None else f"native, because {why}"
    return [f"{KEY}: auto would be {here}, on this machine; a run chooses where it starts"]


def why_native(
    command: TrainingCommand, config: Any, parts: Sequence[Part], world_size: int, *, fixed: bool
) -> tuple[str | None, bool]:
    """Returns why vLLM cannot sample inside the trainer, None if it can, and whether that is so on any machine.

    fixed: whether the user has said the world size, so that it is no choice for this machine.
    """
    if config.actor.engine.device == "cpu":
        return "the actor is on the CPU", True
    with_vllm, everywhere = with_backend(config, "vllm"), True
    try:
        command.check(with_vllm)
        everywhere = fixed or config.rollout.ranks > 0
        command.check_processes(with_vllm, parts, world_size)
    except ConfigError as error:
        return str(error), everywhere
    from mrl.ops import devices
    from mrl.rollout.vllm import log_probs_mode
    from mrl.rollout.vllm_local import engine_arguments

    if not devices.has_gpu():
        return "torch sees no GPU", False
    version, ran = installed(), vllm_start.RAN_ON_GPUS
    if not ran or version is not None and version.partition("+")[0] not in ran:
        which = f"the vLLM here, {version or 'of an unknown version'}, has not" if ran else "no version of vLLM has"
        return f"{which} run to its end on a GPU yet; {KEY}=vllm takes it", False
    actor = next(part for part in parts if part.role == "actor")
    arguments = engine_arguments(
        config.rollout.server, path=preflight.config_folder(actor.model, actor.key("model")), dtype=actor.model.dtype,
        max_length=config.max_length, mode=log_probs_mode(config.rollout.temperature), gpu=True,
    )  # fmt: skip
    return ask_vllm(arguments, gpu=True), False


def ask_vllm(arguments: Mapping[str, Any], *, gpu: bool) -> str | None:
    """Returns why vLLM does not take a model, asked in a process of its own; None if it does."""
    command = [sys.executable, "-P", "-m", "mrl.rollout.vllm_start", json.dumps(arguments), str(gpu)]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"}
    with tempfile.TemporaryFile() as out:  # a pipe would stay open with vLLM's own processes
        output: Any = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        asked = subprocess.Popen(command, **output, env=environment, start_new_session=True)
        try:
            code = asked.wait(ASK_S)
        except subprocess.TimeoutExpired:
            return f"vLLM does not say within {ASK_S:g} s whether it takes the model"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(asked.pid, signal.SIGKILL)  # vLLM may have started processes of its own
            asked.wait()
        out.seek(0)
        said = [line for line in out.read().decode(errors="replace").splitlines() if line.strip()]
    return None if code == 0 else one_line(said[-1] if said else f"vLLM ends Python with exit code {code}", 300)
