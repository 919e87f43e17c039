"""GPUs that a run can be planned for: their memory, and what they compute and move in a second."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from mrl.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class GPU:
    """A GPU, with the links between several of them. Rates are peaks, in one direction."""

    name: str
    memory: int  # bytes that nvidia-smi reports
    flops: float  # dense bf16 FLOP/s
    memory_rate: float  # bytes/s of its own memory
    link: float  # bytes/s to other GPUs of its node, over NVLink
    network: float  # bytes/s to GPUs of other nodes
    per_node: int  # GPUs that NVLink joins
    capability: tuple[int, int] | None = None  # compute capability; None of one that only figures are known of
    kernels: bool = True  # whether mrl's own can be compiled (mrl.kernels)


MIB = 2**20
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("a100-40gb", 40960 * MIB, 312e12, 1.555e12, 300e9, 25e9, 8, (8, 0)),
        GPU("a100-80gb", 81920 * MIB, 312e12, 2.039e12, 300e9, 25e9, 8, (8, 0)),
        GPU("h100-80gb", 81559 * MIB, 989e12, 3.35e12, 450e9, 50e9, 8, (9, 0)),
        GPU("h200", 143771 * MIB, 989e12, 4.8e12, 450e9, 50e9, 8, (9, 0)),
        GPU("b200", 183359 * MIB, 2250e12, 8e12, 900e9, 50e9, 8, (10, 0)),
        GPU("gb300", 284208 * MIB, 2500e12, 8e12, 900e9, 100e9, 72, (10, 3)),
    )
}
"""Peaks from NVIDIA's data sheets (A100, H100, H200, DGX B200, GB300 NVL72), of the SXM or NVL forms; the network is
that of NVIDIA's own nodes: 200, 400 and 800 Gbit/s a GPU."""

DEFAULT = "h100-80gb"


def gpu_here(name: str, memory: int, flops: float | None, capability: tuple[int, int], kernels: bool) -> GPU:
    """Returns the GPU of this machine, with what torch says of it and otherwise the figures of the nearest that is
    known."""
    known = next((gpu for gpu in GPUS.values() if gpu.name.split("-")[0] in name.lower()), GPUS[DEFAULT])
    flops = flops or known.flops
    return dataclasses.replace(known, name=name, memory=memory, flops=flops, capability=capability, kernels=kernels)


_GIVEN = {  # what may follow --gpu -> field, in what unit
    "GB": ("memory", 1e9), "TFLOPS": ("flops", 1e12), "HBM": ("memory_rate", 1e9), "LINK": ("link", 1e9),
    "NETWORK": ("network", 1e9), "PER_NODE": ("per_node", 1),
}  # fmt: skip


def gpu_of(text: str, key: str = "--gpu") -> GPU:
    """Returns the GPU of a text: a name, figures of one's own, or both with the figures after the name.

    "h200", "GB=64" (64 * 10^9 bytes, otherwise the default's figures), "h100-80gb,TFLOPS=650,NETWORK=25".
    """
    name, *figures = text.split(",") if "=" not in text.split(",")[0] else (DEFAULT, *text.split(","))
    if name not in GPUS:
        raise ConfigError(key, text, "is not one of those known", f"give {', '.join(GPUS)}, or GB=64 for its memory")
    gpu = GPUS[name] if text.split(",")[0] == name else dataclasses.replace(GPUS[name], capability=None)
    for figure in figures:
        match = re.fullmatch(r"(\w+)=(\d{1,9}(?:\.\d+)?)", figure.strip())
        field, unit = _GIVEN.get(match[1].upper(), ("", 0)) if match else ("", 0)
        value = float(match[2]) * unit if match else 0.0
        if not field or not value or (field == "per_node" and value % 1):
            wanted = "GB=64, TFLOPS=650, PER_NODE=4, or in GB/s HBM=2000, LINK=300, NETWORK=25"
            raise ConfigError(key, text, f"has no figure in {figure.strip()!r}", f"write {wanted}")
        change: dict[str, Any] = {field: int(value) if field in ("memory", "per_node") else value}
        gpu = dataclasses.replace(gpu, **change)
    return dataclasses.replace(gpu, name=text) if figures else gpu
