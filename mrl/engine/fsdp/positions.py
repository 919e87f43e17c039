"""Rotary embeddings that follow the length of a sequence, found in a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.engine.checks import Sequences, whole_number
from mrl.errors import ConfigError


def check_positions(model: Mapping[str, Any], sequences: Sequences) -> None:
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


def length_dependent_positions(model: Mapping[str, Any]) -> tuple[str, int | None] | None:
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
