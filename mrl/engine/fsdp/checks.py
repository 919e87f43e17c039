"""Checks of a config and of a model for the FSDP engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.config.backends import OWN_KEYS
from mrl.config.checks import check_recompute
from mrl.config.schema import EngineConfig, ModelConfig
from mrl.engine.checks import EngineChecks, Sequences, whole_number
from mrl.engine.fsdp.positions import check_positions
from mrl.errors import ConfigError
from mrl.parallel import ParallelDims, divisors_near
from mrl.weights.families import FAMILIES
from mrl.weights.hf_config import normalize


class FSDPChecks(EngineChecks):
    backend = "fsdp"
    supports = OWN_KEYS["fsdp"]

    @classmethod
    def check_config(cls, model: ModelConfig, engine: EngineConfig) -> None:
        super().check_config(model, engine)
        check_recompute(engine)

    @classmethod
    def check_model(
        cls, engine: EngineConfig, dims: ParallelDims, hf_config: Mapping[str, Any], sequences: Sequences
    ) -> None:
        if dims.cp > 1:
            check_shared_sequences(dims.cp, hf_config)
        check_positions(hf_config, sequences)
        if normalize(dict(hf_config))["model_type"] not in FAMILIES:
            from mrl.engine.fsdp.build import check_sequences  # transformers' models are slow to import

            check_sequences(hf_config, sequences)


def check_shared_sequences(cp: int, model: Mapping[str, Any]) -> None:
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
