"""What is packed anew behind new weights in vLLM on a CPU; real servers of it are in test_handover_models.py."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from mrl.rollout import vllm_local
from mrl.rollout.cpu_packing import repack


class UnquantizedFusedMoEMethod:
    """By vLLM's name."""

    def __init__(self, packed: list[str], name: str) -> None:
        experts = types.SimpleNamespace(process_weights_after_loading=lambda layer: packed.append(name))
        self.moe_kernel = types.SimpleNamespace(fused_experts=experts)
        self.process_weights_after_loading = lambda layer: packed.append(name)


class Derived(UnquantizedFusedMoEMethod):
    pass


class Quantized:
    __init__ = UnquantizedFusedMoEMethod.__init__


def layer(method: object, name: str, weight: nn.Parameter) -> nn.Module:
    made = nn.Module()
    made.register_parameter(name, weight)
    made.quant_method = method  # type: ignore[assignment]
    return made


def weights(device: str = "cpu") -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, device=device))


@pytest.fixture
def model_and_packed():
    """A model with experts, on another device too, with linear layers, two of which have one weight."""
    packed: list[str] = []
    experts = {
        "own": layer(UnquantizedFusedMoEMethod(packed, "own"), "w13_weight", weights()),
        "derived": layer(Derived(packed, "derived"), "w13_weight", weights()),
        "quantized": layer(Quantized(packed, "quantized"), "w13_weight", weights()),
        "elsewhere": layer(UnquantizedFusedMoEMethod(packed, "elsewhere"), "w13_weight", weights("meta")),
    }
    shared = weights()
    linear = {
        name: layer(Quantized(packed, name), "weight", weight)
        for name, weight in (("embedding", shared), ("head", shared), ("alone", weights()))
    }
    for one in linear.values():
        one.cpu_linear = None
    return nn.ModuleDict(experts | linear), packed


def test_shared_weights_and_experts_are_packed_once(model_and_packed):
    model, packed = model_and_packed
    repack(model)
    assert sorted(packed) == ["derived", "embedding", "head", "own"]


@pytest.mark.parametrize("lacks", [False, True])
def test_vllm_inside_the_trainer_packs_what_is_whole(model_and_packed, lacks):
    model, packed = model_and_packed
    names = {name for name, _ in model.named_parameters()}
    model.load_weights = lambda weights: names - {"own.w13_weight"} if lacks else names

    def reload_weights(weights_iterator):
        assert model.load_weights(weights_iterator) and not packed

    worker = types.SimpleNamespace(
        model_runner=types.SimpleNamespace(get_model=lambda: model), reload_weights=reload_weights
    )
    if lacks:
        with pytest.raises(RuntimeError, match="no weights for 1 of vLLM's parameters, as own.w13_weight"):
            vllm_local._reload(worker, iter([]))
    else:
        vllm_local._reload(worker, iter([]))
    assert bool(packed) is not lacks
