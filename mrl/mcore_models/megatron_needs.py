"""Checks what a model, a layout and layers must have for fields of `engine.megatron` to be read, and to work.

megatron-core takes most fields in silence if nothing reads them, and some even if they break. If they are not refused
before a run starts, a key has no effect, or a worker ends in a traceback.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mrl.errors import ConfigError
from mrl.mcore_models import fp8, megatron_fields, platform, userbuffers
from mrl.mcore_models.layer_spec import check_te_layers
from mrl.mcore_models.megatron_fields import KEY
from mrl.parallel import ParallelDims

Given = Mapping[str, Any]
"""`engine.megatron`: fields and their values."""

Met = Callable[[Given, Mapping[str, Any]], object]
"""Whether something is there, by `engine.megatron` and the model."""

DISPATCHER, FACTOR, PLACES = (
    "moe_token_dispatcher_type", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity",
)  # fmt: skip
MAX_TOKENS = 2**17
"""The tokens of a micro-batch on a rank up to which `_check_places` looks."""


@dataclasses.dataclass(frozen=True)
class Need:
    """Is a condition that fields need to be read at all."""

    fields: str  # names, with spaces between
    words: str  # of the error, behind the value
    is_met: Met


NEEDS = (
    Need(
        """moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_num_sms
        moe_flex_dispatcher_num_sms moe_permute_fusion moe_router_fusion moe_input_jitter_eps
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_router_force_biased
        moe_router_force_load_balancing moe_shared_expert_overlap""",
        "is for a model with experts, and this has none",
        lambda given, model: "num_moe_experts" in model,
    ),
    Need(
        "moe_shared_expert_overlap",
        "is for a model with shared experts, and this has none",
        lambda given, model: model.get("moe_shared_expert_intermediate_size"),
    ),
    Need(
        "moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_num_sms moe_flex_dispatcher_num_sms",
        f"is read with {KEY}.{DISPATCHER} flex alone",
        lambda given, model: given.get(DISPATCHER) == "flex",
    ),
    Need(
        "moe_token_drop_policy", f"is read with {KEY}.{FACTOR} alone",
        lambda given, model: given.get(FACTOR) is not None,
    ),
)  # fmt: skip
"""A field may stand in several; the first unmet one is named in the error. Fields that one layout cannot use (of
pipeline stages, of replicas) are not here: another layout of the same config can."""

LAYER_FIELDS = frozenset({"fused_residual_rmsnorm", "symmetric_ar_type", "disable_parameter_transpose_cache"})
"""Fields that the layers of transformer-engine alone read."""

KERNEL_FIELDS = frozenset({"apply_rope_fusion", "moe_permute_fusion", "moe_router_fusion"})
"""Fields for kernels of transformer-engine, which megatron-core's layers have, too."""

MIN_VALUES = {FACTOR: 0.0, "bucket_size": 0, "microbatch_group_size_per_vp_stage": 0}
"""Numbers, and what they have to be above: megatron-core takes others, and nothing would be as asked."""


def check(given: Given, model: Mapping[str, Any], dims: ParallelDims) -> None:
    """Raises ConfigError for fields and values that do not go with one another, with a model or a layout.

    model: fields of megatron's configuration, as `fields_of` has them.
    """
    megatron_fields.check(given)
    fp8.check_fields(given)
    userbuffers.check_fields(given)
    for name, value in given.items():
        key = f"{KEY}.{name}"
        if name in MIN_VALUES and value is not None and not MIN_VALUES[name] < value < math.inf:
            raise ConfigError(key, value, f"is no number above {MIN_VALUES[name]:g}", "give one, or leave it out")
        if value in (None, False, "alltoall"):  # which is not to have it
            continue
        for need in NEEDS:
            if name in need.fields.split() and not need.is_met(given, model):
                raise ConfigError(key, value, need.words, "leave it out")
    if "num_moe_experts" in model:
        _check_ways(given, dims)
        _check_places(given, model, dims)


def check_spec(given: Given, layer_spec: str, why: str, dtype: torch.dtype, *, elsewhere: str | None = None) -> None:
    """Raises ConfigError if fields are for other layers, or for another machine. why: the reason for the choice of the
    spec.

    elsewhere: `engine.layer_spec` of a run that may be for a machine with a GPU, if this one has none.
    """
    for name in ("fp8", userbuffers.FIELD):
        if given.get(name):
            if dtype != torch.bfloat16:
                reason = f"does not go with model.dtype {str(dtype).removeprefix('torch.')}"
                raise ConfigError(f"{KEY}.{name}", given[name], reason, "set bfloat16")
            check_te_layers(f"{KEY}.{name}", given[name], layer_spec, why)
    absent = platform.without_transformer_engine()
    unknown = elsewhere is not None and absent == platform.NO_GPU
    for name, value in sorted(given.items()):
        if not value:
            continue
        if name in LAYER_FIELDS and not (unknown and elsewhere != "local"):
            check_te_layers(f"{KEY}.{name}", value, layer_spec, why)
        if name in KERNEL_FIELDS and absent is not None and not unknown:
            needed = platform.missing(absent)
            raise ConfigError(f"{KEY}.{name}", value, f"needs {needed}", "leave it out, or see docs/gpu.md")


def _check_ways(given: Given, dims: ParallelDims) -> None:
    """Refuses ways of tokens to experts that a layout does not have."""
    way, backend = given.get(DISPATCHER), given.get("moe_flex_dispatcher_backend", "deepep")
    if way == "allgather" and dims.experts_span_replicas:
        why = f"gathers as many tokens from each rank, and replicas have different numbers ({dims.describe()})"
        raise ConfigError(f"{KEY}.{DISPATCHER}", way, why, "leave it out: experts go by all-to-all")
    if way == "flex" and dims.ep * dims.etp == 1:
        why = f"is for experts on several ranks, and here each has all of them ({dims.describe()})"
        raise ConfigError(f"{KEY}.{DISPATCHER}", way, why, "leave it out, or set engine.parallel.ep")
    if way == "flex" and backend != "deepep":
        why = "is no way to experts that mrl has: DeepEP is"
        raise ConfigError(f"{KEY}.moe_flex_dispatcher_backend", backend, why, "give deepep, or leave it out")


def _check_places(given: Given, model: Mapping[str, Any], dims: ParallelDims) -> None:
    """Refuses `moe_pad_expert_input_to_capacity` if it cannot work.

    Each expert then has a number of slots that follows from the rank's own number of tokens. The all-to-all of these
    has the same size on every rank. megatron-core counts slots in floating point and does not bound them by the tokens.
    """
    if not given.get(PLACES):
        return
    key, factor = f"{KEY}.{PLACES}", given.get(FACTOR)
    if dims.experts_span_replicas:
        why = f"is not for experts on ranks of several replicas, whose numbers of tokens differ ({dims.describe()})"
        raise ConfigError(
            key, True, why, "set engine.parallel.ep and etp so that their product divides tp, or leave it out"
        )
    if factor is None:
        raise ConfigError(key, True, "needs a number of places", f"set {KEY}.{FACTOR}, too")
    experts, chosen = model["num_moe_experts"], model["moe_router_topk"]
    if any(math.ceil(n * chosen / experts * factor) > n for n in range(1, MAX_TOKENS)):
        why = f"gives an expert more places than there are tokens, of {experts} experts and {chosen} for each token"
        most = f"give at most {experts / chosen:g}, or a little less where that many is rounded up"
        raise ConfigError(f"{KEY}.{FACTOR}", factor, why, most)
