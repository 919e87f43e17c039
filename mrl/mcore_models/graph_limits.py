"""Checks `engine.micro_batch.pad` and `engine.cuda_graphs`, without importing megatron.

A CUDA graph has one shape and fixed memory, and nothing in it may wait for the host. So micro-batches are padded to one
number of positions. All that is not known to be captured is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from mrl.config.schema import EngineConfig, ModelConfig, TrainedModelConfig
from mrl.errors import ConfigError
from mrl.mcore_models import megatron_fields, userbuffers
from mrl.parallel import ParallelDims

PAD, GRAPHS = "engine.micro_batch.pad", "engine.cuda_graphs"

LAYER_FIELDS = ("apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion")
"""Fields of megatron's TransformerConfig that graphs take."""


OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")
"""Fields of megatron's DDP that are off with graphs."""


def _refuse(why: str, fix: str = "leave out one of them", key: str = GRAPHS) -> NoReturn:
    raise ConfigError(key, True, why, fix)


def check_config(model: ModelConfig, engine: EngineConfig) -> None:
    """Raises ConfigError if keys do not go together."""
    if engine.micro_batch.pad:
        _check_pad(engine)
    if not engine.cuda_graphs:
        return
    parallel, moved = engine.parallel, sorted({*engine.offload} - {"optimizer"})
    if not engine.micro_batch.pad:
        _refuse(f"needs micro-batches of one shape, and {PAD} is false", "set that to true, and micro_batch.tokens")
    for name in ("pp", "cp", "ep"):
        if getattr(parallel, name) > 1:
            _refuse(f"is not for engine.parallel.{name} {getattr(parallel, name)}", "set that to 1, or leave this out")
    if engine.recompute != "none":
        _refuse(f"is not for engine.recompute {engine.recompute}")
    if moved:
        _refuse(f"needs tensors that stay where they are, and engine.offload moves {' and '.join(moved)}")
    megatron_fields.check(engine.megatron)
    for name in megatron_fields.fields_of_kind(engine.megatron, "transformer"):
        if name not in LAYER_FIELDS:
            _refuse(f"is not for {megatron_fields.KEY}.{name}")
    for name in OVERLAPS:
        if engine.megatron.get(name):
            why = "is not for {}.{}: replicas that replay and others would communicate in different orders"
            _refuse(why.format(megatron_fields.KEY, name))
    if isinstance(model, TrainedModelConfig):
        if model.lora is not None:
            _refuse("is not for adapters (model.lora)")
        if model.mtp is not None:
            _refuse("is not for MTP layers (model.mtp)")


def _check_pad(engine: EngineConfig) -> None:
    if engine.micro_batch.token_limit is None:
        given = "engine.micro_batch.tokens is auto" if engine.micro_batch.tokens else "there is none"
        fix = "set engine.micro_batch.tokens to a number, and no engine.micro_batch.size"
        _refuse(f"pads every micro-batch to a number of tokens, and {given}", fix, PAD)
    if engine.megatron.get("fp8"):
        _refuse(f"is not for {megatron_fields.KEY}.fp8", key=PAD)
    if engine.megatron.get("moe_expert_capacity_factor") is not None:
        why = f"pads with tokens that take places of experts, which {megatron_fields.KEY}.moe_expert_capacity_factor"
        _refuse(f"{why} makes few", key=PAD)


def check_model(
    engine: EngineConfig, fields: Mapping[str, Any], dims: ParallelDims, *, longest: int, key: str, packed: bool
) -> None:
    """Raises ConfigError if the keys are not for a model, a layout or its sequences.

    fields: the model's as megatron has them. longest: tokens of the longest sequence, which `key` sets.
    """
    if engine.micro_batch.pad:
        if not packed:
            _refuse("needs packed micro-batches", "set data.packing to true, or leave this out", PAD)
        places = userbuffers.places_of(engine, dims)
        if places is not None and longest > places:
            why = f"is less than {longest} ({key}), and with {PAD} no micro-batch can have more"
            raise ConfigError("engine.micro_batch.tokens", engine.micro_batch.tokens, why, f"give at least {longest}")
    if not engine.cuda_graphs:
        return
    fix = "leave it out"
    if fields.get("multi_latent_attention") or any(fields.get("linear_attention_freq") or ()):
        _refuse("is not for latent attention and gated delta nets", fix)
    if fields.get("attention_dropout") or fields.get("hidden_dropout"):
        _refuse("draws no random numbers, and the model's config.json has a dropout", "set it to 0 there, or " + fix)
    if fields.get("num_moe_experts"):
        refusal = _experts_refusal(engine, fields, dims)
        if refusal is not None:
            way = "set engine.parallel.etp to 1, or " if dims.etp > 1 else ""
            _refuse(f"needs layers of experts that ask the host for nothing, and {refusal}", way + fix)


def _experts_refusal(engine: EngineConfig, fields: Mapping[str, Any], dims: ParallelDims) -> str | None:
    """Returns why experts' counts go to the host in any case; None if they may stay on the device."""
    if dims.ep * dims.etp > 1:
        return f"these are on {dims.ep * dims.etp} ranks (engine.parallel.etp is {dims.etp})"
    if fields.get("add_bias_linear"):
        return "the model's have biases"
    if engine.moe.grouped_mm is False:
        return "engine.moe.grouped_mm is false"
    if engine.layer_spec == "te":
        return "transformer-engine's do (engine.layer_spec is te)"
    return None


def check_attention(dtype: torch.dtype) -> None:
    """Raises ConfigError if local layers on a GPU cannot be captured."""
    if dtype == torch.float32:
        why = "needs attention in one call for rows of any lengths, which local layers have in 16 bits alone"
        _refuse(why, "set model.dtype to bfloat16, or leave it out")


def check_layers(spec: str, dtype: torch.dtype, *, counts_stay: bool) -> None:
    """Raises ConfigError if the layers that a GPU gets cannot be captured.

    counts_stay: whether no layer of experts reads on the host how many tokens each expert gets.
    """
    if not hasattr(torch.autograd.graph, "set_override_stale_capture_stream"):
        _refuse(f"needs torch 2.13, and this is {torch.__version__}", "leave it out")
    if spec == "local":
        check_attention(dtype)
    if not counts_stay:
        why = "needs layers of experts that ask the host for nothing: local ones, with grouped products"
        _refuse(why, "set engine.layer_spec to local and engine.moe.grouped_mm to true, or leave this out")
