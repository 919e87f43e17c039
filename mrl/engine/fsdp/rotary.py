"""Rotary embeddings whose frequencies follow the length of a sequence ("dynamic", "longrope").

transformers takes them from the longest sequence of a forward, and "dynamic" from the longest that it has ever met. So
one long sequence would change the numbers of all others. Here each sequence has those of its own length, as in
transformers when it is alone.

Dimensions: `R` rows, `L` places of a row, `C` ranks that share them, `D` the angles of a place.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mrl.engine.fsdp.blocks import blocks_of
from mrl.engine.fsdp.checks import length_dependent_positions
from mrl.errors import ModelError


@dataclasses.dataclass(frozen=True)
class LengthDependentRotary:
    """The rotary modules of a model that follow the length of a sequence."""

    kind: str
    limit: int  # the tokens up to which their numbers are the same for all sequences
    modules: tuple[nn.Module, ...]

    @contextlib.contextmanager
    def by_lengths(self, lengths: Tensor) -> Iterator[None]:
        """Gives each place the angles of its own sequence, inside the context.

        lengths: [R, L/C], on the host: the length of the place's sequence, at least 1.
        """
        # one length for all sequences up to the limit, each length beyond
        of_place = lengths.clamp(min=min(self.limit, int(lengths.max())))
        groups = [(length, of_place == length) for length in of_place.unique().tolist()]
        for module in self.modules:
            module.forward = functools.partial(_forward_by_length, module, groups)
        try:
            yield
        finally:
            for module in self.modules:
                del module.forward

    def check(self, longest: int, what: str) -> None:
        """Raises ModelError if the longest sequence is above the limit. what: the part that does not follow it."""
        if longest > self.limit:
            raise ModelError(
                f"a sequence of {longest} tokens is above the {self.limit} up to which the rotary embedding "
                f'"{self.kind}" of the model is the same for all, and {what} beyond; give at most {self.limit}, or use '
                "another model"
            )


def length_dependent_rotary(hf: nn.Module, raw: Mapping[str, Any]) -> LengthDependentRotary | None:
    """Returns those of `hf`, made from the config.json `raw`, or None. Raises ModelError if they are not marked."""
    found = length_dependent_positions(raw)
    if found is None:
        return None
    kind, limit = found
    modules = tuple(module for module in hf.modules() if _follows(getattr(module, "rope_type", None)))  # noqa: B009
    # what a block computes is perhaps computed again in the backward pass, when the lengths are gone
    inside = {id(module) for block in blocks_of(hf) for module in block.modules()}
    if not modules or any(id(module) in inside for module in modules):
        raise ModelError(
            "config.json",
            why=f'the rotary embedding "{kind}" of a {hf.config.model_type!r} model is not one that backend fsdp knows',
            fix="use another model",
        )
    config = hf.config.get_text_config()
    return LengthDependentRotary(kind, config.max_position_embeddings if limit is None else limit, modules)


def _follows(rope_type: Any) -> bool:
    """Returns whether `rope_type`, a module's, follows the length. A mapping has one for each type of layer."""
    kinds = rope_type.values() if isinstance(rope_type, Mapping) else (rope_type,)
    return any(kind in ("dynamic", "longrope") for kind in kinds)


def _forward_by_length(
    module: nn.Module, groups: list[tuple[int, Tensor]], x: Tensor, position_ids: Tensor, **options: Any
) -> Any:
    """Runs a rotary module length by length, each from the state that the module was made with.

    Returns the module's tensors [R, L/C, D]. position_ids: [R, L/C], within its sequence.
    """
    result = None
    for length, places in groups:
        chosen = places.to(position_ids.device)
        table = type(module).forward(_fresh(module), x, torch.arange(length, device=x.device)[None], **options)
        at = position_ids.masked_fill(~chosen, 0)
        angles = tree_map(lambda t, at=at: t[0][at], table)
        if result is None:
            result = angles
        else:
            result = tree_map(lambda new, old, c=chosen: torch.where(c[..., None], new, old), angles, result)
    return result


def _fresh(module: nn.Module) -> nn.Module:
    """Returns a copy in the state that the module was made with. A forward may write the copy's buffers."""
    fresh = copy.copy(module)
    fresh._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
    return fresh
