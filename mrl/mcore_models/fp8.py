"""Checks which models, layouts and GPUs transformer-engine's matrix products in 8 bits (FP8) take.

If its config has `fp8`, megatron-core runs each layer inside transformer-engine's autocast. Linear layers, also those
of experts, then round activations, weights and gradients to FP8 for their products. A recipe chooses the scales.
Everything else stays: parameters, gradients of weights, norms, attention, routers, embedding and head.

Products take a multiple of 16 (mxfp8: 32) rows and columns. Rows are tokens: micro-batches are padded (inputs.py), and
megatron pads each expert's tokens. Columns are the model's sizes, and these are checked here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from mrl.errors import ConfigError
from mrl.mcore_models.megatron_fields import KEY
from mrl.ops import devices
from mrl.parallel import Coordinates, ParallelDims
from mrl.weights.rules import ChunkPlan, param_map
from mrl.weights.table import Family, HFConfig


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Says how scales are chosen, and what that takes.

    Sources: `get_fp8_align_size` of megatron-core, `check_recipe_support` of transformer-engine 2.20.
    """

    multiple: int  # of rows and columns
    since: tuple[int, int]  # the least compute capability
    before: tuple[int, int] | None = None  # the least that no longer has it
    cuda: tuple[int, ...] = (0, 0)  # the oldest version; any that torch 2.13 is built with is enough for the others
    scale_bytes: float = 0  # of a weight's scales, for each of its values
    gpus: str = ""  # for people

    def runs_on(self, capability: tuple[int, int], cuda: tuple[int, ...]) -> bool:
        """Returns whether a GPU has the recipe. cuda: the version that torch was built with."""
        on_gpu = self.since <= capability and (self.before is None or capability < self.before)
        return on_gpu and cuda >= self.cuda


RECIPES: Mapping[str, Recipe] = {
    "tensorwise": Recipe(16, (8, 9), gpus="compute capability 8.9 and up (L40S, RTX 40, H100, B200)"),
    "blockwise": Recipe(
        16,
        (9, 0),
        cuda=(12, 9),
        scale_bytes=4 / 128**2,
        gpus="compute capability 9.0 and up (H100, B200) and CUDA 12.9",
    ),
    "mxfp8": Recipe(32, (10, 0), (12, 0), scale_bytes=1 / 32, gpus="compute capability 10 (B200)"),
}

WITH_FP8 = ("fp8_recipe", "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
            "tp_only_amax_red")  # fmt: skip
"""Fields that are read with `fp8` alone."""

NOT_LINEAR = (".router.", ".shared_experts.gate_weight", ".linear_q_down_proj.", ".linear_kv_down_proj.")
"""Matrices of layers that are no linear layer of transformer-engine's."""


def recipe_of(megatron_options: Mapping[str, Any]) -> Recipe | None:
    """Returns the recipe of `engine.megatron`; None without FP8."""
    return RECIPES[megatron_options["fp8_recipe"]] if megatron_options.get("fp8") else None


def multiple_of(megatron_options: Mapping[str, Any]) -> int:
    """Returns the number that must divide the tokens of a rank. megatron_options: `engine.megatron`."""
    recipe = recipe_of(megatron_options)
    return 1 if recipe is None else recipe.multiple


def check_fields(megatron_options: Mapping[str, Any]) -> None:
    """Raises ConfigError if fields do not go together. megatron_options: `engine.megatron`, of right types."""
    if not megatron_options.get("fp8"):
        for name in WITH_FP8:
            if megatron_options.get(name):
                raise ConfigError(
                    f"{KEY}.{name}",
                    megatron_options[name],
                    f"is read with {KEY}.fp8 alone",
                    "set that, or leave it out",
                )
        return
    recipe = megatron_options.get("fp8_recipe")
    if recipe not in RECIPES:
        why, fix = f"is no recipe that {KEY}.fp8 is offered with", f"give one of {', '.join(RECIPES)}"
        raise ConfigError(f"{KEY}.fp8_recipe", recipe, why, fix)


def check_model(megatron_options: Mapping[str, Any], family: Family, hf: HFConfig, dims: ParallelDims) -> None:
    """Raises ConfigError if FP8 does not take a linear layer's size. hf: the normalized config.json."""
    recipe = recipe_of(megatron_options)
    if recipe is None:
        return
    of_kind = {tuple(family.layer_entries(hf, layer)): layer for layer in range(hf["num_hidden_layers"])}
    plan = ChunkPlan(tuple(sorted(of_kind.values())), has_embedding=False, has_output=False)
    rules = param_map(family, hf, layout=dims, coords=Coordinates(), chunk=plan)
    for rule in rules.values():
        shape = rule.shape()
        is_linear = len(shape) == 2 and not any(part in rule.mcore for part in NOT_LINEAR)
        if is_linear and any(size % recipe.multiple for size in shape):
            why = (
                f"takes sizes that are multiples of {recipe.multiple}, and {' + '.join(rule.hf)} is {shape[0]} x "
                f"{shape[1]} on a rank of {dims.describe()}"
            )
            raise ConfigError(
                f"{KEY}.fp8", megatron_options["fp8"], why, "use fewer ranks for a layer, or leave it out"
            )


def check_here(megatron_options: Mapping[str, Any]) -> None:
    """Raises ConfigError if this machine's GPU, or the CUDA of its torch, does not have the recipe."""
    recipe = recipe_of(megatron_options)
    if recipe is None or not devices.has_gpu():
        return
    capability = torch.cuda.get_device_capability()
    cuda = torch.version.cuda or "0.0"
    if not recipe.runs_on(capability, tuple(map(int, cuda.split(".")))):
        why = f"needs {recipe.gpus}, and this GPU has {capability[0]}.{capability[1]}, torch CUDA {cuda}"
        fix = f"give another recipe (docs/fp8.md), or leave out {KEY}.fp8"
        raise ConfigError(f"{KEY}.fp8_recipe", megatron_options["fp8_recipe"], why, fix)


def copies_bytes(
    megatron_options: Mapping[str, Any], weights: Iterable[tuple[str, int, int]], layers: int, *, trains: bool
) -> int:
    """Returns the bytes of the 8-bit copies of a rank's weights, with scales.

    A value has a byte by rows, and one by columns for a backward pass. Blackwell's `tensorwise` needs one for both; it
    is counted like older GPUs. weights: (name, layer of the model, values) of matrices in layers. layers: of the model.
    """
    recipe = recipe_of(megatron_options)
    if recipe is None:
        return 0
    of_bf16 = megatron_options.get("first_last_layers_bf16", False)
    first = megatron_options.get("num_layers_at_start_in_bf16", 1) if of_bf16 else 0
    last = layers - (megatron_options.get("num_layers_at_end_in_bf16", 1) if of_bf16 else 0)
    values = sum(
        count
        for name, layer, count in weights
        if first <= layer < last and not any(part in name for part in NOT_LINEAR)
    )
    return math.ceil(values * (1 + recipe.scale_bytes)) * (2 if trains else 1)


def forget_copies(chunks: Iterable[torch.nn.Module]) -> None:
    """Frees the 8-bit copies of weights that transformer-engine's modules keep from a step's first micro-batch on.

    The next forward makes them again.
    """
    for chunk in chunks:
        for module in chunk.modules():
            copies = getattr(module, "_fp8_workspaces", None)
            if copies:
                copies.clear()


def accumulate_gradients(chunk: torch.nn.Module) -> None:
    """Makes the backward pass of this micro-batch add to the gradients of weights.

    In a step's first micro-batch transformer-engine overwrites them (`gradient_accumulation_fusion`). It learns from
    megatron which one is first: under FP8 it is the first of each call of the schedule
    (`MegatronModule.set_is_first_microbatch`, 0.16.1 and 0.19.2). A step may have several such calls.
    """
    for module in getattr(chunk, "modules_with_is_first_microbatch", ()):
        module.is_first_microbatch = False


@contextlib.contextmanager
def disabled(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Makes layers compute in bfloat16 inside: decoding has one token of a sequence at a time."""
    held: list[tuple[Any, Any]] = []
    for chunk in chunks:
        for module in chunk.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "fp8", None):  # modules share a config: it is None for all but the first
                held.append((config, config.fp8))
                config.fp8 = None
    try:
        yield
    finally:
        for config, fp8 in held:
            config.fp8 = fp8
