"""Looks at everything: what takes long side by side, and what breaks becomes a finding."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import platform
import socket
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import mrl
from mrl.doctor import collectives, gpu_packages, gpus, machine, packages, used
from mrl.doctor.ask import ImportResult, is_found, load
from mrl.doctor.findings import LEVELS, Finding, Level, Section, warning
from mrl.errors import one_line
from mrl.mcore_models.optional import ABSENT
from mrl.words import pluralize

AT_ONCE = 6
"""Programs that are waited for at a time; most of them sleep."""


@dataclasses.dataclass(frozen=True)
class Report:
    """All that the doctor found."""

    sections: Sequence[Section]
    seconds: float
    host: str

    @property
    def findings(self) -> list[Finding]:
        return [finding for section in self.sections for finding in section.findings]

    @property
    def worst(self) -> Level:
        return max((finding.level for finding in self.findings), key=LEVELS.index, default="ok")

    def as_json(self) -> dict[str, Any]:
        """Returns what `mrl doctor --json` prints."""
        return {
            "mrl": mrl.__version__,
            "host": self.host,
            "system": platform.platform(),
            "seconds": round(self.seconds, 2),
            "worst": self.worst,
            "counts": {level: sum(one.level == level for one in self.findings) for level in LEVELS},
            "sections": [dataclasses.asdict(section) for section in self.sections],
        }


def examine(*, with_collectives: bool = False) -> Report:
    """Looks at this machine and this installation."""
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        smi, torch = pool.submit(gpus.smi), _needed("torch")
        facts = torch.facts
        others = [
            name
            for name in packages.NEEDED_PACKAGES
            if name != "torch" and (torch.works or name not in packages.NEED_TORCH)
        ]
        optional = [package for package in gpu_packages.PACKAGES if package.is_present]
        choices = pool.submit(used.choices) if torch.works else None
        loading = pool.map(gpu_packages.OptionalPackage.load, optional)
        imported = {"torch": torch} | dict(zip(others, pool.map(_needed, others), strict=True))
        loaded = dict(zip([package.module for package in optional], loading, strict=True))
        chosen: Mapping[str, Any] = choices.result() if choices is not None else {"error": "torch does not load"}
        found = smi.result()
    broken = [package.name for package in optional if torch.works and not loaded[package.module].works]
    count = facts["count"] if facts is not None else 0
    gpu = bool(count or (found is not None and found.gpus))
    sections = [
        _section("Python and packages", lambda: packages.section(imported, broken)),
        _section("GPUs", lambda: gpus.section(found, facts, os.environ)),
        _section(
            "Packages for GPUs and rollouts",
            lambda: [*gpu_packages.section(loaded, gpu=gpu), machine.c_compiler(gpu=gpu)],
        ),
        _section(used.TITLE, lambda: used.section(chosen), used.table(chosen.get("rows", ()))),
        _section("Processors, memory and limits", machine.limits),
        _section("Disks", machine.disks),
        _section("Network", machine.network),
        _section("Environment variables", machine.variables),
    ]
    if with_collectives and torch.works:
        sections.append(_section("Collectives", lambda: collectives.section(count)))
    return Report(sections, time.monotonic() - begun, socket.gethostname())


def _needed(name: str) -> ImportResult:
    """Returns the import of a package that runs need."""
    modules = packages.NEEDED_PACKAGES[name]
    return load(name, modules) if is_found(modules[0].partition(".")[0]) else ImportResult(ABSENT)


def _section(title: str, look: Callable[[], Iterable[Finding]], table: Sequence[Sequence[str]] = ()) -> Section:
    """Looks at one subject. Findings before an error are kept."""
    findings: list[Finding] = []
    try:
        for finding in look():
            findings.append(finding)
    except Exception as error:  # the machine is not as we thought: what other sections say is as useful as before
        what = f"not all of this could be looked at ({type(error).__name__}: {one_line(error, 300)}): a fault of mrl"
        findings.append(warning(f"unseen.{title}", what, "report it with the output of `mrl doctor --json`"))
    return Section(title, findings, table)


WIDTH = 100  # columns of the text
LEVEL = max(len(level) for level in LEVELS) + 4
"""Columns of a finding's level."""


def text(report: Report) -> Iterator[str]:
    """Yields the report as lines for a terminal."""
    for section in report.sections:
        yield section.title
        if section.table:
            yield from _table(section.table)
        for finding in section.findings:
            yield from _finding(finding)
            if finding.fix:
                yield from _wrapped(" " * LEVEL + "-> ", finding.fix)
        yield ""
    bad = [finding for level in ("fault", "warning") for finding in report.findings if finding.level == level]
    counts = [pluralize(sum(f.level == level for f in bad), level) for level in ("fault", "warning")]
    yield f"{counts[0]}, {counts[1]} ({report.seconds:.1f} s)"
    for finding in bad:
        yield from _finding(finding)


def _finding(finding: Finding) -> list[str]:
    return _wrapped(f"  {finding.level}".ljust(LEVEL), finding.what)


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
