"""What a run shows in the terminal: lines, and a live progress bar where there is a terminal."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Mapping
from typing import Literal

from rich.console import Console as RichTerminal
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

SHOWN = (
    ("reward/mean", "reward", "{:.3f}"),
    ("eval/accuracy", "accuracy", "{:.1%}"),
    ("train/loss", "loss", "{:.4f}"),
    ("eval/loss", "eval", "{:.4f}"),
    ("actor/kl", "kl", "{:.3g}"),
    ("critic/explained_variance", "explained", "{:.2f}"),
    ("train/grad_norm", "norm", "{:.3g}"),
    ("train/lr", "lr", "{:.3g}"),
    ("rollout/response_length", "length", "{:.0f}"),
    ("perf/tokens_per_s", "tok/s", "{:,.0f}"),
    ("perf/mfu", "mfu", "{:.1%}"),
)
"""Metric, its short name on the terminal, its format."""


class Console:
    """Says nothing: what every process but the main one has, and `log.console: none`."""

    def say(self, line: str) -> None:
        """Shows one line."""

    def start(self, step: int, total_steps: int) -> None:
        """Training begins after `step` of `total_steps`."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Optimizer step number `step` is made."""

    def close(self) -> None:
        """Ends the progress bar; `say` still works. May be called twice."""


class PlainConsole(Console):
    """A line per step."""

    def __init__(self) -> None:
        self._clock = _Clock(0, 0)

    def say(self, line: str) -> None:
        print(line, flush=True)

    def start(self, step: int, total_steps: int) -> None:
        self._clock = _Clock(step, total_steps)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.say(f"step {step}/{self._clock.total_steps}  {_values(metrics)}  eta {self._clock.eta(step)}")


class LiveConsole(Console):
    """A progress bar at the bottom of the terminal; lines scroll above it."""

    def __init__(self) -> None:
        self._terminal = RichTerminal(highlight=False, soft_wrap=True)
        self._clock = _Clock(0, 0)
        self._bar: Progress | None = None

    def say(self, line: str) -> None:
        self._terminal.print(line, markup=False)

    def start(self, step: int, total_steps: int) -> None:
        self._clock = _Clock(step, total_steps)
        columns = (
            SpinnerColumn(),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[values]}", markup=False),
            TextColumn("eta {task.fields[eta]}"),
        )
        self._bar = Progress(*columns, console=self._terminal, transient=True)
        self._bar.add_task("train", total=total_steps, completed=step, values="", eta="-")
        self._bar.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._bar is not None, "start comes before step"
        shown = {name: value for name, value in metrics.items() if not name.startswith("eval/")}
        self._bar.update(self._bar.task_ids[0], completed=step, values=_values(shown), eta=self._clock.eta(step))
        if len(shown) < len(metrics):  # an evaluation stays on the terminal
            self.say(f"step {step}  {_values(metrics)}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def open_console(kind: Literal["rich", "plain", "none"], *, enabled: bool) -> Console:
    """The console of `log.console`. enabled: False on every process but one."""
    if kind == "none" or not enabled:
        return Console()
    return LiveConsole() if kind == "rich" and sys.stdout.isatty() else PlainConsole()


class _Clock:
    """How long what is left will take, from the steps this process made."""

    def __init__(self, step: int, total_steps: int) -> None:
        self.first, self.total_steps, self._began_s = step, total_steps, time.monotonic()

    def eta(self, step: int) -> str:
        """h:mm:ss until the last step."""
        per_step_s = (time.monotonic() - self._began_s) / max(1, step - self.first)
        return str(datetime.timedelta(seconds=round(per_step_s * (self.total_steps - step))))


def _values(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{short} {form.format(metrics[name])}" for name, short, form in SHOWN if name in metrics)
