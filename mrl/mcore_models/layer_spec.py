"""Chooses the layer spec of a model: transformer-engine's fused modules (te), or those of any machine (local).

Parameters have other names under each (mrl/weights); a checkpoint has those of the local one under both.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch

from mrl.errors import ConfigError
from mrl.mcore_models import platform
from mrl.mcore_models.te_limits import GENERATIONS, Gpu, disabled_switches, switches_of, te_refusal, te_warning
from mrl.mcore_models.versions import NOT_INSTALLED
from mrl.parallel import ParallelDims

KEY = "engine.layer_spec"
ATTENTION = "engine.attention"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of model.dtype


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Is the spec of a model, and its reason in words."""

    name: Literal["te", "local"]
    why: str

    def __str__(self) -> str:
        return f"{KEY}: {self.name} ({self.why})"


def choose(
    wanted: str, fields: Mapping[str, Any], dims: ParallelDims, *, dtype: torch.dtype, attention: str = "auto",
    elsewhere: bool = False,
) -> LayerSpec:  # fmt: skip
    """Returns the spec for a value of engine.layer_spec. fields: of megatron's configuration, as `fields_of` has them.

    attention: of engine.attention; naming a kernel of transformer-engine asks for te.

    elsewhere: the run may be for another machine (`--dry-run`), so te is not refused for want of a GPU here.

    Raises ConfigError if te is wanted and cannot be had. It also does so if transformer-engine is installed and does
    not load: a run that was meant to use it must not train slower in silence.
    """
    check_attention(attention, wanted)
    gpu = Gpu.here().with_attention(attention)
    if attention != "auto":
        try:
            return _chosen("te", fields, dims, dtype, gpu, elsewhere=elsewhere)
        except ConfigError as error:
            raise _refused_kernel(attention, error) from error
    return _chosen(wanted, fields, dims, dtype, gpu, elsewhere=elsewhere)


def wanted_spec(wanted: str, attention: str) -> str:
    """Returns the layer spec that engine.layer_spec (wanted) and engine.attention ask for together.

    A kernel of attention is one of transformer-engine's.
    """
    return wanted if attention == "auto" else "te"


def check_te(key: str, value: Any, layer_spec: str, why: str, dtype: torch.dtype) -> None:
    """Raises ConfigError if a key needs transformer-engine's layers in bfloat16 and the run has others.

    why: the reason for the choice of the spec.
    """
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(key, value, f"does not go with model.dtype {name}", "set bfloat16")
    check_te_layers(key, value, layer_spec, why)


def check_te_layers(key: str, value: Any, layer_spec: str, why: str) -> None:
    """Raises ConfigError if a key needs transformer-engine's layers and the run has others.

    why: the reason for the choice of the spec.
    """
    if layer_spec != "te":
        reason = f"needs the layers of transformer-engine, and engine.layer_spec is {layer_spec} ({why})"
        raise ConfigError(key, value, reason, "set that to te if it is installed, or leave this out")


def check_attention(attention: str, wanted: str) -> None:
    """Raises ConfigError if engine.attention contradicts engine.layer_spec or the environment."""
    if attention != "auto" and wanted == "local":
        why = "is a kernel of transformer-engine, and engine.layer_spec local has none of it"
        raise ConfigError(ATTENTION, attention, why, "set that to auto or te, or leave this out")
    for name, value in switches_of(attention).items():
        found = os.environ.get(name, value)
        if found.strip() != value:
            why = f"is {name}={value} for transformer-engine, and the environment has {name}={found}"
            raise ConfigError(ATTENTION, attention, why, "unset that, or leave this out")


def _refused_kernel(attention: str, error: ConfigError) -> ConfigError:
    """Returns the error for engine.attention. error: why there are no layers of transformer-engine."""
    why = error.why or ""
    if any(f"{name}={value}" in why for name, value in switches_of(attention).items()):  # which nobody has set
        why += ", as this key has it"
    return ConfigError(ATTENTION, attention, f"is for {KEY} te, which {why}", "leave it out")


def _chosen(
    wanted: str, fields: Mapping[str, Any], dims: ParallelDims, dtype: torch.dtype, gpu: Gpu, *, elsewhere: bool
) -> LayerSpec:
    if wanted == "local":
        return LayerSpec("local", "as configured")
    absent, against = platform.without_transformer_engine(), te_refusal(fields, dims, gpu, dtype=dtype)
    slow = te_warning(fields, dims, gpu, dtype=dtype)
    if platform.is_broken_package(absent):
        why = f"finds transformer-engine, which does not load ({absent})"
        raise ConfigError(KEY, wanted, why, "install it as docs/gpu.md says, or set local")
    if wanted == "te":
        return _as_wanted(absent, against, slow, elsewhere=elsewhere)
    if against is None and slow is not None:
        against = f"is not taken, as its {slow}"
    if absent == platform.NO_GPU:
        where = _on_gpus(fields, dims, dtype) if against is None else f"local too: transformer-engine {against}"
        return LayerSpec("local", f"{absent}; with one and transformer-engine it is {where}")
    if absent is not None:
        return LayerSpec("local", f"transformer-engine {absent}")
    if against is not None:
        return LayerSpec("local", f"transformer-engine {against}")
    return LayerSpec("te", "transformer-engine is installed, and there is a GPU")


def _on_gpus(fields: Mapping[str, Any], dims: ParallelDims, dtype: torch.dtype) -> str:
    """Returns "te", with the GPUs that need flash-attn 2 for it, and those with local all the same.

    It is for a machine without a GPU, and some GPU has te.
    """

    def is_te(**known: Any) -> bool:
        gpu = Gpu(**known, switched_off=disabled_switches())
        return not (te_refusal(fields, dims, gpu, dtype=dtype) or te_warning(fields, dims, gpu, dtype=dtype))

    never = {at: name for at, name in GENERATIONS.items() if not is_te(capability=at)}
    beside = [
        name
        for at, name in GENERATIONS.items()
        if at not in never and not is_te(capability=at, flash_attn=NOT_INSTALLED)
    ]
    cases = [(beside, "beside flash-attn 2"), (never.values(), "local too")]
    exceptions = "; ".join(f"{', '.join(names)}: {what}" for names, what in cases if names)
    return f"te ({exceptions})" if exceptions else "te"


def check_rules(
    fields: Mapping[str, Any], dims: ParallelDims, *, dtype: torch.dtype = torch.bfloat16, attention: str = "auto"
) -> None:
    """Raises ConfigError if transformer-engine refuses a model in a layout on any GPU.

    It serves runs that want te on a machine of unknown kind. Arguments are those of `choose`. If bfloat16 cannot have
    it, no dtype can.
    """
    refusal = te_refusal(fields, dims, Gpu(switched_off=disabled_switches(attention=attention)), dtype=dtype)
    if refusal is not None:
        raise _refused(refusal) if attention == "auto" else _refused_kernel(attention, _refused(refusal))


def _refused(refusal: str) -> ConfigError:
    return ConfigError(KEY, "te", f"does not work here: transformer-engine {refusal}", "set auto or local")


def _as_wanted(absent: str | None, refusal: str | None, slow: str | None, *, elsewhere: bool) -> LayerSpec:
    """Returns te, or raises. Arguments: why there is no transformer-engine here, why it would refuse, and be slow."""
    rules = "" if slow is None else f"; its {slow}; that of engine.layer_spec: local does not"
    if refusal is not None and (absent is None or absent == platform.NO_GPU and elsewhere):
        raise _refused(refusal)
    if absent == platform.NO_GPU and elsewhere:
        known = "by the table of docs/gpu.md some GPU has a kernel of it for this; which one was not tried"
        return LayerSpec("te", f"as configured; {absent}, and a run needs one and transformer-engine: {known}{rules}")
    if absent is not None:
        lacks = "a GPU, and torch sees none" if absent == platform.NO_GPU else f"transformer-engine, which {absent}"
        raise ConfigError(KEY, "te", f"needs {lacks}", "set auto or local, or see docs/gpu.md")
    return LayerSpec("te", f"as configured{rules}")


def notes(spec: LayerSpec) -> list[str]:
    """Returns lines for the run's log: the choice, and packages that were meant to be used and are not."""
    lines, fault = [str(spec)], platform.without_apex()
    if platform.is_broken_package(fault):
        lines.append(
            f"engine: apex is installed and not used, as it is not NVIDIA's or does not load ({fault}); uninstall it, "
            "or build NVIDIA's (docs/gpu.md)"
        )
    return lines
