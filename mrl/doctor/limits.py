"""Processors, memory, and the limits of this process that a run reaches after it has started."""

from __future__ import annotations

import os
import pathlib
import resource
from collections.abc import Iterator

from mrl.doctor.findings import Finding, gib, ok, warning
from mrl.words import pluralize

FEW_FILES, FEW_PROCESSES = 4096, 4096
"""A run of many processes opens more files and sockets than this, and its processes have more threads."""

LITTLE_MEMORY = 4 * 2**30


def section() -> Iterator[Finding]:
    yield from _processors()
    yield from _memory()
    yield from _ulimits()


def _processors() -> Iterator[Finding]:
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    what = f"{pluralize(total, 'processor')}, of which this process may run on {usable}"
    yield ok("cpu", what, total=total, usable=usable)


def _memory() -> Iterator[Finding]:
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) > 1}
    total, free = sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"])
    what = f"memory: {gib(free)} of the machine's {gib(total)} are available"
    if free < LITTLE_MEMORY:
        fix = "end other programs, or ask the scheduler for more (--mem)"
        yield warning("memory", f"{what}: little for a model", fix, total=total, available=free)
    else:
        yield ok("memory", what, total=total, available=free)


def _ulimits() -> Iterator[Finding]:
    """Yields warnings for low limits. A negative number is no limit."""
    files, processes = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    if 0 <= files < FEW_FILES:
        what = f"{files} files may be open at once: sockets between processes and shards of models are more"
        yield warning("ulimit.nofile", what, "ulimit -n 65536; administrators can raise a hard limit that is lower")
    if 0 <= processes < FEW_PROCESSES:
        what = f"{processes} processes and threads may run (ulimit -u): a rank has tens, and its data and rewards more"
        yield warning("ulimit.nproc", what, "ulimit -u 65536")
