"""Which layer spec a model is built with: transformer-engine's fused modules (te), or those of any machine (local).

Parameters have other names under each (mrl/converters); a checkpoint has those of the local one under both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch

from mrl.errors import ConfigError
from mrl.mcore_models import platform
from mrl.mcore_models.te_limits import te_refuses, te_slows
from mrl.parallel import ParallelDims

KEY = "engine.layer_spec"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of model.dtype


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """The spec of a model, and what decided it, in words."""

    name: Literal["te", "local"]
    why: str

    def __str__(self) -> str:
        return f"{KEY}: {self.name} ({self.why})"


def choose(wanted: str, fields: Mapping[str, Any], dims: ParallelDims, *, dtype: torch.dtype) -> LayerSpec:
    """Returns the spec for a value of engine.layer_spec. fields: of megatron's configuration, as `fields_of` has them.

    Raises ConfigError where te is wanted and cannot be had, and where transformer-engine is installed and does not
    load: a run that was meant to use it shall not train slower without a word.
    """
    if wanted == "local":
        return LayerSpec("local", "as configured")
    absent, refusal = platform.without_transformer_engine(), te_refuses(fields, dims, dtype=dtype)
    slow = te_slows(fields, dims, dtype=dtype)
    slow = f"; {slow}" if slow is not None else ""
    if platform.does_not_load(absent):
        why = f"finds transformer-engine, which does not load ({absent})"
        raise ConfigError(KEY, wanted, why, "install it as docs/gpu.md says, or set local")
    if wanted == "te":
        if absent is not None:
            lacks = "a GPU, and torch sees none" if absent == platform.NO_GPU else f"transformer-engine, which {absent}"
            raise ConfigError(KEY, wanted, f"needs {lacks}", "set auto or local, or see docs/gpu.md")
        if refusal is not None:
            raise ConfigError(KEY, wanted, f"does not work here: transformer-engine {refusal}", "set auto or local")
        return LayerSpec("te", "as configured" + slow)
    if absent == platform.NO_GPU:
        where = "te" if refusal is None else f"local too, as transformer-engine {refusal}"
        return LayerSpec("local", f"{absent}; with one and transformer-engine it is {where}")
    if absent is not None:
        return LayerSpec("local", f"transformer-engine {absent}")
    if refusal is not None:
        return LayerSpec("local", f"transformer-engine {refusal}")
    return LayerSpec("te", "transformer-engine is installed, and there is a GPU" + slow)


def notes(spec: LayerSpec) -> list[str]:
    """Returns lines for the run's log: the choice, and packages that were meant to be used and are not."""
    lines, fault = [str(spec)], platform.without_apex()
    if platform.does_not_load(fault):
        lines.append(
            f"engine: apex is installed and not used, as it is not NVIDIA's or does not load ({fault}); uninstall it, "
            "or build NVIDIA's (docs/gpu.md)"
        )
    return lines
