"""A head that is the model's embedding, in vLLM on a CPU, after new weights.

There vLLM 0.32.0 computes with a packed copy of a layer's weight, which is made when the layer is loaded. A tied head
has the embedding's parameter and is a layer of its own, to which nothing is loaded: its copy stays the old one, in
silence. On a GPU there is no copy. Imported in the servers' environment too, so torch is all that it needs.
"""

from __future__ import annotations

from torch import nn


def pack_shared(model: nn.Module) -> None:
    """Packs the weights anew that several layers have."""
    layers: dict[int, list[nn.Module]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and hasattr(layer, "cpu_linear"):
            layers.setdefault(id(weight), []).append(layer)
    for sharing in layers.values():
        for layer in sharing if len(sharing) > 1 else ():
            layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr, operator]
