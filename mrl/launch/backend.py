"""`rollout.backend: auto`: vLLM inside the trainer if it can sample there, else native. Chosen once in a run's life."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mrl.config.command import Config, Part, TrainingCommand
from mrl.config.keys import value_at
from mrl.config.load import read_yaml
from mrl.config.ppo import PPOConfig
from mrl.config.ppo_checks import with_backend
from mrl.engine.atomic_checkpoint import find_checkpoint
from mrl.errors import ConfigError, UserError, one_line
from mrl.launch import preflight
from mrl.launch.environment import JoinedWorld
from mrl.rollout import vllm_start

C = TypeVar("C", bound=Config)
KEY = vllm_start.KEY
ASK_S = 60.0
"""Longest time in which vLLM is imported and says whether it takes the model."""


def kept(config: C) -> tuple[C, list[str]]:
    """Returns the config with the backend of the run that this one resumes in place of auto, and a line.

    That is known if its config.yaml lies around the checkpoint.
    """
    if not isinstance(config, PPOConfig) or config.rollout.backend != "auto":
        return config, []
    resume, checkpoint = config.checkpoint.resume, None
    if resume != "never":
        with contextlib.suppress(UserError), preflight.quiet():  # the checks after this one say what is damaged
            checkpoint = find_checkpoint(str(Path(config.output_dir, "checkpoints")))
            if checkpoint is None and os.path.isdir(resume):
                checkpoint = find_checkpoint(resume)
    if checkpoint is None:
        return config, []
    file = Path(checkpoint).absolute().parents[1] / "config.yaml"
    saved = value_at(read_yaml(file), KEY) if file.is_file() else None
    if saved not in ("native", "vllm"):
        return config, []
    made: Any = with_backend(config, saved)
    return made, [f"{KEY}: {saved} (auto; {file} has it)"]


def check_installed(config: Any) -> None:
    """Raises ConfigError if vLLM is to sample inside the trainer, and is absent or too old."""
    if isinstance(config, PPOConfig) and config.rollout.backend == "vllm" and not config.rollout.server.urls:
        vllm_start.check_version(vllm_start.installed())


def choose(
    command: TrainingCommand, config: C, parts: Sequence[Part], world_size: int, joined: JoinedWorld | None
) -> tuple[C, list[str]]:
    """Returns the config with a backend in place of auto, and a line. All ranks get the choice of the first one."""
    if not isinstance(config, PPOConfig) or config.rollout.backend != "auto":
        return config, []

    def made() -> tuple[Any, list[str]]:
        why, _ = why_native(command, config, parts, world_size)
        if why is None:
            line = f"vllm (auto; vLLM {vllm_start.installed()} takes the model)"
            return with_backend(config, "vllm"), [f"{KEY}: {line}"]
        return with_backend(config, "native"), [f"{KEY}: native (auto; {why})"]

    if joined is None or config.rollout.ranks:  # with ranks the keys decide, and these processes are two worlds
        return made()
    from mrl.engine import collective
    from mrl.ops import devices

    collective.join_processes(devices.device_type())
    return collective.on_main(made)


def describe_here(command: TrainingCommand, config: Config, parts: Sequence[Part], world_size: int) -> list[str]:
    """Returns a line on what auto is, or would be on this machine: the run may start on another one."""
    if not isinstance(config, PPOConfig) or config.rollout.backend != "auto":
        return []
    why, everywhere = why_native(command, config, parts, world_size)
    if everywhere:
        return [f"{KEY}: auto is native ({why})"]
    here = f"vllm, {vllm_start.installed()}" if why is None else f"native, because {why}"
    return [f"{KEY}: auto would be {here}, on this machine; a run chooses where it starts"]


def why_native(
    command: TrainingCommand, config: PPOConfig, parts: Sequence[Part], world_size: int
) -> tuple[str | None, bool]:
    """Returns why vLLM cannot sample inside the trainer, None if it can, and whether that is so on any machine."""
    with_vllm = with_backend(config, "vllm")
    try:
        command.check(with_vllm)
        command.check_processes(with_vllm, parts, world_size)
    except ConfigError as error:
        return str(error), True
    if config.actor.engine.device == "cpu":
        return "the actor is on the CPU", True
    from mrl.ops import devices

    if not devices.has_gpu():
        return "torch sees no GPU", False
    version = vllm_start.installed()
    if version is None:
        return "vLLM is not installed", False
    try:
        untested = vllm_start.check_version(version)
    except ConfigError as error:
        untested = str(error)
    if untested is not None:
        return untested, False
    from mrl.rollout.vllm import log_probs_mode
    from mrl.rollout.vllm_local import engine_arguments

    actor = next(part for part in parts if part.role == "actor")
    folder = preflight.config_folder(actor.model, actor.key("model"))
    arguments = engine_arguments(
        config.rollout.server, path=folder, dtype=actor.model.dtype, max_length=config.max_length,
        mode=log_probs_mode(config.rollout.temperature), gpu=True,
    )  # fmt: skip
    return ask_vllm(arguments, gpu=True), False


def ask_vllm(arguments: Mapping[str, Any], *, gpu: bool) -> str | None:
    """Returns why vLLM does not take a model, asked in a process of its own; None if it does."""
    asked = json.dumps({"arguments": arguments, "gpu": gpu})
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-P", "-m", "mrl.rollout.vllm_start", asked]
    with tempfile.TemporaryFile() as out:  # vLLM's own processes would keep a pipe open
        try:
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment,
                timeout=ASK_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"vLLM does not say within {ASK_S:g} s whether it takes the model"
        out.seek(0)
        lines = out.read().decode(errors="replace").split("\n")
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            if isinstance(said := json.loads(line), dict) and "why" in said:
                return said["why"]
    last = next((line for line in reversed(lines) if line.strip()), "nothing")
    return f"vLLM does not say whether it takes the model (it said: {one_line(last, 200)})"
