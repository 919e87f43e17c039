"""Repacks vLLM's weights on a CPU after new ones have come.

vLLM 0.32.0 computes there with packed copies, which it makes when a layer is loaded. It leaves two kinds stale, in
silence:

- A tied head has the embedding's parameter and is a layer of its own. Nothing is loaded to it, so its copy stays old.
- Experts are packed in place if the server starts alone (`UnquantizedFusedMoEMethod._setup_kernel`: `if not
  is_weight_update`). New weights are then read as if they were packed.

On a GPU nothing is packed. The servers' environment imports this too, so it needs torch alone.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def repack(model: nn.Module) -> None:
    """Packs weights that several layers share, and those of experts. Call it once after each whole reload."""
    layers: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and hasattr(layer, "cpu_linear"):
            layers.setdefault(id(weight), []).append(layer)
        _pack_experts(layer)
    for sharing in layers.values():
        for layer in sharing if len(sharing) > 1 else ():
            layer.quant_method.process_weights_after_loading(layer)


def _pack_experts(layer: Any) -> None:
    method: Any = getattr(layer, "quant_method", None)
    weight = layer._parameters.get("w13_weight")
    unquantized = any(kind.__name__ == "UnquantizedFusedMoEMethod" for kind in type(method).__mro__)
    if unquantized and weight is not None and weight.device.type == "cpu":
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)
