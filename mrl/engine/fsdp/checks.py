"""Checks of a config and of a model for the FSDP engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.config.backends import OWN_KEYS
from mrl.config.checks import check_recompute
from mrl.config.schema import EngineConfig, ModelConfig
from mrl.engine.checks import EngineChecks, Sequences, whole_number
from mrl.errors import ConfigError
from mrl.parallel import ParallelDims, divisors_near
from mrl.weights.families import FAMILIES
from mrl.weights.hf_config import normalize
from mrl.weights.table import HFConfig


class FSDPChecks(EngineChecks):
    backend = "fsdp"
    supports = OWN_KEYS["fsdp"]

    @classmethod
    def check_config(cls, model: ModelConfig, engine: EngineConfig) -> None:
        super().check_config(model, engine)
        check_recompute(engine)

    @classmethod
    def check_model(cls, engine: EngineConfig, dims: ParallelDims, hf_config: HFConfig, sequences: Sequences) -> None:
        if dims.cp > 1:
            check_shared_sequences(dims.cp, hf_config)
        check_positions(hf_config, sequences)
        if normalize(dict(hf_config))["model_type"] not in FAMILIES:
            from mrl.engine.fsdp.build import check_sequences  # transformers' models are slow to import

            check_sequences(hf_config, sequences)


def check_shared_sequences(cp: int, model: HFConfig) -> None:
    """Raises ConfigError if `cp` ranks cannot share the sequences of the model. model: the content of its config.json.

    A model without a table in mrl may call these fields otherwise; the engine then tries it (mrl/engine/fsdp/probe.py).
    """
    model = model.get("text_config") or model
    for name, kind in (("num_attention_heads", "attention"), ("linear_num_key_heads", "linear attention's key")):
        heads = whole_number(model, name) if name in model else cp
        if heads % cp:
            raise ConfigError(
                "engine.parallel.cp",
                cp,
                f"does not divide the model's {heads} {kind} heads, which backend fsdp splits over its ranks",
                f"use one of {divisors_near(heads, cp)}",
            )


def check_positions(model: HFConfig, sequences: Sequences) -> None:
    """Raises ConfigError for sequences beyond the length up to which the angles of the model's positions are fixed.

    It checks what does not follow the length: generated sequences, and models with images.

    model: the content of its config.json.
    """
    kind, limit = length_dependent_positions(model) or (None, None)
    if kind is None or not (sequences.generated or "text_config" in model):
        return
    if limit is None:  # a field of config.json that is not there
        limit = whole_number(model.get("text_config") or model, "max_position_embeddings")
    if sequences.longest > limit:
        why = "images do not"
        if sequences.generated:
            why = "what is sampled token by token does not follow it as training does"
        why = (
            f'is above the {limit} positions up to which the rotary embedding "{kind}" of the model is the same for '
            f"all: beyond, it follows the length of a sequence, and {why}"
        )
        raise ConfigError(sequences.key, sequences.longest, why, f"give at most {limit}, or use another model")


def length_dependent_positions(model: HFConfig) -> tuple[str, int | None] | None:
    """Returns (kind, limit) of a rotary embedding that follows the length of a sequence; None for any other.

    Up to `limit` tokens its angles are the same for all sequences; None if config.json does not say. model: the content
    of its config.json.
    """
    model = model.get("text_config") or model
    for name in ("rope_parameters", "rope_scaling"):
        for kind, rope in _ropes(model.get(name)):
            if kind == "dynamic":
                return kind, model.get("max_position_embeddings")
            if kind == "longrope":
                original = rope.get("original_max_position_embeddings") or model.get("original_max_position_embeddings")
                return kind, original or model.get("max_position_embeddings")
    return None


def _ropes(rope: Any) -> list[tuple[Any, Mapping[str, Any]]]:
    """Returns (kind, fields) of the rotary embeddings in a field of config.json: one, or one for each type of layer."""
    if not isinstance(rope, Mapping):
        return []
    return [(rope.get("rope_type", rope.get("type")), rope)] + [pair for part in rope.values() for pair in _ropes(part)]
