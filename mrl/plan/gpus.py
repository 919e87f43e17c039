"""GPUs that a run can be planned for: their memory, and what they compute and move in a second."""

from __future__ import annotations

import dataclasses
import re

from mrl.errors import ConfigError

GIB = 2**30


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

    def with_memory(self, gb: float) -> "GPU":
        return dataclasses.replace(self, name=f"{gb:g} GB", memory=int(gb * 1e9))


MIB = 2**20
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("a100-40gb", 40960 * MIB, 312e12, 1.555e12, 300e9, 25e9, 8),
        GPU("a100-80gb", 81920 * MIB, 312e12, 2.039e12, 300e9, 25e9, 8),
        GPU("h100-80gb", 81559 * MIB, 989e12, 3.35e12, 450e9, 50e9, 8),
        GPU("h200", 143771 * MIB, 989e12, 4.8e12, 450e9, 50e9, 8),
        GPU("b200", 183359 * MIB, 2250e12, 8e12, 900e9, 50e9, 8),
        GPU("gb300", 284208 * MIB, 2500e12, 8e12, 900e9, 100e9, 72),
    )
}
"""Peaks from NVIDIA's data sheets (A100, H100, H200, DGX B200, GB300 NVL72), of the SXM or NVL forms; the network is
that of NVIDIA's own nodes: 200, 400 and 800 Gbit/s a GPU."""

DEFAULT = "h100-80gb"


def gpu_here(name: str, memory: int, flops: float | None) -> GPU:
    """Returns the GPU of this machine, with what torch says of it and otherwise the figures of the nearest that is
    known."""
    known = next((gpu for gpu in GPUS.values() if gpu.name.split("-")[0] in name.lower()), GPUS[DEFAULT])
    return dataclasses.replace(known, name=name, memory=memory, flops=flops or known.flops)


def gpu_of(text: str, key: str = "--gpu") -> GPU:
    """Returns the GPU of a name, or one of "GB=64" with 64 * 10^9 bytes and otherwise the default's figures."""
    if text in GPUS:
        return GPUS[text]
    size = re.fullmatch(r"GB=(\d+(\.\d+)?)", text, re.IGNORECASE)
    if size is None or not float(size[1]):
        raise ConfigError(key, text, "is not one of those known", f"give {', '.join(GPUS)}, or GB=64 for its memory")
    return GPUS[DEFAULT].with_memory(float(size[1]))
