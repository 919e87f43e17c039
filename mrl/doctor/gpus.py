"""GPUs: what nvidia-smi says of them, what torch sees of them, and how they are linked."""

from __future__ import annotations

import collections
import dataclasses
import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.doctor.ask import program
from mrl.doctor.findings import Finding, fault, gib, note, ok, warning
from mrl.words import pluralize

LIMIT_S = 30.0
"""nvidia-smi takes seconds where the driver is not kept loaded (persistence mode)."""

FIELDS = ("index", "name", "driver_version", "memory.total", "memory.used", "mig.mode.current")
MAX_BYTES_IN_USE = 2 * 2**30
"""Bytes of a GPU's memory that a driver and a desktop may hold."""


@dataclasses.dataclass(frozen=True)
class NvidiaSmi:
    """The output of nvidia-smi."""

    error: str | None = None  # in words, where it fails
    gpus: Sequence[Mapping[str, str]] = ()  # by FIELDS
    has_nvlink: bool = False  # between any of them


def smi() -> NvidiaSmi | None:
    """Asks nvidia-smi; None where there is none."""
    answer = program("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", limit_s=LIMIT_S)
    if answer is None:
        return None
    if answer.code != 0:
        return NvidiaSmi(error=answer.ended)
    lines = [[cell.strip() for cell in line.split(",")] for line in answer.out.splitlines()]
    gpus = [dict(zip(FIELDS, line, strict=True)) for line in lines if len(line) == len(FIELDS)]
    topology = program("nvidia-smi", "topo", "-m", limit_s=LIMIT_S)
    has_nvlink = topology is not None and re.search(r"\bNV\d+\b", topology.out) is not None
    return NvidiaSmi(None if gpus else "it lists no GPU", gpus, has_nvlink)


def section(
    found: NvidiaSmi | None, torch: Mapping[str, Any] | None, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Yields findings on GPUs. torch: what probe.py says; None if torch does not."""
    if found is None or found.error is not None:
        yield _without_smi(found, torch)
    else:
        yield _kinds(found)
        if torch is not None:
            yield _seen(found, torch, environment)
        for gpu in found.gpus:
            yield from _health(gpu)
        if len(found.gpus) > 1 and found.has_nvlink:
            yield ok("gpu.links", "NVLink between GPUs; between which: nvidia-smi topo -m")
        elif len(found.gpus) > 1:
            yield note("gpu.links", "no NVLink between GPUs: tp and ep are slow: prefer pp and dp")
    if torch is not None:
        yield from _computing(torch)


def _without_smi(found: NvidiaSmi | None, torch: Mapping[str, Any] | None) -> Finding:
    seen = torch["count"] if torch is not None else 0
    if found is not None:
        fix = "reinstall the NVIDIA driver, kernel module and libraries in one version; `dmesg` says more"
        return (warning if seen else fault)("gpu", f"nvidia-smi fails ({found.error})", fix)
    if torch is not None and seen:
        names = ", ".join(dict.fromkeys(gpu["name"] for gpu in torch["gpus"]))
        return ok("gpu", f"{pluralize(seen, 'GPU')} ({names}); no nvidia-smi here", gpus=torch["gpus"])
    if glob.glob("/dev/nvidia[0-9]*"):
        what = "an NVIDIA GPU is in this machine, and no program here reaches it: models compute on the CPU"
        fix = "install its driver; start a container with --gpus all (docker) or --nv (apptainer)"
        return warning("gpu", what, fix)
    return note("gpu", "no GPU: models compute on the CPU, over gloo where there are several processes")


def _kinds(found: NvidiaSmi) -> Finding:
    kinds = collections.Counter((gpu["name"], _memory(gpu["memory.total"])) for gpu in found.gpus)
    words = ", ".join(f"{n} x {name} with {memory}" for (name, memory), n in kinds.items())
    driver = found.gpus[0]["driver_version"]
    what, data = f"{words}; driver {driver}", {"gpus": list(found.gpus), "driver": driver}
    if len(kinds) > 1:
        what += ": a run has the pace and the memory of the smallest"
        return warning("gpu", what, "set CUDA_VISIBLE_DEVICES to those of one kind", **data)
    return ok("gpu", what, **data)


def _memory(mebibytes: str) -> str:
    return gib(float(mebibytes) * 2**20) if mebibytes.isdigit() else mebibytes


def _seen(found: NvidiaSmi, torch: Mapping[str, Any], environment: Mapping[str, str]) -> Finding:
    here, seen = len(found.gpus), torch["count"]
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    what = f"torch sees {seen} of {pluralize(here, 'GPU')}"
    if seen == here:
        return ok("gpu.seen", what)
    if chosen is not None:
        what += f", as CUDA_VISIBLE_DEVICES is {chosen!r}"
    if seen:
        return note("gpu.seen", what)  # by choice, or instances of MIG
    if torch["cuda"] is None:
        fix = "pip uninstall torch, and install it from PyPI or NVIDIA (docs/gpu-install.md)"
        return fault("gpu.seen", "torch is built without CUDA: models compute on the CPU", fix)
    if chosen is not None:
        return warning("gpu.seen", what, "unset it to compute on them")
    why = next(iter([*torch["errors"].values(), *torch["warnings"]]), "it does not say why")
    fix = "update the driver (CUDA 13 needs R580), or install a torch for the CUDA that the driver serves (nvidia-smi)"
    return fault("gpu.seen", f"{what} ({why}; it is built for CUDA {torch['cuda']})", fix)


def _health(gpu: Mapping[str, str]) -> Iterator[Finding]:
    number, used = gpu["index"], gpu["memory.used"]
    if used.isdigit() and int(used) * 2**20 > MAX_BYTES_IN_USE:
        what = f"GPU {number}: {_memory(used)} of {_memory(gpu['memory.total'])} are in use by other programs"
        fix = "`nvidia-smi` lists them: end what is left over, or leave this GPU out of CUDA_VISIBLE_DEVICES"
        yield warning(f"gpu.{number}.used", what, fix)
    if gpu["mig.mode.current"] == "Enabled":
        what = f"GPU {number} is cut into MIG instances, between which NCCL does not work"
        fix = "run one process on an instance, or have an administrator switch MIG off (`nvidia-smi -mig 0`)"
        yield warning(f"gpu.{number}.mig", what, fix)


def _computing(torch: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields findings of torch's own try of each GPU."""
    for name, error in torch["errors"].items():
        if name.startswith("gpu "):
            wrong = "is not built for it" if "no kernel image" in error else "cannot compute on it"
            fix = "install a torch for this GPU and driver; where nvidia-smi shows errors too, reset the GPU"
            yield fault(f"{name.replace(' ', '.')}.computes", f"{name}: torch {wrong} ({error})", fix)
    old = [gpu["name"] for gpu in torch["gpus"] if tuple(gpu["capability"]) < (8, 0)]
    if old:
        what = f"{', '.join(dict.fromkeys(old))}: no bfloat16, which model.dtype is by default"
        yield warning("gpu.bfloat16", what, "set model.dtype=float32, or take GPUs since A100")
