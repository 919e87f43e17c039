"""How fast and how large: model FLOPs, the peak of known GPUs, memory."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500e12), ("B200", 2250e12), ("B100", 1750e12), ("GH200", 989e12),
    ("H200 NVL", 835e12), ("H200", 989e12),
    ("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H100", 989e12), ("H800", 989e12), ("H20", 148e12),
    ("A100", 312e12), ("A800", 312e12), ("A40", 150e12), ("A30", 165e12), ("A10G", 70e12), ("A10", 125e12),
    ("L40S", 362e12), ("L40", 181e12), ("L4", 121e12),
    ("RTX 5090", 210e12), ("RTX 4090", 165e12), ("RTX 3090", 71e12),
)  # fmt: skip
"""Part of a GPU's name -> dense bf16 FLOP/s with fp32 accumulation, from the makers' data sheets; the first that fits."""


def peak_flops(device: torch.device) -> float | None:
    """The dense bf16 peak of a device, in FLOP/s; None for a CPU and for a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """The dense bf16 peak of a GPU by its name, in FLOP/s: an `RTX A4000` is no `A40`."""
    if "Laptop" in name:  # slower than the card of the same name
        return None
    words = f" {re.sub(r'[-_/]', ' ', name)} "
    return next((peak for part, peak in PEAK_BF16_FLOPS if f" {part} " in words), None)


def training_flops(hf: Mapping[str, Any], lengths_S: Tensor, labels: int) -> float:
    """FLOPs of the matrix products in one forward and backward pass over sequences of these lengths.

    hf: the content of config.json. labels: how many tokens train; the output layer computes no others (docs/loss.md).
    2 FLOPs per weight and token, causal attention at half the full square, and a
    backward pass twice the forward; recomputation is not counted, nor is a sliding window (Narayanan et al., "Efficient
    Large-Scale Language Model Training", 2021, appendix; Chowdhery et al., "PaLM", 2022, appendix B).
    """
    hidden, layers, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
    groups = hf.get("num_key_value_heads") or heads
    head_dim = hf.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * groups)
    weights = layers * attention + sum(_mlp_weights(hf, layer) for layer in range(layers))
    output = hidden * hf["vocab_size"]
    lengths = lengths_S.double()
    scores = 2 * layers * heads * head_dim * float((lengths * lengths).sum())
    return 3 * (2 * weights * float(lengths.sum()) + 2 * output * labels + scores)


def _mlp_weights(hf: Mapping[str, Any], layer: int) -> int:
    """Weights of one layer's gated MLP that a token passes through: of the experts chosen, and the router."""
    hidden = hf["hidden_size"]
    experts = hf.get("num_experts") or hf.get("num_local_experts")
    dense = layer in (hf.get("mlp_only_layers") or ()) or (layer + 1) % (hf.get("decoder_sparse_step") or 1) != 0
    if not experts or dense:
        return 3 * hidden * hf["intermediate_size"]
    width = hf.get("moe_intermediate_size") or hf["intermediate_size"]
    return 3 * hidden * width * hf["num_experts_per_tok"] + hidden * experts


def memory_gb(device: torch.device) -> float:
    """Peak memory so far, in 10^9 bytes: allocated on this process's GPU, or resident where it has none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
