"""Where runs write: free space, kinds of file systems, shared memory."""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from mrl.doctor.findings import Finding, fault, gib, note, ok, warning

LITTLE, TOO_LITTLE = 20 * 2**30, 2**30
"""Bytes: a checkpoint of a small model with its optimizer does not fit; nothing does."""

SHARED_MEMORY = 2**30
"""Bytes of /dev/shm that are enough for NCCL among the GPUs of a machine. Docker gives 64 MiB."""

FEW_FILES = 10_000

REMOTE = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "fuse.sshfs", "afs", "9p", "wekafs")


@dataclasses.dataclass(frozen=True)
class Mount:
    """A file system as this process sees it."""

    at: str
    kind: str  # as in ext4, nfs4, tmpfs
    options: frozenset[str]


def mounts(text: str) -> list[Mount]:
    """Reads /proc/self/mountinfo: `36 35 98:0 /root /mount/point options tags... - type source more`."""
    found = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if dash and len(fields) >= 6 and kind:
            at = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields[4])  # a blank is \040 there
            found.append(Mount(at, kind[0], frozenset(fields[5].split(","))))
    return found


def mount_of(path: str, among: Sequence[Mount]) -> Mount | None:
    """Returns the file system that a path is on: of those with the longest common beginning the last that was made."""
    real = os.path.realpath(path)
    over = [m for m in among if real == m.at or real.startswith(m.at.rstrip("/") + "/")]
    return max(enumerate(over), key=lambda one: (len(one[1].at), one[0]))[1] if over else None


def section(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    try:
        among = mounts(pathlib.Path("/proc/self/mountinfo").read_text(errors="replace"))
    except OSError:  # no Linux
        among = []
    cache = hub_cache(environment)
    yield _here(among)
    yield folder("disk.hub", "the Hugging Face cache", cache, among, "set HF_HOME to a folder on another disk")
    yield from _tmp(environment.get("TMPDIR"), among)
    yield from _shared_memory()


def _here(among: Sequence[Mount]) -> Finding:
    try:
        here = os.getcwd()
    except OSError as error:
        return fault("disk.here", f"the current folder has been removed ({error.strerror})", "cd to one that is there")
    return folder("disk.here", "the current folder", here, among, "start runs on another disk, or set output_dir")


def _tmp(named: str | None, among: Sequence[Mount]) -> Iterator[Finding]:
    """named: TMPDIR."""
    try:
        tmp = tempfile.gettempdir()
    except OSError as error:  # it has tried to write to each
        what = f"no folder takes temporary files ({error.strerror or error}), and no run starts"
        yield fault("disk.tmp", what, "make room, or set TMPDIR to a folder that can be written")
        return
    yield folder("disk.tmp", "the folder of temporary files", tmp, among, "set TMPDIR to a folder on another disk")
    yield from _of_tmp(named, tmp, mount_of(tmp, among))


def hub_cache(environment: Mapping[str, str]) -> str:
    """Returns the folder of models and data sets of hub ids, by the rules of huggingface_hub."""
    if named := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return os.path.expanduser(named)
    cache = environment.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = environment.get("HF_HOME") or os.path.join(cache, "huggingface")
    return os.path.join(os.path.expanduser(home), "hub")


def folder(name: str, what: str, path: str, among: Sequence[Mount], elsewhere: str) -> Finding:
    """Looks at the place for a folder that may not be there yet."""
    absolute = pathlib.Path(path).absolute()
    existing = next(one for one in (absolute, *absolute.parents) if one.is_dir())
    size = os.statvfs(existing)
    free, total = size.f_bavail * size.f_frsize, size.f_blocks * size.f_frsize
    mount = mount_of(str(existing), among)
    kind = "" if mount is None else mount.kind
    data = {"path": path, "free": free, "total": total, "kind": kind}
    line = f"{what} ({path}{f', {kind}' if kind else ''}): {gib(free)} of {gib(total)} are free"
    if (why := unwritable(existing)) is not None:
        say = warning if name == "disk.hub" else fault  # models that are there already are read all the same
        return say(name, f"{what} ({path}) cannot be written ({why})", elsewhere, **data)
    if free < TOO_LITTLE:
        return fault(name, line, f"make room, or {elsewhere}", **data)
    if free < LITTLE and name != "disk.tmp":
        return warning(name, f"{line}: little for models and checkpoints", f"make room, or {elsewhere}", **data)
    if size.f_files and size.f_favail < FEW_FILES:
        return warning(name, f"{line}, and {size.f_favail} more files fit", f"remove files, or {elsewhere}", **data)
    return ok(name, line, **data)


def _of_tmp(named: str | None, tmp: str, mount: Mount | None) -> Iterator[Finding]:
    """named: TMPDIR. tmp: the folder that tempfile takes."""
    if named and os.path.realpath(named) != os.path.realpath(tmp):
        yield warning("disk.tmp.named", f"TMPDIR is {named}, which cannot be used: {tmp} is taken", f"mkdir -p {named}")
    if mount is None:
        return
    if "noexec" in mount.options:
        what = f"{tmp} is mounted noexec: kernels that are compiled there cannot be loaded"
        yield warning("disk.tmp.noexec", what, "set TMPDIR to a folder on another disk")
    if mount.kind in REMOTE:
        what = f"{tmp} is on a file server ({mount.kind}): sockets and locks in it are slow or do not work"
        yield warning("disk.tmp.kind", what, "set TMPDIR to a folder on a disk of this machine")
    elif mount.kind == "tmpfs":
        yield note("disk.tmp.kind", f"{tmp} is in memory (tmpfs): what is written there counts as memory")


def unwritable(folder: pathlib.Path) -> str | None:
    """Returns why nothing can be written there, by writing something: permissions alone do not tell, nor does room."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".mrl-", dir=folder) as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        return "no room, or a quota is used up" if error.errno == errno.EDQUOT else error.strerror or str(error)
    return None


def _shared_memory() -> Iterator[Finding]:
    if not os.path.isdir("/dev/shm"):
        return
    size = os.statvfs("/dev/shm")
    free, total = size.f_bavail * size.f_frsize, size.f_blocks * size.f_frsize
    line = f"shared memory (/dev/shm): {gib(free)} of {gib(total)} are free"
    if free < SHARED_MEMORY:
        what = f"{line}: NCCL between GPUs without peer access and vLLM with tp need more, and end by SIGBUS"
        fix = "docker run --ipc=host, or --shm-size=16g; remove old files there"
        yield warning("disk.shm", what, fix, free=free, total=total)
    else:
        yield ok("disk.shm", line, free=free, total=total)
