"""Checks a config and a model for the Megatron engine, without importing megatron."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mrl.config.backends import OWN_KEYS
from mrl.config.schema import EngineConfig, ModelConfig, TrainedModelConfig
from mrl.engine.checks import EngineChecks, Sequences
from mrl.errors import ConfigError, Shown
from mrl.mcore_models import fp8, graph_limits, layer_spec, megatron_needs, userbuffers
from mrl.mcore_models.layer_spec import DTYPES, LayerSpec
from mrl.mcore_models.layout import ALIGNMENT, check_layout, expert_sizes, experts_fit, recompute_modules
from mrl.ops import devices
from mrl.parallel import ParallelDims, stage_layers
from mrl.weights.accounting import count_key, num_mtp_layers
from mrl.weights.families import family_for, family_of, fields_of
from mrl.weights.hf_config import normalize
from mrl.weights.table import HFConfig


class MegatronChecks(EngineChecks):
    backend = "megatron"
    supports = OWN_KEYS["megatron"]

    @classmethod
    def check_config(cls, model: ModelConfig, engine: EngineConfig) -> None:
        super().check_config(model, engine)
        if engine.batch_invariant:
            check_batch_invariant(engine)
        userbuffers.check_config(model, engine)
        graph_limits.check_config(model, engine)

    @classmethod
    def check_model(cls, engine: EngineConfig, dims: ParallelDims, hf_config: HFConfig, sequences: Sequences) -> None:
        normalized = normalize(dict(hf_config))
        fields = fields_of(normalized)
        check_counts(engine, dims, normalized)
        check_layout(fields, dims)
        megatron_needs.check(engine.megatron, fields, dims)
        for check in (userbuffers.check_model, graph_limits.check_model):
            check(engine, fields, dims, longest=sequences.longest, key=sequences.key, packed=sequences.packed)
        if engine.batch_invariant and fields.get("num_moe_experts") and dims.experts_span_replicas:
            why = f"is not for experts on ranks of several replicas: they get tokens of all at once ({dims.describe()})"
            raise ConfigError("engine.batch_invariant", True, why, "set engine.parallel.etp to 1, or leave this out")
        fp8.check_model(engine.megatron, family_for(normalized), normalized, dims)
        if engine.recompute == "selective":
            recompute_modules(fields, engine.recompute_modules, layer_spec=None)
        layer_spec.check_attention(engine.attention, engine.layer_spec)
        if layer_spec.wanted_spec(engine.layer_spec, engine.attention) == "te":
            layer_spec.check_rules(fields, dims, attention=engine.attention)

    @classmethod
    def check_anywhere(cls, model: ModelConfig, engine: EngineConfig, dims: ParallelDims, hf_config: HFConfig) -> None:
        fields, dtype = _check_trained(model, engine, dims, hf_config)
        _check_attention_of_graphs(engine, dtype, on_gpu=engine.device == "cuda")
        if layer_spec.wanted_spec(engine.layer_spec, engine.attention) == "te":
            layer_spec.check_rules(fields, dims, dtype=dtype, attention=engine.attention)

    @classmethod
    def notes_on(cls, model: ModelConfig, engine: EngineConfig, dims: ParallelDims, hf_config: HFConfig) -> list[str]:
        fields, dtype = fields_of(normalize(dict(hf_config))), DTYPES[model.dtype]
        spec = layer_spec.choose(engine, fields, dims, dtype=dtype, lora=model.lora is not None, elsewhere=True)
        megatron_needs.check_spec(engine.megatron, spec.name, spec.why, dtype, elsewhere=engine.layer_spec)
        return choice_lines(spec, engine, fields)

    @classmethod
    def check_here(cls, model: ModelConfig, engine: EngineConfig, dims: ParallelDims, hf_config: HFConfig) -> None:
        fields, dtype = _check_trained(model, engine, dims, hf_config)
        spec = layer_spec.choose(engine, fields, dims, dtype=dtype, lora=model.lora is not None)
        megatron_needs.check_spec(engine.megatron, spec.name, spec.why, dtype)
        _check_attention_of_graphs(engine, dtype, on_gpu=devices.has_gpu())
        fp8.check_here(engine.megatron)


def _check_attention_of_graphs(engine: EngineConfig, dtype: torch.dtype, *, on_gpu: bool) -> None:
    """Checks the layers that are asked for by name. Those of `auto` are known when the model is built."""
    if engine.cuda_graphs and engine.layer_spec == "local" and on_gpu:
        graph_limits.check_attention(dtype)


def choice_lines(spec: LayerSpec, engine: EngineConfig, fields: Mapping[str, Any]) -> list[str]:
    """Returns lines for the user on the choices for a model, before a run and in it. fields: as of `fields_of`."""
    lines = layer_spec.notes(spec)
    if engine.cuda_graphs:
        on_gpu = engine.device == "cuda" or (engine.device == "auto" and devices.has_gpu())
        what = "a GPU replays the layers as CUDA graphs in training; none has run it"
        what = what if on_gpu else "on a CPU nothing is captured, and layers run as without it"
        lines.append(f"engine.cuda_graphs: {what} (docs/training-graphs.md)")
    if engine.recompute == "selective":
        modules = recompute_modules(fields, engine.recompute_modules, layer_spec=spec.name)
        lines.append(f"engine.recompute: selective computes {', '.join(modules)} again (docs/layouts.md)")
    return lines


def check_batch_invariant(engine: EngineConfig) -> None:
    """Raises ConfigError if sequences of a micro-batch, or of other replicas, would meet in one product."""
    if engine.micro_batch.size != 1:
        why = "needs micro-batches of one sequence: products of other numbers of tokens add in another order"
        raise ConfigError("engine.batch_invariant", True, why, "set engine.micro_batch.size to 1")
    if engine.parallel.ep > 1:
        why = f"is not for engine.parallel.ep {engine.parallel.ep}: an expert gets tokens of several replicas at once"
        raise ConfigError("engine.batch_invariant", True, why, "set that to 1, or leave this out")


def _check_trained(
    model: ModelConfig, engine: EngineConfig, dims: ParallelDims, hf_config: HFConfig
) -> tuple[dict[str, Any], torch.dtype]:
    """Checks MTP layers and grouped experts. Returns the model's fields and dtype."""
    normalized = normalize(dict(hf_config))
    if isinstance(model, TrainedModelConfig) and model.mtp is not None:
        mtp_layers(normalized, dims, lora=model.lora is not None)
    fields, dtype = fields_of(normalized), DTYPES[model.dtype]
    check_grouped(engine, fields, dims, dtype)
    return fields, dtype


def mtp_layers(hf_config: HFConfig, dims: ParallelDims, *, lora: bool) -> int:
    """Returns how many MTP layers train. lora: adapters do. Raises ConfigError if they cannot."""
    layers = num_mtp_layers(hf_config)
    if not layers or family_of(hf_config["model_type"]) is None:
        why = f"is for a model with MTP layers, and {count_key(hf_config)} of its config.json is {layers}"
        raise ConfigError("model.mtp", why=why, fix="leave it out")
    if lora:
        raise ConfigError("model.mtp", why="trains whole layers, and model.lora adapters alone", fix="set one of them")
    if dims.pp > 1 and hf_config["tie_word_embeddings"]:
        why = "gives the last stage an embedding of its own, and with model.mtp that of a tied model is there twice"
        raise ConfigError("engine.parallel.pp", dims.pp, why, "set it to 1, or leave out model.mtp")
    return layers


def check_counts(engine: EngineConfig, dims: ParallelDims, model: HFConfig) -> None:
    """Raises ConfigError if a model lacks the layers or experts that keys ask for. model: as of `normalize`."""
    stage_layers(model["num_hidden_layers"], dims.pp, dims.vpp)
    if not model["num_experts"]:
        _check_dense(engine, dims, model)


def check_grouped(engine: EngineConfig, fields: Mapping[str, Any], dims: ParallelDims, dtype: torch.dtype) -> None:
    """Refuses `engine.moe.grouped_mm: true` for experts that it would not multiply. fields: as of `fields_of`."""
    if engine.moe.grouped_mm is not True or not fields.get("num_moe_experts"):
        return
    why = None
    if fields.get("add_bias_linear"):
        why = "multiplies experts without biases, and the model's have some"
    elif engine.megatron.get("fp8"):
        why = "multiplies experts in 16 bits, and engine.megatron.fp8 in 8"
    elif not experts_fit(fields, dims, dtype.itemsize):
        theirs = " x ".join(map(str, expert_sizes(fields, dims)))
        multiple = f"{ALIGNMENT // dtype.itemsize} ({ALIGNMENT} bytes in {str(dtype).removeprefix('torch.')})"
        why = f"takes experts whose sizes are multiples of {multiple}, and theirs are {theirs} on a rank"
    if why is not None:
        raise ConfigError("engine.moe.grouped_mm", True, why, "leave it out")


def _check_dense(engine: EngineConfig, dims: ParallelDims, model: HFConfig) -> None:
    """Refuses keys of experts and routers for a model without any."""
    kind, moe = model.get("model_type"), engine.moe
    for key, value, is_set, why, fix in (
        ("parallel.ep", dims.ep, dims.ep > 1, "splits experts", "leave it out"),
        ("parallel.etp", dims.etp, dims.etp not in (1, dims.tp), "splits experts", "leave it out"),
        ("moe.aux_loss", Shown(f"{moe.aux_loss:g}"), moe.aux_loss, "is for a router", "set it to 0"),
        ("moe.z_loss", Shown(f"{moe.z_loss:g}"), moe.z_loss, "is for a router", "set it to 0"),
        ("moe.grouped_mm", True, moe.grouped_mm is True, "is for experts", "leave it out"),
    ):
        if is_set:
            raise ConfigError(f"engine.{key}", value, f"{why}, and the model ({kind}) has none", fix)
