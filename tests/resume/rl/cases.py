"""What the ranks of a test world run: the trainer of `mrl ppo`, with something happening to it at a place."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch.distributed as dist

from mrl.algorithms.losses import ActorLoss, CriticLoss
from mrl.config.load import from_dict
from mrl.config.ppo import PPOConfig
from mrl.errors import UserError
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.rollouts import Rollouts
from mrl.trainers import ppo
from mrl.trainers.rl.collect import Collector
from mrl.trainers.rl.trainer import PPOTrainer, trainer_of
from tests.trainers.cases import before, outcome


class Crash(UserError):
    """A run that ends at once: it saves nothing and closes nothing that a killed one would not."""


PLACES: dict[str, tuple[Any, str, Callable[..., int | None]]] = {
    "start": (WorkerDispatch, "init_model", lambda *_: 0),
    "rollout": (Collector, "collect", lambda collector, prompts, step: step),
    "rewards": (Rollouts, "answer", lambda _, prompts, asked: asked.step if asked.series == "step" else None),
    "evaluation": (Rollouts, "answer", lambda _, prompts, asked: asked.step if asked.series == "eval" else None),
    "forwards": (ppo, "prepare", lambda trainer, collected: trainer.progress.step + 1),
    "step": (ppo, "one_step", lambda trainer, experience: trainer.progress.step + 1),
    "save": (PPOTrainer, "save", lambda trainer, **_: trainer.progress.step),
}
"""Place -> the call that it is before, and the step that such a call belongs to (None: it is another place)."""


def train(
    config: Mapping[str, Any], *, happening: str | None = None, folder: str = ".", **details: Any
) -> tuple[str, str, str]:
    """Runs the trainer. Returns how it ended ("done", "stopped" or the error's class), its message, and what it printed.

    folder: what paths are of.
    """
    around = HAPPENINGS[happening](**details) if happening else contextlib.nullcontext()
    with contextlib.chdir(folder), around:
        return outcome(lambda: ppo.run(from_dict(config, PPOConfig), "mrl ppo config.yaml"))


def resave(config: Mapping[str, Any], checkpoint: str, folder: str) -> str:
    """Reads a checkpoint of all roles and saves it into the run's own folder, without a step. folder: what paths are of."""
    with contextlib.chdir(folder), trainer_of(from_dict(config, PPOConfig)) as trainer:
        trainer.dispatch.init_model()
        state = trainer.dispatch.load_checkpoint(checkpoint)
        root = str(trainer.directory.checkpoints)
        return trainer.dispatch.save_checkpoint(root, global_step=state["progress"]["step"], state=state)


def at(place: str, step: int, do: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Calls `do` the first time that a place of PLACES comes in `step`."""
    owner, name, step_of = PLACES[place]
    done: list[bool] = []

    def first(*args: Any, **kwargs: Any) -> None:
        if step_of(*args, **kwargs) == step and not done:
            done.append(True)
            do()

    return before(owner, name, first)


@contextlib.contextmanager
def signals(place: str, step: int, name: str = "SIGTERM", rank: int = 0) -> Iterator[None]:
    """A signal to one rank at a place."""

    def send() -> None:
        if dist.get_rank() == rank:
            os.kill(os.getpid(), getattr(signal, name))

    with at(place, step, send):
        yield


@contextlib.contextmanager
def crash(place: str, step: int) -> Iterator[None]:
    """Every rank ends at a place."""

    def end() -> None:
        raise Crash(f"{place} of step {step}")

    with at(place, step, end):
        yield


@contextlib.contextmanager
def nan_loss(role: str, step: int) -> Iterator[None]:
    """The loss of `role` is not a number in `step`."""
    kind = {"actor": ActorLoss, "critic": CriticLoss}[role]
    original, poisoned = kind.__call__, []

    def call(*args: Any) -> Any:
        loss, ctx = original(*args)
        return loss * (float("nan") if poisoned else 1.0), ctx

    with at("step", step, lambda: poisoned.append(True)), mock.patch.object(kind, "__call__", call):
        yield


@contextlib.contextmanager
def writes(place: str, step: int, path: str, text: str) -> Iterator[None]:
    """A file appears at a place."""
    with at(place, step, lambda: pathlib.Path(path).write_text(text)):
        yield


HAPPENINGS: dict[str, Callable[..., contextlib.AbstractContextManager[None]]] = {
    each.__name__: each
    for each in (
        signals, writes, crash, nan_loss,
    )
}  # fmt: skip
