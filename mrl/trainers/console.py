"""Shows the lines of a run, and on a terminal a live progress bar."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from rich.console import Console as RichTerminal
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from mrl.trainers.waits import WaitWatch, write_line

CONSOLE_METRICS = (
    ("reward/mean", "reward", "{:z.3f}"),
    ("eval/accuracy", "accuracy", "{:z.4g}"),
    ("train/loss", "loss", "{:.4f}"),
    ("eval/loss", "eval", "{:.4f}"),
    ("distill/divergence", "divergence", "{:.4f}"),
    ("rewards/accuracy", "accuracy", "{:.3f}"),
    ("rewards/margin", "margin", "{:z.3f}"),
    ("rewards/error", "error", "{:.3f}"),
    ("steps/accuracy", "accuracy", "{:.3f}"),
    ("actor/kl", "kl", "{:z.3g}"),
    ("actor/entropy", "entropy", "{:.3f}"),
    ("actor/clip_fraction", "clip", "{:.1%}"),
    ("critic/explained_variance", "explained", "{:z.2f}"),
    ("rollout/finished", "finished", "{:.0%}"),
    ("rollout/response_length", "length", "{:.0f}"),
    ("train/grad_norm", "norm", "{:.3g}"),
    ("train/lr", "lr", "{:.3g}"),
    ("perf/tokens_per_s", "tok/s", "{:,.0f}"),
    ("perf/mfu", "mfu", "{:.1%}"),
    ("perf/step_s", "seconds", "{:.1f}"),
)
"""Metric, its short name on the terminal, its format; z has no value that rounds to zero be negative."""

SampleRow = tuple[str, str, float | None, Mapping[str, float]]
"""(prompt, completion, reward, its parts by label) of a sample; the reward is None where nothing is rewarded."""

LINE_CHARACTERS = 60


class Console:
    """Says nothing: what every process but the main one has, and `log.console: none`."""

    shows = False

    def say(self, line: str) -> None:
        """Shows one line."""

    def doing(self, what: str) -> None:
        """The run begins with `what`. It is shown if it takes long."""

    def detail(self, how_far: str) -> None:
        """Shows how far the run is with it."""

    def generated(self, done: int, of: int) -> None:
        """`done` of `of` completions are whole: those of the main process's replica, of which others do like shares."""
        if self.shows and of:  # a replica may have none of them
            self.detail(f"{done / of:.0%} of the completions are whole")

    def start(self, step: int, total_steps: int) -> None:
        """Training begins after `step` of `total_steps`."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Optimizer step number `step` is made."""

    def samples(self, rows: Sequence[SampleRow]) -> None:
        """Shows a few samples of a rollout."""
        for prompt, completion, reward, _ in rows:
            number = "" if reward is None else f"{reward:8.3f}  "
            self.say(f"  {number}{_short(prompt)!r} -> {_short(completion)!r}")

    def close(self) -> None:
        """Ends the progress bar and the watch over waits; `say` still works. May be called twice."""


class PlainConsole(Console):
    """A line per step, of those that `log.every` shows. write: shows one."""

    shows = True

    def __init__(self, write: Callable[[str], None] = write_line, every: int = 1) -> None:
        self._clock, self._write, self._every = _Clock(0, 0), write, every
        self._watch = WaitWatch(write)

    def say(self, line: str) -> None:
        self._watch.reset()
        self._write(line)

    def doing(self, what: str) -> None:
        self._watch.doing(what)

    def detail(self, how_far: str) -> None:
        self._watch.detail(how_far)

    def start(self, step: int, total_steps: int) -> None:
        self._clock = _Clock(step, total_steps)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        eta = self._clock.eta(step)
        if self._clock.is_shown(step, metrics, self._every):
            self.say(f"{_line(step, self._clock.total_steps, metrics)}  eta {eta}")

    def close(self) -> None:
        self._watch.close()


class LiveConsole(Console):
    """A line per step, of those that `log.every` shows, and below them a bar with what the run is doing."""

    shows = True

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._terminal = RichTerminal(highlight=False, soft_wrap=True)
        self._clock = _Clock(0, 0)
        self._bar: Progress | None = None

    def say(self, line: str) -> None:
        self._terminal.print(line, markup=False)

    def doing(self, what: str) -> None:
        self._update(what=what, detail="")

    def detail(self, how_far: str) -> None:
        self._update(detail=how_far)

    def start(self, step: int, total_steps: int) -> None:
        self._clock = _Clock(step, total_steps)
        self._update(total=total_steps, completed=step, steps=f"step {step}/{total_steps}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        total, eta = self._clock.total_steps, self._clock.eta(step)
        if self._clock.is_shown(step, metrics, self._every):
            self.say(_line(step, total, metrics))
        self._update(completed=step, steps=f"step {step}/{total}", eta=f"eta {eta}")

    def _update(self, **fields: object) -> None:
        """Changes what the bar shows; there is one from now on."""
        if self._bar is None:
            columns = [SpinnerColumn(), TextColumn("{task.fields[steps]}", markup=False), BarColumn(bar_width=20)]
            columns += [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("eta", "what", "detail")]
            self._bar = Progress(*columns, console=self._terminal, transient=True)
            self._bar.add_task("train", total=None, steps="", eta="", what="", detail="")
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], **fields)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def open_console(kind: Literal["rich", "plain", "none"], *, enabled: bool, every: int = 1) -> Console:
    """Returns the console of `log.console`. enabled: False on every process but one. every: `log.every`."""
    if kind == "none" or not enabled:
        return Console()
    return LiveConsole(every) if kind == "rich" and sys.stdout.isatty() else PlainConsole(every=every)


class _Clock:
    """An estimate of the remaining time, from the steps that this process made since `start`."""

    def __init__(self, step: int, total_steps: int) -> None:
        self.first, self.total_steps, self._began_s = step, total_steps, time.monotonic()

    def eta(self, step: int) -> str:
        """h:mm:ss until the last step; "-" before there is one."""
        if step == self.first:
            return "-"
        per_step_s = (time.monotonic() - self._began_s) / (step - self.first)
        return str(datetime.timedelta(seconds=round(per_step_s * (self.total_steps - step))))

    def is_shown(self, step: int, metrics: Mapping[str, float], every: int) -> bool:
        """Returns whether a step has a line on the terminal."""
        evaluated = any(name.startswith("eval/") for name in metrics)
        return step % every == 0 or step in (self.first + 1, self.total_steps) or evaluated


def _short(text: str) -> str:
    """Returns the end of a text if it is too long: its question or answer stands there."""
    return text if len(text) <= LINE_CHARACTERS else "…" + text[1 - LINE_CHARACTERS :]


def _line(step: int, total_steps: int, metrics: Mapping[str, float]) -> str:
    shown = [f"{short} {form.format(metrics[name])}" for name, short, form in CONSOLE_METRICS if name in metrics]
    return "  ".join([f"step {step}/{total_steps}", *shown])
