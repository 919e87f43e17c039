"""The space that runs write to: disks and shared memory."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping

from mrl.doctor.findings import Finding, fault, gib, ok, warning

LITTLE, TOO_LITTLE = 20 * 2**30, 2**30
"""Bytes: a checkpoint of a small model with its optimizer does not fit; nothing does."""

SHARED_MEMORY = 2**30
"""Bytes of /dev/shm that are enough for NCCL among the GPUs of a machine. Docker gives 64 MiB."""


def section(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    yield folder("disk.here", "the current folder", ".", "start runs on another disk, or set output_dir")
    cache = hub_cache(environment)
    yield folder("disk.hub", "the Hugging Face cache", cache, "set HF_HOME to a folder on another disk")
    try:
        tmp = tempfile.gettempdir()
    except OSError as error:  # it has tried to write to each
        what = f"no folder takes temporary files ({error.strerror or error}), and no run starts"
        yield fault("disk.tmp", what, "make room, or set TMPDIR to a folder that can be written")
    else:
        yield folder("disk.tmp", "the folder of temporary files", tmp, "set TMPDIR to a folder on another disk")
    yield from _shared_memory()


def hub_cache(environment: Mapping[str, str]) -> str:
    """Returns the folder of models and data sets of hub ids, by the rules of huggingface_hub."""
    if named := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return os.path.expanduser(named)
    cache = environment.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = environment.get("HF_HOME") or os.path.join(cache, "huggingface")
    return os.path.join(os.path.expanduser(home), "hub")


def folder(name: str, what: str, path: str, elsewhere: str) -> Finding:
    """Looks at the place for a folder that may not be there yet. Something is written: permissions alone do not tell,
    nor does room."""
    try:
        absolute = pathlib.Path(path).absolute()
        existing = next(one for one in (absolute, *absolute.parents) if one.is_dir())
        free, total, room = _room(existing)
        with tempfile.NamedTemporaryFile(prefix=".mrl-", dir=existing) as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        say = warning if name == "disk.hub" else fault  # models that are there already are read all the same
        return say(name, f"{what} ({path}) cannot be written ({error.strerror or error})", elsewhere, path=path)
    data = {"path": str(absolute), "free": free, "total": total}
    line = f"{what} ({absolute}): {room}"
    if free < TOO_LITTLE:
        return fault(name, line, f"make room, or {elsewhere}", **data)
    if free < LITTLE and name != "disk.tmp":
        return warning(name, f"{line}: little for models and checkpoints", f"make room, or {elsewhere}", **data)
    return ok(name, line, **data)


def _room(path: str | pathlib.Path) -> tuple[int, int, str]:
    """Returns bytes that are free, all bytes, and both in words."""
    size = os.statvfs(path)
    free, total = size.f_bavail * size.f_frsize, size.f_blocks * size.f_frsize
    return free, total, f"{gib(free)} of {gib(total)} are free"


def _shared_memory() -> Iterator[Finding]:
    if not os.path.isdir("/dev/shm"):
        return
    free, total, room = _room("/dev/shm")
    line = f"shared memory (/dev/shm): {room}"
    if free < SHARED_MEMORY:
        what = f"{line}: NCCL between GPUs without peer access and vLLM with tp need more, and end by SIGBUS"
        fix = "docker run --ipc=host, or --shm-size=16g; remove old files there"
        yield warning("disk.shm", what, fix, free=free, total=total)
    else:
        yield ok("disk.shm", line, free=free, total=total)
