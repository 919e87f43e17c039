"""GPUs: what nvidia-smi says of them, what torch sees of them, and how they are linked."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import glob
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.doctor.ask import program
from mrl.doctor.findings import Finding, fault, gib, note, ok, warning
from mrl.doctor.imports import ImportResult
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
    cuda: str | None = None  # the newest CUDA that the driver serves
    links: Sequence[Sequence[str]] = ()  # row i, column j: the link between GPUs, as in NV18, PIX, SYS; X with itself

    @property
    def driver(self) -> str | None:
        return self.gpus[0]["driver_version"] if self.gpus else None


def smi() -> NvidiaSmi | None:
    """Asks nvidia-smi; None where there is none."""
    answer = program("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", limit_s=LIMIT_S)
    if answer is None:
        return None
    if not answer.ok:
        return NvidiaSmi(error=answer.said)
    lines = [[cell.strip() for cell in line.split(",")] for line in answer.out.splitlines()]
    gpus = [dict(zip(FIELDS, line, strict=True)) for line in lines if len(line) == len(FIELDS)]
    plain, topology = program("nvidia-smi", limit_s=LIMIT_S), program("nvidia-smi", "topo", "-m", limit_s=LIMIT_S)
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", plain.out) if plain is not None else None
    links = _links(topology.out) if topology is not None and topology.ok else ()
    return NvidiaSmi(gpus=gpus, cuda=cuda[1] if cuda else None, links=links)


def _links(text: str) -> list[list[str]]:
    """Reads the matrix of `nvidia-smi topo -m`, whose columns are GPUs, then network cards, then affinities."""
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    rows = [re.split(r"\t+| {2,}", line.strip()) for line in text.splitlines() if re.match(r"\s*GPU\d+\s+\S", line)]
    rows = [row for row in rows if len(row) > 1 and not row[1].strip().startswith("GPU")]  # the head of the columns
    return [[cell.strip() for cell in row[1 : len(rows) + 1]] for row in rows]


def section(found: NvidiaSmi | None, facts: ImportResult, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yields findings on GPUs. facts: of torch_facts, if torch loads."""
    torch = facts.facts if facts.works else None
    if found is None or found.error is not None or not found.gpus:
        yield _without_smi(found, torch)
    else:
        yield _kinds(found)
        if torch is not None:
            yield _seen(found, torch, environment)
        for gpu in found.gpus:
            yield from _health(gpu)
        yield from _topology(found.links)
    if torch is not None:
        yield from _computing(torch)


def _without_smi(found: NvidiaSmi | None, torch: Mapping[str, Any] | None) -> Finding:
    seen = torch["count"] if torch is not None else 0
    if found is not None:
        say = warning if seen else fault
        fix = "reinstall the NVIDIA driver, kernel module and libraries in one version; `dmesg` says more"
        return say("gpu", f"nvidia-smi fails ({found.error or 'it lists no GPU'})", fix)
    if torch is not None and seen:
        names = collections.Counter(gpu["name"] for gpu in torch["gpus"])
        what = ", ".join(f"{n} x {name}" for name, n in names.items())
        return ok("gpu", f"{what or pluralize(seen, 'GPU')}; no nvidia-smi here", gpus=torch["gpus"])
    if torch is not None and torch["hip"]:
        return note("gpu", "torch is built for AMD's GPUs, on which nothing of mrl has been tried")
    if glob.glob("/dev/nvidia[0-9]*") or _on_the_bus():
        what = "an NVIDIA GPU is in this machine, and no program here reaches it: models compute on the CPU"
        fix = "install its driver; start a container with --gpus all (docker) or --nv (apptainer)"
        return warning("gpu", what, fix)
    return note("gpu", "no GPU: models compute on the CPU, over gloo where there are several processes")


def _on_the_bus() -> bool:
    """Returns whether a display or 3D controller of NVIDIA's is on the PCI bus."""
    for device in pathlib.Path("/sys/bus/pci/devices").glob("*"):
        with contextlib.suppress(OSError):
            vendor, kind = ((device / name).read_text() for name in ("vendor", "class"))
            if vendor.startswith("0x10de") and kind.startswith("0x03"):
                return True
    return False


def _kinds(found: NvidiaSmi) -> Finding:
    kinds = collections.Counter((gpu["name"], gpu["memory.total"]) for gpu in found.gpus)
    words = ", ".join(f"{n} x {name} with {_memory(memory)}" for (name, memory), n in kinds.items())
    what = f"{words}; driver {found.driver}{f', which serves CUDA up to {found.cuda}' if found.cuda else ''}"
    data = {"gpus": list(found.gpus), "driver": found.driver, "cuda": found.cuda}
    if len(kinds) > 1:
        what += ": a run has the pace and the memory of the smallest"
        return warning("gpu", what, "set CUDA_VISIBLE_DEVICES to those of one kind", **data)
    return ok("gpu", what, **data)


def _memory(mebibytes: str) -> str:
    return gib(float(mebibytes) * 2**20) if mebibytes.isdigit() else mebibytes


def _seen(found: NvidiaSmi, torch: Mapping[str, Any], environment: Mapping[str, str]) -> Finding:
    here, seen, mig = len(found.gpus), torch["count"], any(_has_mig(gpu) for gpu in found.gpus)
    if seen and (mig or seen > here):  # CUDA counts instances, of which it shows a process one or all
        return note(
            "gpu.seen", f"torch sees {pluralize(seen, 'device')} of {pluralize(here, 'GPU')}: MIG instances count"
        )
    if seen == here:
        return ok("gpu.seen", f"torch sees {pluralize(seen, 'GPU')}")
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if torch["cuda"] is None:
        fix = "pip uninstall torch, and install it from PyPI or NVIDIA (docs/gpu.md)"
        return fault("gpu.seen", "torch is built without CUDA: models compute on the CPU", fix)
    what = f"torch sees {seen} of {pluralize(here, 'GPU')}"
    if chosen is not None:
        what += f", as CUDA_VISIBLE_DEVICES is {chosen!r}"
        return note("gpu.seen", what) if seen else warning("gpu.seen", what, "unset it to compute on them")
    if mig:
        fix = "make instances (`nvidia-smi mig -cgi ... -C`) or switch MIG off (`nvidia-smi -mig 0`), as administrator"
        return fault("gpu.seen", f"{what}: MIG is on, and no instance is given to this process", fix)
    why = next(iter([*torch["errors"].values(), *torch["warnings"]]), "it does not say why")
    if found.cuda:
        why += f"; it is built for CUDA {torch['cuda']}, and the driver serves up to {found.cuda}"
    fix = "update the driver (CUDA 13 needs R580), or install a torch for the CUDA that the driver serves"
    return fault("gpu.seen", f"{what} ({why})", fix)


def _has_mig(gpu: Mapping[str, str]) -> bool:
    return gpu["mig.mode.current"] == "Enabled"


def _health(gpu: Mapping[str, str]) -> Iterator[Finding]:
    number, used = gpu["index"], gpu["memory.used"]
    name = f"gpu.{number}"
    if used.isdigit() and int(used) * 2**20 > MAX_BYTES_IN_USE:
        what = f"GPU {number}: {_memory(used)} of {_memory(gpu['memory.total'])} are in use by other programs"
        fix = "`nvidia-smi` lists them: end what is left over, or leave this GPU out of CUDA_VISIBLE_DEVICES"
        yield warning(f"{name}.used", what, fix)
    if _has_mig(gpu):
        what = f"GPU {number} is cut into MIG instances, between which NCCL does not work"
        fix = "run one process on an instance, or have an administrator switch MIG off (`nvidia-smi -mig 0`)"
        yield warning(f"{name}.mig", what, fix)


def _topology(links: Sequence[Sequence[str]]) -> Iterator[Finding]:
    if len(links) < 2:
        return
    kinds = {links[i][j].rstrip("0123456789") for i in range(len(links)) for j in range(min(i, len(links[i])))}
    data = {"links": [list(row) for row in links]}
    if kinds == {"NV"}:
        yield ok("gpu.links", "NVLink between all pairs of GPUs", **data)
    elif "NV" in kinds:
        what = "NVLink between some pairs of GPUs (nvidia-smi topo -m): tp and ep want GPUs with NVLink between them"
        yield note("gpu.links", what, **data)
    else:
        yield note("gpu.links", "no NVLink between GPUs: tp and ep are slow: prefer pp and dp", **data)


def _computing(torch: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields findings of torch's own try of each GPU."""
    for name, error in torch["errors"].items():
        if name.startswith("gpu "):
            number = name.removeprefix("gpu ")
            wrong = "is not built for it" if "no kernel image" in error else "cannot compute on it"
            fix = "install a torch for this GPU and driver; where nvidia-smi shows errors too, reset the GPU"
            yield fault(f"gpu.{number}.computes", f"GPU {number}: torch {wrong} ({error})", fix)
    old = {gpu["name"]: gpu["capability"] for gpu in torch["gpus"] if tuple(gpu["capability"]) < (8, 0)}
    for name, (major, minor) in old.items():
        what = f"{name} (compute capability {major}.{minor}) has no bfloat16, which model.dtype is by default"
        yield warning("gpu.bfloat16", what, "set model.dtype=float32, or take GPUs since A100")


def has_gpu(found: NvidiaSmi | None, facts: ImportResult) -> bool:
    """Returns whether a GPU is here, seen by torch or not."""
    return bool(found is not None and found.gpus) or bool(facts.works and facts.facts["count"])
