"""Shows a check: a row for each layout as it is done, with its differences below, and the same as JSON."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import transformers

from mrl.check.compare import BOUNDS
from mrl.check.run import CheckOptions, CheckRow, Listener, Report, check
from mrl.doctor.examine import examine
from mrl.errors import UserError
from mrl.launch.preflight import quiet
from mrl.trainers.run_directory import git_states, versions
from mrl.trainers.waits import WaitWatch
from mrl.weights.json_file import plain_data
from mrl.words import pluralize

WIDTH = 100
MIN_SHARE = 0.05
"""The smallest share of comparable updates among the elements of weights. Below it the column is empty."""


def echo(text: str) -> None:
    """Prints a line, at once."""
    print(text, flush=True)


def echo_filled(text: str, first: str, others: str) -> None:
    """Prints a text in lines of WIDTH. first, others: what these lines begin with."""
    echo(textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=others))


class Terminal(Listener):
    """Prints as the check goes. shows: False prints progress alone, to stderr."""

    def __init__(self, *, dtype: str, shows: bool) -> None:
        self._watch = WaitWatch(lambda line: print(f"mrl: {line}", file=sys.stderr, flush=True))
        self._dtype, self._shows = dtype, shows
        self._began = False

    def header(self, name: str, text: str) -> None:
        if self._shows:
            echo_filled(text, f"{name:9}", " " * 9)
            self._watch.reset()

    def doing(self, what: str) -> None:
        self._watch.doing(what)

    def row(self, row: CheckRow) -> None:
        if not self._shows:
            return
        if not self._began:
            self._began = True
            self.header("bounds", str(BOUNDS[self._dtype]))
            echo("")
            head = f"{'layout':22}{'procs':>5}{'loss':>9}{'norm':>9}{'log-probs':>10}{'gradients':>10}{'weights':>9}"
            echo(head + "  verdict")
        echo(self._line(row))
        if row.failed is not None:
            echo(textwrap.indent(row.failed.strip(), "    "))
        for problem in row.problems:
            echo_filled(str(problem), "    ", "      ")
        measured = row.measured
        if measured is not None and measured.bounds != BOUNDS[self._dtype]:
            echo_filled(f"bounds here: {measured.bounds}", "    ", "      ")
        if measured is not None and measured.weights_share < MIN_SHARE:
            echo(f"    weights: not compared, as the direction of {measured.weights_share:.2%} of the updates is known")
        if row.clue is not None:
            echo_filled(row.clue, "    -> ", "       ")
        self._watch.reset()

    def close(self) -> None:
        self._watch.close()

    def _line(self, row: CheckRow) -> str:
        found, numbers = row.measured, ""
        verdict = row.verdict.upper() if row.verdict in ("failed", "different") else row.verdict
        if found is not None:
            weights = "-" if found.weights_share < MIN_SHARE else f"{found.weights.error:.1e}"
            numbers = f"{found.loss_error:9.1e}{found.grad_norm_error:9.1e}{found.log_probs:10.1e}"
            numbers += f"{found.gradients.error:10.1e}{weights:>9}"
        elif row.failed is None:
            numbers, verdict = "the others are compared with it", "first"
        return f"{row.name:22}{row.processes:5}{numbers:>47}  {verdict}"


def run_and_show(*, as_json: bool, save: str | None = None, **given: Any) -> bool:
    """Checks and prints. Returns whether something was compared and nothing differs. save: a file for `saved_data`."""
    asked = CheckOptions(**given)
    file = None if save is None else _new_file(save)
    transformers.utils.logging.disable_progress_bar()
    terminal = Terminal(dtype=asked.dtype, shows=not as_json)
    try:
        with quiet():
            report = check(asked, terminal)
    finally:
        terminal.close()
    if file is not None:
        file.write_text(json.dumps(saved_data(report, asked), indent=1) + "\n")
        if not as_json:
            echo(f"saved    {file}: attach it to an issue")
    if as_json:
        echo(json.dumps(as_data(report, asked)))
    else:
        for line in report.batch:
            echo(f"the batch is not what its rows say: {line}")
        echo("")
        echo(summary(report))
    return not (report.wrong or report.nothing)


def summary(report: Report) -> str:
    parts = [f"DIFFERENT: {', '.join(report.wrong)}"] if report.wrong else []
    if report.undecided:
        parts.append(f"undecided: {', '.join(report.undecided)}")
    if report.nothing:
        parts.append(f"NOTHING COULD BE COMPARED of {', '.join(report.nothing)}")
    if report.same and not report.wrong:
        parts.append(f"the same: {pluralize(len(report.same), 'row')}")
    return "; ".join(parts)


def as_data(report: Report, asked: CheckOptions) -> dict[str, Any]:
    """Returns a report as plain data."""
    rows = [
        {
            "role": row.role, "layout": row.layout, "processes": row.processes, "verdict": row.verdict,
            "problems": [plain_data(problem) for problem in row.problems], "clue": row.clue,
            "failed": row.failed, "numbers": _numbers(row),
        }
        for row in report.rows
    ]  # fmt: skip
    return {
        "different": report.wrong, "undecided": report.undecided, "nothing_compared": report.nothing,
        "against": asked.against,
        "dtype": asked.dtype, "bounds": plain_data(BOUNDS[asked.dtype]),
        "about": [{"name": name, "text": text} for name, text in report.header], "batch": report.batch, "rows": rows,
    }  # fmt: skip


def saved_data(report: Report, asked: CheckOptions) -> dict[str, Any]:
    """Returns what --save writes: the report, and what somebody elsewhere needs to read it. No name of the host."""
    machine = {key: value for key, value in examine().as_json().items() if key != "host"}
    words = {"config": Path(asked.config_path).name, "overrides": list(asked.overrides), "layouts": asked.layouts}
    limits = {"cut": asked.cut, "nproc": asked.nproc, "tokens": asked.tokens}
    return {
        "asked": words | limits, "versions": versions(), "git": git_states(), "machine": machine,
        "check": as_data(report, asked),
    }  # fmt: skip


def _new_file(name: str) -> Path:
    """Returns the path of --save, which can be written. The check takes minutes, so this is asked before it."""
    file = Path(name)
    try:
        file.touch()
    except OSError as error:
        fix = "name a file in a folder that exists"
        raise UserError("--save", name, f"cannot be written: {error.strerror}", fix) from error
    if file.is_dir():
        raise UserError("--save", name, "is a folder", "name a file")
    return file


def _numbers(row: CheckRow) -> dict[str, Any] | None:
    measured = row.measured
    if measured is None:
        return None
    errors = {"loss_error": measured.loss_error, "grad_norm_error": measured.grad_norm_error}
    return plain_data({**plain_data(measured), **errors})
