"""What a run shows in the terminal: lines, and a live progress bar where there is a terminal."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from rich.console import Console as RichTerminal
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

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


SampleRow = tuple[str, str, float, Mapping[str, float]]
"""(prompt, completion, reward, its parts by label) of a sample."""

LINE_CHARACTERS, CELL_CHARACTERS = 60, 200
WAIT_S = 30.0
"""Seconds without a word that a user is left with while completions are generated."""


class Console:
    """Says nothing: what every process but the main one has, and `log.console: none`."""

    shows = False

    def say(self, line: str) -> None:
        """Shows one line."""

    def start(self, step: int, total_steps: int) -> None:
        """Training begins after `step` of `total_steps`."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Optimizer step number `step` is made."""

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Shows a few samples of the rollout that `step` is the first to be trained on."""

    def close(self) -> None:
        """Ends the progress bar; `say` still works. May be called twice."""


class PlainConsole(Console):
    """A line per step."""

    shows = True

    def __init__(self) -> None:
        self._clock = _Clock(0, 0)

    def say(self, line: str) -> None:
        sys.stdout.write(f"{line}\n")  # in one piece, unlike print: what a signal says comes before or after it
        sys.stdout.flush()

    def start(self, step: int, total_steps: int) -> None:
        self._clock = _Clock(step, total_steps)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.say(f"step {step}/{self._clock.total_steps}  {_values(metrics)}  eta {self._clock.eta(step)}")

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        for prompt, completion, reward, _ in rows:
            self.say(f"  {reward:8.3f}  {_short(prompt, LINE_CHARACTERS)!r} -> {_short(completion, LINE_CHARACTERS)!r}")


class LiveConsole(Console):
    """A progress bar at the bottom of the terminal; lines scroll above it."""

    shows = True

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

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        if not rows:
            return
        table = Table(title=f"rollout before step {step}", title_justify="left", show_lines=True)
        for column in ("prompt", "completion", "reward"):
            table.add_column(column, justify="right" if column == "reward" else "left")
        for prompt, completion, reward, parts in rows:
            cells = [f"{reward:.3f}", *(f"{label} {value:.3f}" for label, value in parts.items() if len(parts) > 1)]
            words = [Text(_short(text, CELL_CHARACTERS)) for text in (prompt, completion)]
            table.add_row(*words, "\n".join(cells))
        self._terminal.print(table)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def open_console(kind: Literal["rich", "plain", "none"], *, enabled: bool) -> Console:
    """The console of `log.console`. enabled: False on every process but one."""
    if kind == "none" or not enabled:
        return Console()
    return LiveConsole() if kind == "rich" and sys.stdout.isatty() else PlainConsole()


class Waiting:
    """Says every `WAIT_S` seconds how far a generation is; one that is shorter says nothing."""

    def __init__(self, console: Console) -> None:
        self._console, self._began_s = console, time.monotonic()
        self._said_s = self._began_s

    def __call__(self, done: int, of: int) -> None:
        """`done` of `of` completions are whole: those of the main process's replica, of which others do like shares."""
        now_s = time.monotonic()
        if now_s - self._said_s >= WAIT_S and done < of:
            self._said_s = now_s
            self._console.say(
                f"generating: {done / of:.0%} of the completions are whole after {now_s - self._began_s:.0f} s"
            )


class _Clock:
    """How long what is left will take, from the steps this process made."""

    def __init__(self, step: int, total_steps: int) -> None:
        self.first, self.total_steps, self._began_s = step, total_steps, time.monotonic()

    def eta(self, step: int) -> str:
        """h:mm:ss until the last step."""
        per_step_s = (time.monotonic() - self._began_s) / max(1, step - self.first)
        return str(datetime.timedelta(seconds=round(per_step_s * (self.total_steps - step))))


def _short(text: str, most: int) -> str:
    """The end of a text that is too long, where its question or answer is."""
    return text if len(text) <= most else "…" + text[1 - most :]


def _values(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{short} {form.format(metrics[name])}" for name, short, form in SHOWN if name in metrics)
