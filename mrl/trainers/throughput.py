"""Speed and size of a step: model FLOPs, the peak of known GPUs, memory."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
import time
from collections.abc import Iterable

import torch
from torch import Tensor

from mrl.batch import Batch
from mrl.engine.base import BaseEngine
from mrl.engine.lora.folder import adapters
from mrl.engine.lora.shapes import AdapterShape
from mrl.weights.families import family_for, family_of
from mrl.weights.hf_config import read_hf_config
from mrl.weights.table import HFConfig, sizes_of

PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    ("GB300", 2500e12), ("GB200", 2500e12), ("B200", 2250e12), ("B100", 1750e12), ("GH200", 989e12),
    ("H200 NVL", 835e12), ("H200", 989e12),
    ("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H100", 989e12), ("H800", 989e12), ("H20", 148e12),
    ("A100", 312e12), ("A800", 312e12), ("A40", 150e12), ("A30", 165e12), ("A10G", 70e12), ("A10", 125e12),
    ("L40S", 362e12), ("L40", 181e12), ("L4", 121e12),
    ("RTX 5090", 210e12), ("RTX 4090", 165e12), ("RTX 3090", 71e12),
)  # fmt: skip
"""Part of a GPU's name -> dense bf16 FLOP/s with fp32 accumulation, from the makers' data sheets; the first that fits.
"""


def peak_flops(device: torch.device) -> float | None:
    """Returns the dense bf16 peak of a device, in FLOP/s; None for a CPU and for a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """Returns the dense bf16 peak of a GPU by its name, in FLOP/s: an `RTX A4000` is no `A40`."""
    if "Laptop" in name:  # slower than the card of the same name
        return None
    words = f" {re.sub(r'[-_/]', ' ', name)} "
    return next((peak for part, peak in PEAK_BF16_FLOPS if f" {part} " in words), None)


def training_flops(
    hf: HFConfig, lengths_S: Tensor, labels: int, adapters: int | None = None, *, head: str = "lm"
) -> float:
    """FLOPs of the matrix products in one forward and backward pass over sequences of these lengths.

    hf: the normalised content of config.json. labels: how many tokens train; the output layer computes no others
    (docs/loss.md), and a value head has one output. 2 FLOPs per weight and token, of experts those that a token is sent
    to; causal attention at half the full square; three products with the state of a gated delta net; a backward pass
    twice the forward. Recomputation is not counted, nor
    is a sliding window (Narayanan et al., "Efficient Large-Scale Language Model Training", 2021, appendix; Chowdhery
    et al., "PaLM", 2022, appendix B).

    adapters: entries of A and B on a token's way (`adapter_weights`) if they train. The model's weights then have a
    forward pass and the gradient of their input, and no gradient of their own.
    """
    family = family_for(hf)
    sizes = sizes_of(hf, hf["vocab_size"]) | family.sizes(hf)
    weights = attends = 0
    for layer in range(hf["num_hidden_layers"]):
        if family.is_linear(hf, layer):
            weights += 3 * sizes["delta_values"] * sizes["delta_keys"] // sizes["delta_heads"]
        else:
            attends += 1
        for entry in family.layer_entries(hf, layer):
            times = hf["num_experts_per_tok"] if entry.of_expert else 1
            weights += times * sum(sizes[shape[0]] * sizes[shape[1]] for _, shape in entry.hf if len(shape) == 2)
    products = sizes.get("latent_q", sizes["q"]) + sizes.get("latent_out", sizes["q"])  # with keys, and with values
    lengths = lengths_S.double()
    scores = attends * products * float((lengths * lengths).sum())
    output = sizes["hidden"] * (sizes["vocab"] if head == "lm" else 1)
    tokens, passes = float(lengths.sum()), 3 if adapters is None else 2
    of_weights = 2 * weights * tokens + 2 * output * labels
    return passes * of_weights + 3 * (scores + 2 * (adapters or 0) * tokens)


def adapter_weights(shapes: Iterable[AdapterShape], hf: HFConfig) -> int:
    """Returns entries of A and B that a token is multiplied with. An expert counts only for its own tokens."""
    chosen = hf.get("num_experts_per_tok") or 1
    return sum(s.rank * (s.in_features + s.out_features) * (chosen if s.experts else 1) for s in shapes)


def memory_gb(device: torch.device) -> float:
    """Peak memory so far, in 10^9 bytes: allocated on this process's GPU, or resident where it has none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


class FreedMemory:
    """Gives memory that the process has freed back to the system.

    glibc keeps freed blocks between those in use, and rollouts of ever other lengths leave ever more such holes. In
    3,000 steps a tiny GRPO grew from 540 MB to 588 MB, and to 546 MB with this. The memory in use stayed the same. A
    call takes 2 ms there. Other C libraries have no such function, and keep what they keep.
    """

    EVERY_S = 20.0  # the next step asks for the pages again: 8 % of an update of 0.9 s

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        self._last_s = time.monotonic()

    def give_back(self) -> None:
        """Called after each step; does so at most once in EVERY_S."""
        now_s = time.monotonic()
        if self._trim is not None and now_s - self._last_s >= self.EVERY_S:
            self._trim(0)
            self._last_s = now_s


class Throughput:
    """Measures the steps of an engine: seconds, tokens per second, and model FLOPs utilization where it can be known.

    That is where the peak of the device is known and mrl has a table of the model's family.
    """

    def __init__(self, engine: BaseEngine) -> None:
        peak = peak_flops(engine.device)
        model, head = engine.config.model, engine.config.head
        self.head = head
        self.hf = read_hf_config(model.path) if peak is not None else {}
        known = family_of(self.hf.get("model_type")) is not None
        self.peak = peak * engine.world_size if peak is not None and known else None
        self.adapters = None
        if self.peak is not None and model.lora is not None:
            self.adapters = adapter_weights(adapters(model.path, model.lora, head).values(), self.hf)

    def metrics(self, batch: Batch, *, step_s: float) -> dict[str, float]:
        """`perf/...` of a step on a global mini-batch that took `step_s` seconds."""
        row = {"perf/step_s": step_s, "perf/tokens_per_s": batch.num_tokens / step_s}
        if self.peak is not None:
            labels = int((batch.loss_mask != 0).sum())
            flops = training_flops(self.hf, batch.lengths, labels, self.adapters, head=self.head)
            row["perf/mfu"] = flops / (step_s * self.peak)
        return row
