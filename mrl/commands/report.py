"""`mrl report`: runs as a page, pictures, and a table on the terminal."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from mrl.commands import JSON, Argument, Command, Option, echo
from mrl.errors import UserError

if TYPE_CHECKING:
    from mrl.report.make import Report

SAMPLES, EVERY_S = 500, 10


def run(
    runs: tuple[str, ...],
    out: str | None,
    axis: str,
    smooth: float,
    samples: int,
    every_metric: bool,
    no_page: bool,
    as_json: bool,
    watching: bool,
    every_s: int | None,
) -> None:
    if no_page and out is not None:
        raise UserError("--out", why="has no effect with --no-page", fix="leave one of them out")
    if as_json and watching:
        raise UserError("--json", why="is of a report that is made once, not of --watch", fix="leave one of them out")
    if every_s is not None and not watching:
        raise UserError("--every", why="has no effect without --watch", fix="give both, or leave it out")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # nothing here is large enough to share
    import pathlib

    from mrl.report.make import Report, ReportOptions
    from mrl.report.page import InitialView
    from mrl.report.runs import readers

    found = readers(runs, may_be_empty=watching)
    folder = found[0].path / "report"
    if len(found) > 1:
        folder = folder / "compared"
    if out is not None:
        folder = pathlib.Path(out)
    report = Report(found, ReportOptions(None if no_page else folder, InitialView(axis, smooth), samples, every_metric))
    if watching:
        _watch(report, EVERY_S if every_s is None else every_s)
        return
    read = report.runs()
    if not no_page and all(run.table.axis(axis) is None for run in read):
        raise UserError("--x", axis, "is in no metrics.jsonl of these runs", "give --x step")
    written = report.write(read)
    if as_json:
        import json

        from mrl.report.summary import as_json as plain

        echo(json.dumps(plain(read, None if written is None else str(written)), default=str))
        return
    echo(report.text(read))
    if written is not None:
        echo(f"\npage: {written}  (pictures: {written.parent / 'charts'}/)")


def _watch(report: Report, every_s: int) -> None:
    """Follows runs until they are finished, or until Ctrl-C, which is how one ends it."""
    from mrl.report.make import CLEAR, watch

    def show(read: Any, written: Any) -> None:
        if sys.stdout.isatty():
            echo(CLEAR, end="")
        echo(report.text(read))
        place = "" if written is None else f"page: {written}; "
        echo(f"\n{place}looking every {every_s} s, Ctrl-C ends it", end="\n" if sys.stdout.isatty() else "\n\n")

    try:
        watch(report, every_s, show)
    except KeyboardInterrupt:
        echo("")
    else:
        echo("finished")


COMMAND = Command(
    help="""Show what runs did, from metrics.jsonl, samples/ and config.yaml in their directories.

    A table with sparklines on the terminal; a page that needs no network, RUN/report/index.html, with curves, sampled
    rollouts, and the differences between runs; and a PNG of each chart beside it.
    """,
    examples="""
        mrl report runs/demo
        mrl report runs/a runs/b --x tokens --smooth 0.9 --out compared
        mrl report runs/demo --watch         follow a run that trains
        mrl report runs/demo --json --no-page""",
    run=run,
    params=(
        Argument(name="runs", kind="path", metavar="RUN [RUN]...", several=True),
        Option(
            names="--out", kind="path", metavar="DIR",
            help="Folder of the page; default: report/ in the run, report/compared/ in the first of several.",
        ),
        Option(
            names="--x", into="axis", choices=lambda: ["step", "tokens", "seconds"], default="step",
            help="What curves are drawn over: optimizer steps, trained tokens, or seconds of steps and evaluations. "
            "The page can change it.",
        ),
        Option(
            names="--smooth", kind="fraction", metavar="WEIGHT", default=0.0, minimum=0, maximum=0.9999,
            help="Weight of the past in a moving average, from 0 to below 1. The page can change it.",
        ),
        Option(
            names="--samples", kind="number", minimum=0, default=SAMPLES, help="Most samples of a run on the page."
        ),
        Option(names="--all", into="every_metric", kind="flag", help="All metrics on the terminal, not the main ones."),
        Option(names="--no-page", kind="flag", help="Write nothing: the table, or --json, alone."),
        JSON,
        Option(
            names="--watch", into="watching", kind="flag",
            help="Go on until the runs are finished, or Ctrl-C: whenever a run has made steps the page is written anew "
            "(and loads itself again) and the table shown; pictures are written at the end.",
        ),
        Option(
            names="--every", into="every_s", kind="number", minimum=1, metavar="SECONDS",
            help=f"How often --watch looks; default: {EVERY_S}.",
        ),
    ),
)  # fmt: skip
