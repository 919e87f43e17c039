"""What vLLM on a CPU computes with after new weights: packed copies, of which it leaves some as they were.

There vLLM 0.32.0 packs a layer's weight when the layer is loaded. Two kinds it does not pack anew, in silence:

- A tied head has the embedding's parameter and is a layer of its own, to which nothing is loaded: its copy stays old.
- Experts are packed in place, when the server starts alone (`UnquantizedFusedMoEMethod._setup_kernel`: `if not
  is_weight_update`): new weights are then read as if they were packed.

On a GPU nothing is packed. Imported in the servers' environment too, so torch is all that it needs.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def repack(model: nn.Module) -> None:
    """Packs the weights that several layers have, and those of experts: once behind each reload that has brought all of
    them."""
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
