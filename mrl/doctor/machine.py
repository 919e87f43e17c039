"""The machine around the packages: processors, limits, disks, network, environment variables, and the C compiler."""

from __future__ import annotations

import os
import pathlib
import re
import resource
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from mrl.doctor.findings import Finding, fault, gib, note, ok, warning
from mrl.errors import shortened
from mrl.kernels import compiler
from mrl.words import pluralize

FEW_FILES, FEW_PROCESSES = 4096, 4096
"""A run of many processes opens more files and sockets than this, and its processes have more threads."""

LITTLE_MEMORY = 4 * 2**30


def limits() -> Iterator[Finding]:
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


LITTLE, TOO_LITTLE = 20 * 2**30, 2**30
"""Bytes: a checkpoint of a small model with its optimizer does not fit; nothing does."""

SHARED_MEMORY = 2**30
"""Bytes of /dev/shm that are enough for NCCL among the GPUs of a machine. Docker gives 64 MiB."""


def disks(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
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


def network(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    names = [name for _, name in socket.if_nameindex()]
    yield ok("network.interfaces", f"interfaces: {', '.join(names) or 'none'}", interfaces=names)
    yield from _loopback()
    yield from chosen_interface(environment, names)


def _loopback() -> Iterator[Finding]:
    """Yields a fault if processes cannot meet on 127.0.0.1, as those of a run on one machine do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            pass
    except OSError as error:
        what = f"processes cannot meet on 127.0.0.1 ({error.strerror or error}): no run of several starts"
        yield fault("network.loopback", what, "ip link set lo up; look for a firewall, or a sandbox without network")


def chosen_interface(environment: Mapping[str, str], names: Sequence[str]) -> Iterator[Finding]:
    """Yields a finding on the interface that GLOO_SOCKET_IFNAME chooses. names: of all interfaces here."""
    here = ", ".join(names) or "none"
    gloo = environment.get("GLOO_SOCKET_IFNAME")
    if gloo and not set(gloo.split(",")) <= set(names):
        what = f"GLOO_SOCKET_IFNAME is {gloo}, and interfaces here are {here}: gloo fails, and every run"
        yield fault("network.gloo", what, "unset GLOO_SOCKET_IFNAME: mrl finds the interface")
    elif gloo:
        yield note("network.gloo", f"gloo uses {gloo}, as GLOO_SOCKET_IFNAME says")


PREFIXES = tuple("""
    CUBLAS_ CUDA_ FSSPEC_ GLOO_ HF_ HUGGING KMP_ LD_LIBRARY_PATH LD_PRELOAD MKL_ NCCL_ NVIDIA_ NVTE_ OMP_ OPENBLAS_
    PYTHON PYTORCH_ SBATCH_ TMPDIR TOKENIZERS_ TORCH TRANSFORMERS_ TRITON_ UCX_ VLLM_ WANDB_ XDG_CACHE_HOME
""".split())  # fmt: skip  # noqa: SIM905
"""Beginnings of the names of variables that change a run."""

HARMLESS = ("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONIOENCODING", "PYTHONUNBUFFERED", "PYTHONUTF8")

SECRET = re.compile(r"TOKEN(?!IZER)|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def variables(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    found = []
    for name, value in sorted(environment.items()):
        if name.startswith(PREFIXES) and name not in HARMLESS:
            found.append(f"{name}={'(not shown)' if SECRET.search(name) else shortened(value, 80)}")
    if found:
        yield ok("variables", f"set here: {', '.join(found)}")


def c_compiler(environment: Mapping[str, str] = os.environ, *, gpu: bool) -> Finding:
    """Looks for triton's compiler (triton/runtime/build.py). gpu: a GPU is here; nothing else needs the compiler."""
    path, what = compiler.c_compiler(environment)
    fix = "apt-get install gcc python3-dev, name a compiler in CC, or take a Python of uv, conda or pyenv"
    if not what:
        return ok("compiler.c", f"C compiler: {path}, with Python's headers", path=path)
    if not gpu:
        return note("compiler.c", f"{what}: nothing is lost without a GPU", path=path)
    costs = "kernels that are compiled while a run goes on are not, and it stops (megatron's fused functions, triton)"
    return fault("compiler.c", f"{what}: {costs}", fix, path=path)
