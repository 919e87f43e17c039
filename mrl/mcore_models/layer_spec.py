"""Chooses the layer spec of a model: transformer-engine's fused modules (te), or those of any machine (local).

Parameters have other names under each (mrl/weights); a checkpoint has those of the local one under both.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch

from mrl.config.schema import EngineConfig
from mrl.errors import ConfigError
from mrl.mcore_models import platform
from mrl.mcore_models.layout import expert_sizes, experts_fit
from mrl.mcore_models.megatron_fields import TRANSFORMER_ENGINE_FIELDS
from mrl.mcore_models.te_limits import (
    GENERATIONS,
    AttentionShape,
    Gpu,
    disabled_switches,
    switches_of,
    te_refusal,
    te_warning,
)
from mrl.parallel import ParallelDims

KEY = "engine.layer_spec"
ATTENTION = "engine.attention"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of model.dtype
MOST_HIDDEN, MOST_WIDTH, MOST_A_TOKEN, FEWEST_EXPERTS = 1024, 768, 4, 32
"""The one model that was measured: an H100 trained it faster in local layers with grouped_mm, on one rank.

They reached 48,100 tokens/s, te 18,400. transformer-engine starts a product for each expert. So larger experts, or
fewer, may be faster under te."""
FASTER = f"an H100 trained {FEWEST_EXPERTS} experts of {MOST_HIDDEN:,} x {MOST_WIDTH} faster so"


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Is the spec of a model, and its reason in words."""

    name: Literal["te", "local"]
    why: str

    def __str__(self) -> str:
        return f"{KEY}: {self.name} ({self.why})"


def choose(
    engine: EngineConfig, fields: Mapping[str, Any], dims: ParallelDims, *, dtype: torch.dtype, lora: bool = False,
    elsewhere: bool = False, kept: str | None = None,
) -> LayerSpec:  # fmt: skip
    """Returns the spec for engine.layer_spec. fields: of megatron's configuration, as `fields_of` has them.

    Naming a kernel of transformer-engine in engine.attention asks for te. lora: the model has adapters.

    elsewhere: the run may be for another machine (`--dry-run`), so te is not refused for want of a GPU here.

    kept: of the checkpoint that the run resumes from; auto takes it if it can.

    Raises ConfigError if te is wanted and cannot be had. It also does so if transformer-engine is installed and does
    not load: a run that was meant to use it must not train slower in silence.
    """
    wanted, attention = wanted_spec(engine.layer_spec, engine.attention), engine.attention
    check_attention(attention, engine.layer_spec)
    gpu = dataclasses.replace(Gpu.here(), switched_off=disabled_switches(attention), by_key=attention != "auto")
    faster = kept != "te" and faster_locally(engine, fields, dims, dtype, lora=lora)
    if wanted == "auto" and kept == "local" and not _te_keys(engine):
        return LayerSpec("local", "as the checkpoint was trained")
    try:
        return _chosen(wanted, fields, dims, dtype, gpu, elsewhere=elsewhere, faster=faster)
    except ConfigError as error:
        if attention == "auto":
            raise
        raise _refused_kernel(attention, error) from error


def _te_keys(engine: EngineConfig) -> list[str]:
    """Returns the keys that are set and that local layers may not read."""
    keys = [f"engine.megatron.{name}" for name in sorted(TRANSFORMER_ENGINE_FIELDS) if engine.megatron.get(name)]
    return keys + ["engine.recompute_modules moe_act"] * ("moe_act" in (engine.recompute_modules or ()))


def faster_locally(
    engine: EngineConfig, fields: Mapping[str, Any], dims: ParallelDims, dtype: torch.dtype, *, lora: bool
) -> bool:
    """Returns whether the measurement covers a model, so that an H100 trains it faster in local layers."""
    if "num_moe_experts" not in fields or lora or dtype != torch.bfloat16 or engine.moe.grouped_mm is False:
        return False
    if _te_keys(engine) or any(value and name.startswith("moe_") for name, value in engine.megatron.items()):
        return False
    attention = AttentionShape.of(fields, dims)
    if attention.windowed or attention.sinks or attention.dropout or fields.get("multi_latent_attention"):
        return False
    if any(fields.get("linear_attention_freq") or ()) or fields.get("add_bias_linear"):
        return False
    hidden, width = expert_sizes(fields, dims)
    fit = experts_fit(fields, dims, dtype.itemsize) and hidden <= MOST_HIDDEN and width <= MOST_WIDTH
    few = fields["moe_router_topk"] <= MOST_A_TOKEN and fields["num_moe_experts"] >= FEWEST_EXPERTS
    return fit and few and dims.tp * dims.cp * dims.ep * dims.etp == 1


def takes_te(fields: Mapping[str, Any], dims: ParallelDims, gpu: Gpu, *, dtype: torch.dtype, faster: bool) -> bool:
    """Returns whether engine.layer_spec auto is te on a GPU with transformer-engine. faster: of `faster_locally`."""
    return _against_te(fields, dims, gpu, dtype, faster) is None


def _against_te(
    fields: Mapping[str, Any], dims: ParallelDims, gpu: Gpu, dtype: torch.dtype, faster: bool
) -> str | None:
    """Returns why auto leaves transformer-engine out on a GPU, behind its name; None if it does not."""
    slow = te_warning(fields, dims, gpu, dtype=dtype)
    refusal = te_refusal(fields, dims, gpu, dtype=dtype)
    if refusal is not None:
        return refusal
    if slow is not None:
        return f"is not taken, as its {slow}"
    if faster and gpu.capability is not None and gpu.capability[0] == 9:
        return f"is left out for local layers with grouped_mm: {FASTER}, and these are at most of this size"
    return None


def wanted_spec(wanted: str, attention: str) -> str:
    """Returns the layer spec that engine.layer_spec (wanted) and engine.attention ask for together.

    A kernel of attention is one of transformer-engine's.
    """
    return wanted if attention == "auto" else "te"


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
    return ConfigError(ATTENTION, attention, f"is for {KEY} te, which {error.why}", "leave it out")


def _chosen(
    wanted: str, fields: Mapping[str, Any], dims: ParallelDims, dtype: torch.dtype, gpu: Gpu, *, elsewhere: bool,
    faster: bool,
) -> LayerSpec:  # fmt: skip
    if wanted == "local":
        return LayerSpec("local", "as configured")
    absent = platform.without_transformer_engine()
    if platform.is_broken_package(absent):
        why = f"finds transformer-engine, which does not load ({absent})"
        raise ConfigError(KEY, wanted, why, "install it as docs/gpu-install.md says, or set local")
    if wanted == "te":
        slow, refusal = te_warning(fields, dims, gpu, dtype=dtype), te_refusal(fields, dims, gpu, dtype=dtype)
        return _as_wanted(absent, refusal, slow, elsewhere=elsewhere)
    if absent == platform.NO_GPU:
        taken = [
            name for at, name in GENERATIONS.items()
            if takes_te(fields, dims, dataclasses.replace(gpu, capability=at), dtype=dtype, faster=faster)
        ]  # fmt: skip
        against = _against_te(fields, dims, gpu, dtype, faster)
        where = f"te on {', '.join(taken)}" if taken else f"local too: transformer-engine {against}"
        return LayerSpec("local", f"{absent}; with one, transformer-engine and flash-attn 2 it is {where}")
    against = absent or _against_te(fields, dims, gpu, dtype, faster)
    if against is not None:
        return LayerSpec("local", f"transformer-engine {against}")
    return LayerSpec("te", "transformer-engine is installed, and there is a GPU")


def check_rules(
    fields: Mapping[str, Any], dims: ParallelDims, *, dtype: torch.dtype = torch.bfloat16, attention: str = "auto"
) -> None:
    """Raises ConfigError if transformer-engine refuses a model in a layout on any GPU.

    It serves runs that want te on a machine of unknown kind. Arguments are those of `choose`. If bfloat16 cannot have
    it, no dtype can.
    """
    gpu = Gpu(switched_off=disabled_switches(attention), by_key=attention != "auto")
    refusal = te_refusal(fields, dims, gpu, dtype=dtype)
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
        raise ConfigError(KEY, "te", f"needs {platform.missing(absent)}", "set auto or local, or see docs/gpu.md")
    return LayerSpec("te", f"as configured{rules}")


def notes(spec: LayerSpec) -> list[str]:
    """Returns lines for the run's log: the choice, and packages that were meant to be used and are not."""
    lines, fault = [str(spec)], platform.without_apex()
    if platform.is_broken_package(fault):
        lines.append(
            f"engine: apex is installed and not used, as it is not NVIDIA's or does not load ({fault}); uninstall it, "
            "or build NVIDIA's (docs/gpu-install.md)"
        )
    return lines
