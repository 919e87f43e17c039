"""Looks at everything: what takes long side by side, and what breaks becomes a finding."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import platform
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mrl
from mrl.doctor import (
    collectives,
    compilers,
    disks,
    gpu_packages,
    gpus,
    limits,
    network,
    packages,
    used,
    variables,
)
from mrl.doctor.findings import LEVELS, Finding, Level, Section, fault, warning, worst
from mrl.doctor.imports import ImportResult, imports
from mrl.doctor.probe import FACTS
from mrl.errors import one_line

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
        return worst(self.findings)

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
        asked_imports, asked_choices = pool.submit(imports, packages.steps()), pool.submit(used.choices)
        optional = gpu_packages.present()
        asked_optional = pool.submit(imports, gpu_packages.steps(optional)) if optional else None
        smi = pool.submit(gpus.smi)
        imported, choices = asked_imports.result(), asked_choices.result()
        found, facts, torch = smi.result(), imported[FACTS], imported["torch"].works
        loaded = asked_optional.result() if asked_optional is not None else {}
        broken = [package.name for package in optional if loaded[package.module].error is not None]
        gpu = gpus.has_gpu(found, facts)
        megatron = choices.imported_megatron if torch else ImportResult(blocked_by="torch")
        sections = [
            _section("Python and packages", lambda: packages.section(imported, megatron, broken)),
            _section("GPUs", lambda: gpus.section(found, facts, os.environ)),
            _section(
                "Packages for GPUs and rollouts",
                lambda: [*gpu_packages.section(loaded, gpu=gpu), compilers.c_compiler(gpu=gpu)],
            ),
            _section(used.TITLE, lambda: used.section(choices, torch_works=torch), used.table(choices)),
            _section("Processors, memory and limits", limits.section),
            _section("Disks", disks.section),
            _section("Network", network.section),
            _section("Environment variables", variables.section),
        ]
        if with_collectives:
            sections.append(_section("Collectives", lambda: _collectives(facts, torch)))
    return Report(sections, time.monotonic() - begun, socket.gethostname())


def _collectives(facts: ImportResult, torch: bool) -> Iterable[Finding]:
    if not torch:
        return [fault("collectives", "no all-reduce was tried, as torch does not load", "mend torch first")]
    return collectives.section(facts.facts["count"] if facts.works else 0)


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
