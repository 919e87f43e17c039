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
    """Limits of the control group that this process is in, and of those above it; None where there is none."""

    cpus: float | None = None
    memory: int | None = None  # bytes
    pids: int | None = None  # processes and threads


def control_group(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> ControlGroup:
    """Reads the limits, of version 1 or 2. root: where control groups are mounted. own: the file that names ours."""
    try:
        lines = [line.split(":", 2) for line in pathlib.Path(own).read_text().splitlines()]
    except OSError:
        return ControlGroup()
    cpus: list[float] = []
    memory: list[int] = []
    pids: list[int] = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        for name in controllers.split(","):
            for folder in _up(pathlib.Path(root, name), path):
                if (quota := _number(folder / "cpu.cfs_quota_us")) and (
                    period := _number(folder / "cpu.cfs_period_us")
                ):
                    cpus.append(quota / period)
                cpus += _quota(folder / "cpu.max")
                memory += filter(None, (_number(folder / file) for file in ("memory.max", "memory.limit_in_bytes")))
                pids += filter(None, [_number(folder / "pids.max")])
    return ControlGroup(min(cpus, default=None), min(memory, default=None), min(pids, default=None))


def _up(mount: pathlib.Path, path: str) -> Iterator[pathlib.Path]:
    """Yields the group's folder and those above it; in a container the host's path of it may not be there."""
    folder = mount / path.strip("/")
    while folder != mount and folder.is_relative_to(mount):
        yield folder
        folder = folder.parent
    yield mount


def _number(file: pathlib.Path) -> int | None:
    """Returns a limit; None for `max`, for -1, and for the numbers that version 1 writes where there is none."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < 2**60 else None


def _quota(file: pathlib.Path) -> list[float]:
    """Of version 2: `QUOTA PERIOD`, or `max PERIOD`."""
    try:
        quota, period = file.read_text().split()
    except (OSError, ValueError):
        return []
    return [int(quota) / int(period)] if quota.isdigit() else []


def section(group: ControlGroup, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    yield from _processors(group, environment)
    yield from _memory(group)
    yield from _ulimits(group)


def usable(group: ControlGroup) -> int:
    """Returns how many processors this process has for itself."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return here if group.cpus is None else max(1, min(here, math.ceil(group.cpus)))


def _processors(group: ControlGroup, environment: Mapping[str, str]) -> Iterator[Finding]:
    total, mine = os.cpu_count() or 1, usable(group)
    allowed = usable(ControlGroup())
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
    load = os.getloadavg()[0]
    if load > total * 1.5:
        yield note("cpu.load", f"{load:.0f} processes want to run at once: this machine is busy", load=load)


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
    data = {"total": total, "available": free, "limit": group.memory, "swap": sizes.get("SwapTotal", 0)}
    if min(free, group.memory or free) < LITTLE_MEMORY:
        fix = "end other programs, raise the container's limit, or ask the scheduler for more (--mem)"
        yield warning("memory", f"{what}: little for a model", fix, **data)
    else:
        yield (note if limited else ok)("memory", what, **data)


def _ulimits(group: ControlGroup) -> Iterator[Finding]:
    """A limit is negative where there is none."""
    (files, most), (processes, _), (locked, _), (cores, _), (space, _) = (
        resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in ("NOFILE", "NPROC", "MEMLOCK", "CORE", "AS")
    )
    data = {"nofile": files, "nproc": processes, "memlock": locked, "core": cores, "as": space, "pids": group.pids}
    words = {"open files": files, "processes": processes, "locked memory": locked}
    shown = [f"{name} {'unlimited' if n < 0 else gib(n) if 'memory' in name else n}" for name, n in words.items()]
    yield ok("ulimit", f"limits: {', '.join(shown)}", **data)
    if 0 <= files < FEW_FILES:
        what = f"{files} files may be open at once: sockets between processes and shards of models are more"
        raised = f"ulimit -n {most if most >= 0 else 65536}"
        yield warning(
            "ulimit.nofile",
            what,
            raised if most < 0 or most >= FEW_FILES else f"{raised}; administrators can raise it further",
        )
    least = min((n for n in (processes, group.pids) if n is not None and n >= 0), default=FEW_PROCESSES)
    if least < FEW_PROCESSES:
        by = "the control group" if least == group.pids else "ulimit -u"
        what = f"{least} processes and threads may run ({by}): a rank has tens, and its data and rewards have more"
        yield warning("ulimit.nproc", what, "docker run --pids-limit=-1, or ulimit -u 65536")
    if locked >= 0 and any(pathlib.Path("/sys/class/infiniband").glob("*")):
        what = f"{gib(locked)} of memory may be locked, and InfiniBand locks what it sends: NCCL fails over it"
        yield warning("ulimit.memlock", what, "ulimit -l unlimited (docker run --ulimit memlock=-1)")
    if space >= 0:
        what = f"{gib(space)} of addresses may be used (ulimit -v): CUDA reserves far more than it uses, and fails"
        yield warning("ulimit.as", what, "ulimit -v unlimited")
    if cores != 0:
        size = "" if cores < 0 else f" of up to {gib(cores)}"
        yield note("ulimit.core", f"a process that crashes leaves its memory in a core file{size} ({_core_pattern()})")


def _core_pattern() -> str:
    try:
        return pathlib.Path("/proc/sys/kernel/core_pattern").read_text().strip()
    except OSError:
        return "core"
