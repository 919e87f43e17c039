"""The saves of a run, those among them that are written while it trains (`checkpoint.background`): begun and ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from mrl.engine.background import BackgroundSaver
from mrl.engine.base import BaseEngine
from mrl.errors import ConfigError
from mrl.trainers.console import Console


def check_background(wanted: bool, engines: Mapping[str, BaseEngine]) -> None:
    """Refuses `checkpoint.background` with an engine that cannot. engines: by the section of the config."""
    for key, engine in engines.items():
        if wanted and not engine.saves_in_background:
            raise ConfigError(
                "checkpoint.background",
                True,
                f"needs an engine that can copy its state, and {key} {engine.backend} has no stage_state",
                "set it to false",
            )


class CheckpointSaver:
    """Saves checkpoints. All methods but `ended` on its way out of an error are collective."""

    def __init__(self, device: torch.device) -> None:
        self.saver = BackgroundSaver(device)
        self._held_s: float | None = None
        self._written_s: float | None = None

    def save(self, write: Callable[[], str]) -> str:
        """Calls `write`, which saves a checkpoint or gives it to `saver` to be written. Returns its folder."""
        began_s = time.perf_counter()
        self.finish()  # one at a time: it bounds host memory, and saves end in order
        saved = write()
        self._held_s = time.perf_counter() - began_s
        return saved

    def finish(self) -> None:
        """Waits for the save under way, if any, and raises what went wrong with it."""
        self._written_s = self.saver.finish() or self._written_s

    def metrics(self) -> dict[str, float]:
        """Returns how long the save before this step held training up, and how long one that has ended was written.
        Raises what went wrong with it."""
        seconds = {"perf/save_held_s": self._held_s, "perf/save_write_s": self.saver.poll() or self._written_s}
        self._held_s = self._written_s = None
        return {name: value for name, value in seconds.items() if value is not None}

    @contextlib.contextmanager
    def ended(self, console: Console) -> Iterator[None]:
        """On the way out the save under way has ended: with an error of its own, or beside the one inside."""
        try:
            yield
        except BaseException as error:
            failed = self.saver.wait()
            if failed is not None and failed is not error:
                console.say(f"and the checkpoint that was being written failed: {failed}")
            raise
        self.finish()
