"""The precision of a model: bfloat16 from fp32 masters, but for the parameters that transformers keeps in fp32.

Inputs of modules are not cast: they get what the model gives them, as in transformers. It keeps angles of rotary
embeddings in fp32, and a cast at a block's entry would round them in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from mrl.engine.fsdp.blocks import blocks_of
from mrl.errors import ConfigError, ModelError

FLOAT32 = MixedPrecisionPolicy()

SHARE_OF_MEMORY = 1 / 16
"""Most of a GPU's memory that weights may take to stay gathered. In bfloat16 it is a ninth of the state with Adam."""


def policy_of(dtype: str) -> MixedPrecisionPolicy:
    """Returns the policy that gathers weights in `dtype` and reduces gradients in fp32."""
    if dtype == "float32":
        return FLOAT32
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


def fp32_parameters(hf: nn.Module, dtype: str) -> dict[str, nn.Parameter]:
    """Returns the parameters that transformers keeps in fp32 if the model is of `dtype`, by name."""
    # not `_keep_in_fp32_modules`: transformers reads those for float16 alone (5.23, modeling_utils.py)
    patterns = sorted(hf._keep_in_fp32_modules_strict or ())
    if dtype == "float32" or not patterns:
        return {}
    found = re.compile("|".join(pattern.replace("*", ".*") for pattern in patterns))
    return {name: p for name, p in hf.named_parameters() if found.search(name)}


def modules_of(hf: nn.Module, kept: Mapping[str, nn.Parameter], *, compiled: bool) -> list[nn.Module]:
    """Returns the modules that hold the parameters `kept` and no others but adapters, each as large as can be.

    Raises ModelError if a module also holds others, because FSDP gathers a module's weights in one dtype. Raises
    ConfigError if blocks are compiled: no test covers a gathering inside of a compiled block.
    """
    if not kept:
        return []
    if compiled:
        raise ConfigError(
            "engine.fsdp.compile",
            True,
            (
                f"is not supported for model_type {hf.config.model_type!r} with model.dtype bfloat16, of "
                f"which transformers keeps {next(iter(kept))} in fp32"
            ),
            "set it to false, or model.dtype to float32",
        )
    ids, blocks = {id(p) for p in kept.values()}, {id(block) for block in blocks_of(hf)}
    return list(_outermost(hf, "", ids, blocks, hf.config.model_type))


def gathered_itemsizes(hf: nn.Module, dtype: str, in_fp32: Sequence[nn.Module]) -> list[int]:
    """Returns the bytes of an element of each parameter as it is gathered. in_fp32: as `modules_of` returns."""
    exact = {id(p) for module in in_fp32 for p in module.parameters()}
    return [4 if dtype == "float32" or id(p) in exact else 2 for p in hf.parameters()]


def stays_gathered(gathered_bytes: int, shards: int, gpu_memory: int | None) -> bool:
    """Returns whether weights stay gathered over a mini-batch though `engine.fsdp.defer_sync` is false.

    They do if one rank holds all shards: then it gathers only copies of its own. The copies may take
    `SHARE_OF_MEMORY`. shards: ranks that hold one copy of the model. gpu_memory: in bytes; None on a CPU.
    """
    return shards == 1 and (gpu_memory is None or gathered_bytes <= SHARE_OF_MEMORY * gpu_memory)


def _outermost(module: nn.Module, name: str, kept: set[int], blocks: set[int], model_type: str) -> Iterator[nn.Module]:
    # adapters go with what they adapt: peft adds those of a router to its weight before the router's own forward
    inside = {id(p) for parameter, p in module.named_parameters() if "lora_" not in parameter}
    if not inside & kept:
        return
    has_forward = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if inside <= kept and has_forward and not any(id(inner) in blocks for inner in module.modules()):
        yield module
        return
    own = {parameter: id(p) in kept for parameter, p in module.named_parameters(recurse=False)}
    if any(own.values()):
        parameter = next(parameter for parameter, is_kept in own.items() if is_kept)
        why = (
            f"is not supported for model_type {model_type!r} on backend fsdp: transformers keeps {name}{parameter} in "
            "fp32 and not all of its module"
        )
        raise ModelError("model.dtype", "bfloat16", why, "set it to float32")
    for child_name, child in module.named_children():
        yield from _outermost(child, f"{name}{child_name}.", kept, blocks, model_type)
