"""Processors, memory, and what limits this process: control groups and ulimits."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import resource
from collections.abc import Iterator, Mapping

from mrl.doctor.findings import Finding, count, gib, note, ok, warning

FEW_FILES, FEW_PROCESSES = 4096, 4096
"""Fewer than a run of many processes opens files and sockets, and than its processes have threads."""

LITTLE_MEMORY = 4 * 2**30


@dataclasses.dataclass(frozen=True)
class ControlGroup:
    """Limits of this process's control group and the groups above it; None without a limit."""

    cpus: float | None = None
    memory: int | None = None  # bytes


def control_group(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> ControlGroup:
    """Reads the limits, of version 2. root: the mount of control groups. own: the file that names ours."""
    try:
        lines = pathlib.Path(own).read_text().splitlines()
    except OSError:
        return ControlGroup()
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    mount = pathlib.Path(root)
    cpus: list[float] = []
    memory: list[int] = []
    # in a container the group's own folder may not be there, and the mount is the container's group
    for folder in (mount / path, *(mount / parent for parent in pathlib.PurePath(path).parents)):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit():
            cpus.append(int(quota) / int(period))
        limit = _text(folder / "memory.max")
        if limit.isdigit():
            memory.append(int(limit))
    return ControlGroup(min(cpus, default=None), min(memory, default=None))


def _text(file: pathlib.Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def section(group: ControlGroup, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    yield from _processors(group, environment)
    yield from _memory(group)
    yield from _ulimits()


def _processors(group: ControlGroup, environment: Mapping[str, str]) -> Iterator[Finding]:
    total = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    mine = allowed if group.cpus is None else max(1, min(allowed, math.ceil(group.cpus)))
    what = count(total, "processor")
    if allowed < total:
        what += f", of which this process may run on {allowed} (affinity: taskset, Slurm or a container)"
    if group.cpus is not None and group.cpus < allowed:
        what += f", and use the time of {group.cpus:g} (the control group's quota)"
    say = ok if mine == total else note
    yield say("cpu", what, total=total, affinity=allowed, quota=group.cpus, usable=mine)
    threads = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if threads.isdigit() and int(threads) > mine:
        what = f"OMP_NUM_THREADS is {threads}, and there are {count(mine, 'processor')}: threads wait for each other"
        yield warning("cpu.threads", what, f"unset OMP_NUM_THREADS, or set it to at most {mine}")
    elif not threads and mine < allowed:
        what = f"torch starts {allowed} threads for the time of {mine}: they slow a run of one process down"
        yield warning("cpu.threads", what, f"export OMP_NUM_THREADS={mine}")


def _memory(group: ControlGroup) -> Iterator[Finding]:
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) > 1}
    total, free = sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"])
    limited = group.memory is not None and group.memory < total
    what = f"memory: {gib(free)} of {gib(total)} are available"
    if group.memory is not None and limited:
        what += f"; the control group ends processes above {gib(group.memory)}"
    data = {"total": total, "available": free, "limit": group.memory}
    if min(free, group.memory or free) < LITTLE_MEMORY:
        fix = "end other programs, raise the container's limit, or ask the scheduler for more (--mem)"
        yield warning("memory", f"{what}: little for a model", fix, **data)
    else:
        yield (note if limited else ok)("memory", what, **data)


def _ulimits() -> Iterator[Finding]:
    """A limit is negative where there is none."""
    files, processes = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    if 0 <= files < FEW_FILES:
        what = f"{files} files may be open at once: sockets between processes and shards of models are more"
        yield warning("ulimit.nofile", what, "ulimit -n 65536; administrators can raise a hard limit that is lower")
    if 0 <= processes < FEW_PROCESSES:
        what = f"{processes} processes and threads may run (ulimit -u): a rank has tens, and its data and rewards more"
        yield warning("ulimit.nproc", what, "ulimit -u 65536")
