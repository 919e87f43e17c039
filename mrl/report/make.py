"""A report of runs: written once, or again and again while they go on."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Sequence

from mrl.errors import UserError, printable, shortened
from mrl.report import summary
from mrl.report.page import MARK, InitialView, page
from mrl.report.pictures import write_pictures
from mrl.report.runs import Run, RunReader, differences_of, value_text
from mrl.report.samples import SampleReader

PAGE, PICTURES = "index.html", "charts"
DIFFERENCES = 20
"""Keys that are different between runs and shown on the terminal."""

CLEAR = "\x1b[H\x1b[2J\x1b[3J"


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """The options of a report."""

    folder: pathlib.Path | None  # for the page; None for no page
    look: InitialView
    samples: int  # most of a run on the page
    every_metric: bool = False  # on the terminal


class Report:
    """The page, the pictures and the table of some runs."""

    def __init__(self, readers: Sequence[RunReader], wanted: ReportOptions) -> None:
        self._readers, self._wanted = readers, wanted
        self._samples = [SampleReader(reader.path) for reader in readers]

    def runs(self) -> list[Run]:
        """Returns the runs as far as they were read."""
        return [reader.run() for reader in self._readers]

    def write(self, runs: Sequence[Run], *, reload_s: int | None = None, pictures: bool = True) -> pathlib.Path | None:
        """Writes the page, and the pictures beside it. Returns the page."""
        folder, look = self._wanted.folder, dataclasses.replace(self._wanted.look, reload_s=reload_s)
        if folder is None:
            return None
        content = page(runs, [reader.read(self._wanted.samples) for reader in self._samples], look)
        path = folder / PAGE
        try:
            check_folder(folder)
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f".{PAGE}.{os.getpid()}.tmp"
            temporary.write_bytes(content)
            os.replace(temporary, path)
            if pictures:
                write_pictures(folder / PICTURES, runs, look)
        except OSError as error:
            why = f"cannot be written ({error.strerror or error})"
            raise UserError(shortened(str(folder)), why=why, fix="give another folder with --out") from error
        return path

    def text(self, runs: Sequence[Run]) -> str:
        """Returns the table for the terminal."""
        look = self._wanted.look
        table = summary.text(runs, smooth=look.smooth, every_metric=self._wanted.every_metric)
        return "\n".join([table, *_differences(runs)])


def check_folder(folder: pathlib.Path) -> None:
    """Raises UserError if a page would replace a file that mrl did not write."""
    path = folder / PAGE
    if path.exists() and MARK.encode() not in path.open("rb").read(200):
        raise UserError(str(path), why="is there and no report of mrl", fix="give another folder with --out")


def _differences(runs: Sequence[Run]) -> list[str]:
    if len(runs) < 2:
        return []
    found = differences_of(runs)
    rows = {**found.versions, **found.keys}
    if not rows:
        return ["", printable(found.none_in_words(len(runs)))]
    lines = ["", printable(f"different ({' | '.join(found.runs)}):")]
    for name, values in list(rows.items())[:DIFFERENCES]:
        line = f"  {name}: " + " | ".join(shortened(value_text(value), 60) for value in values)
        lines.append(printable(line))
    if len(rows) > DIFFERENCES:
        lines.append(f"  and {len(rows) - DIFFERENCES} more, on the page")
    return lines


def watch(
    report: Report,
    every_s: int,
    show: Callable[[Sequence[Run], pathlib.Path | None], None],
    sleep: Callable[[float], None] | None = None,
) -> list[Run]:
    """Writes the page again and shows the table whenever a run has made steps; returns when every run is finished.

    The page loads itself again until then. Pictures take longer than the page, so they are written at the end alone.
    That also holds if Ctrl-C ends it: KeyboardInterrupt goes on to the caller after that. Raises UserError if the
    folder of a run is removed.
    """
    shown: list[str] = []
    try:
        while True:
            runs = report.runs()
            progress = [run.progress for run in runs]
            if progress != shown:
                show(runs, report.write(runs, reload_s=every_s, pictures=False))
                shown = progress
            if all(run.state == "finished" for run in runs):
                break
            (sleep or time.sleep)(every_s)
            for run in runs:
                if not run.path.is_dir():  # and a page in it would make it again
                    raise UserError(shortened(str(run.path)), why="has been removed", fix="give a run that is there")
    except KeyboardInterrupt:
        report.write(report.runs())
        raise
    report.write(runs)
    return runs
