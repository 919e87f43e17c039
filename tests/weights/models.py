"""Tiny random Hugging Face models, saved by transformers, and the layouts that they are cut into."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mrl.parallel import ParallelDims
from tests.engine import tiny

VOCAB = tiny.VOCAB  # odd: needs padding at any tp
# name: family of tests/engine/tiny.py, and what its config has beyond that
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in tiny.FAMILIES if family != "llama3"},
    "mixtral": ("mixtral", {"head_dim": 8}),  # mbridge multiplies by it
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3_bias": ("qwen3", {"attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3_moe_step": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "glm4_moe_plain": ("glm4_moe", {"attention_bias": False, "use_qk_norm": False}),
    "deepseek_v3_q": ("deepseek_v3", {"q_lora_rank": None}),
}
MOE = tuple(name for name, (of, _) in MODELS.items() if any("experts" in field for field in tiny.FAMILIES[of][1]))

DENSE_LAYOUTS = {
    "tp1": ParallelDims(),
    "tp2": ParallelDims(world_size=2, tp=2),
    "tp4": ParallelDims(world_size=4, tp=4),  # more than the 2 KV heads
    "pp2": ParallelDims(world_size=2, pp=2),
    "pp3_uneven": ParallelDims(world_size=3, pp=3),
    "pp2xvpp2": ParallelDims(world_size=2, pp=2, vpp=2),
    "tp2xpp2": ParallelDims(world_size=4, tp=2, pp=2),
    "tp2xdp2": ParallelDims(world_size=4, tp=2),
}
MOE_LAYOUTS = {
    "ep2": ParallelDims(world_size=2, ep=2),
    "tp2xep2_etp1": ParallelDims(world_size=2, tp=2, ep=2),
    "tp2xep2_etp2": ParallelDims(world_size=4, tp=2, ep=2, etp=2),
    "ep2xetp2": ParallelDims(world_size=4, ep=2, etp=2),
    "tp2xpp2xep2": ParallelDims(world_size=8, tp=2, pp=2, ep=2),
    "tp2xpp2xvpp2xep4": ParallelDims(world_size=8, tp=2, pp=2, vpp=2, ep=4),
}
LAYOUTS = DENSE_LAYOUTS | MOE_LAYOUTS


@dataclasses.dataclass(frozen=True)
class Saved:
    """A model folder and its weights as transformers saved them, by HF name."""

    path: Path
    weights: dict[str, torch.Tensor]


def save(
    folder: Path,
    name: str,
    *,
    tied: bool,
    dtype: torch.dtype = torch.float32,
    fields: Mapping[str, object] = MappingProxyType({}),
    **options: object,
) -> Path:
    """Save the random model `name` into `folder`; every weight random, norms and biases too. fields: of its config."""
    family, of_variant = MODELS[name]
    config = tiny.config_of(family, layers=4, tied=tied, **of_variant | dict(fields))
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in (*model.parameters(), *(b for n, b in model.named_buffers() if n in model.state_dict())):
            parameter.normal_()
    model.to(dtype).save_pretrained(folder, **options)
    return folder
