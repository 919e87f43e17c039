"""The report as text, for 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from mrl.doctor.examine import Report
from mrl.doctor.findings import LEVELS, Finding, Section
from mrl.words import pluralize

WIDTH = 100
LEVEL = max(len(level) for level in LEVELS) + 4
"""Columns of a finding's level."""


def text(report: Report) -> Iterator[str]:
    """Yields lines."""
    for section in report.sections:
        yield from _section(section)
        yield ""
    yield from _summary(report)


def _section(section: Section) -> Iterator[str]:
    yield section.title
    if section.table:
        yield from _table(section.table)
    for finding in section.findings:
        yield from _finding(finding)


def _finding(finding: Finding) -> Iterator[str]:
    yield from _wrapped(f"  {finding.level}".ljust(LEVEL), finding.what)
    if finding.fix:
        yield from _wrapped(" " * LEVEL + "-> ", finding.fix)


def _wrapped(head: str, line: str) -> list[str]:
    return textwrap.wrap(
        line,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head]


def _table(table: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        yield ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()


def _summary(report: Report) -> Iterator[str]:
    bad = [finding for level in ("fault", "warning") for finding in report.findings if finding.level == level]
    counts = [pluralize(sum(f.level == level for f in bad), level) for level in ("fault", "warning")]
    yield f"{counts[0]}, {counts[1]} ({report.seconds:.1f} s)"
    for finding in bad:
        yield from _wrapped(f"  {finding.level}".ljust(LEVEL), finding.what)
