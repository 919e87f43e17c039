"""Looks at everything: what takes long side by side, and what breaks becomes a finding."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import platform
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mrl
from mrl.doctor import (
    collectives,
    compilers,
    disks,
    gpu_packages,
    gpus,
    known,
    limits,
    network,
    packages,
    used,
    variables,
)
from mrl.doctor.findings import LEVELS, Finding, Level, Section, warning
from mrl.doctor.imports import ImportResult, is_found, load
from mrl.errors import one_line
from mrl.mcore_models.optional import ABSENT

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
            "sections": [
                {
                    "title": section.title,
                    "table": [list(row) for row in section.table],
                    "findings": [dataclasses.asdict(finding) for finding in section.findings],
                }
                for section in self.sections
            ],
        }


def examine(*, with_collectives: bool = False) -> Report:
    """Looks at this machine and this installation."""
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        smi, torch = pool.submit(gpus.smi), _needed("torch")
        facts = torch.facts
        others = [
            name for name in known.NEEDED_PACKAGES if name != "torch" and (torch.works or name not in known.NEED_TORCH)
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
            lambda: [*gpu_packages.section(loaded, gpu=gpu), compilers.c_compiler(gpu=gpu)],
        ),
        _section(used.TITLE, lambda: used.section(chosen), used.table(chosen.get("rows", ()))),
        _section("Processors, memory and limits", limits.section),
        _section("Disks", disks.section),
        _section("Network", network.section),
        _section("Environment variables", variables.section),
    ]
    if with_collectives and torch.works:
        sections.append(_section("Collectives", lambda: collectives.section(count)))
    return Report(sections, time.monotonic() - begun, socket.gethostname())


def _needed(name: str) -> ImportResult:
    """Returns the import of a package that runs need."""
    modules = known.NEEDED_PACKAGES[name]
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
