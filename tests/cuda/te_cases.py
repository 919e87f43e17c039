"""Updates with transformer-engine's own modules on fake CUDA tensors: what is run, and what must come of it."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from tests.cuda.cases import (
    CORNERS,
    DELTA,
    DELTA_MOE,
    DENSE,
    EVERYTHING,
    GATED,
    GLM,
    LATENT,
    MOE,
    OF_EACH_FAMILY,
    SINKS,
    Case,
    Result,
    _case,
    ceilings,
)
from tests.cuda.models import MODELS, fewer_experts

Counts = collections.Counter[str]


@dataclasses.dataclass
class Kernels:
    """What was called of transformer-engine's kernels."""

    calls: Counts = dataclasses.field(default_factory=Counts)  # by name
    products: Counts = dataclasses.field(default_factory=Counts)  # of matrices: bfloat16, or the class in 8 bits
    # of those the gradients of weights that go to a buffer: its dtype, and whether each is added ("sum") or takes the
    # place of what was there ("over")
    summed: Counts = dataclasses.field(default_factory=Counts)
    overlaps: Counts = dataclasses.field(default_factory=Counts)  # products with communication beside: how, and which


@dataclasses.dataclass(frozen=True)
class Found:
    result: Result
    kernels: Kernels


RECIPES = {  # of engine.megatron.fp8_recipe: the class of its tensors, and a GPU that has it
    "tensorwise": ("Float8Tensor", (9, 0)),
    "blockwise": ("Float8BlockwiseQTensor", (9, 0)),
    "mxfp8": ("MXFP8Tensor", (10, 0)),
}


def te_case(model: str, recipe: str | None = None, **options: Any) -> Case:
    """Two micro-batches a call whose tokens no recipe takes without padding."""
    further = {"fp8": "hybrid", "fp8_recipe": recipe} if recipe else {}
    further |= options.pop("megatron", {})
    return _case(model, **{"spec": "te", "lengths": (700, 110), "megatron": further} | options)


def has_experts(model: str) -> bool:
    return any("experts" in key for key in MODELS[model])


def _with_every_key(model: str, recipe: str) -> Case:
    """All that goes together, in a step of two calls: beside what te has by itself (RoPE, gradients added by products, grouped
    products, permutations) router fusion, FP8, moments in bfloat16, both overlaps, recomputation, MTP layers."""
    experts = has_experts(model)
    return te_case(
        model, recipe, world=4, rank=1, tp=2, calls=2, recompute="selective", bf16_moments=True, router_losses=experts,
        mtp=model in (GLM, LATENT), megatron={"moe_router_fusion": True} if experts else {},
    )  # fmt: skip


FAMILIES = [model for model in MODELS if model != "meta-llama/Llama-3.2-1B"]  # as Llama-3.1-8B
OF_H100 = {DELTA: "tensorwise", DELTA_MOE: "blockwise"}  # heads of 256: cuDNN before 9.25 has no kernel on B200
EVERY_KEY = [_with_every_key(model, OF_H100.get(model, [*RECIPES][i % 3])) for i, model in enumerate(FAMILIES)]

PARTS = [  # what each recomputes alone
    te_case(model, recompute="selective", modules=(module,))
    for model, module in (
        (MOE, "moe"), (MOE, "moe_act"), (GATED, "shared_experts"), (LATENT, "shared_experts"), (LATENT, "mla_up_proj"),
        (DENSE, "mlp"), (LATENT, "layernorm"),
    )
]  # fmt: skip

OTHERS = [
    te_case(DENSE, world=2, rank=1, cp=2),
    te_case(DENSE, "blockwise", world=4, cp=2),
    te_case("mistralai/Mistral-7B-v0.1", world=2, cp=2, lengths=(5000, 229)),
    te_case(DENSE, "tensorwise", world=4, rank=3, pp=2, vpp=2, calls=2),
    te_case(GLM, "mxfp8", world=4, rank=2, pp=2, ep=2, mtp=True, detached=True),
    te_case(MOE, world=8, rank=5, tp=2, ep=4, etp=1, muon=True),
    te_case(MOE, "tensorwise", world=4, ep=2, lora=True),
    te_case(MOE, world=2, ep=2, grouped=True),
    te_case(MOE, "blockwise", optimizer_on_host=True, offload=("parameters", "gradients", "activations")),
    te_case(DENSE, world=2, tp=2, head="value", offload=EVERYTHING),
    te_case(LATENT, "blockwise", recompute="full"),
    te_case(
        MOE,
        changes=fewer_experts(MOE, 16),
        megatron={"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True},
    ),
    dataclasses.replace(
        EVERY_KEY[FAMILIES.index(LATENT)], changes=_case(LATENT).changes | {"q_lora_rank": None}, mtp=False
    ),
]

UNDER_BOTH = [  # of which docs/developers/gpu.md shows what an update takes under either spec
    case for case in (*OF_EACH_FAMILY, *CORNERS)
    if case.rank == case.world - 1 and case.world > 100 or case.model.startswith(("mistralai/Mixtral", "Qwen/Qwen2.5"))
]  # fmt: skip


def expected_kernels(case: Case) -> set[str]:
    """Names of those that an update calls, whatever its layout and recipe."""
    names = {"generic_gemm", "rmsnorm_fwd", "rmsnorm_bwd", "fused_attn_fwd", "fused_attn_bwd", "multi_tensor_l2norm"}
    if case.model not in (SINKS, LATENT):  # yarn, and latent attention, turn queries by other code
        names |= {"fused_rope_forward", "fused_rope_backward"}
    if has_experts(case.model) and not case.grouped:
        names |= {"te_general_grouped_gemm"}
    if case.megatron.get("moe_router_fusion"):
        names |= {"fused_topk_with_score_function_fwd", "fused_topk_with_score_function_bwd", "fused_moe_aux_loss_bwd"}
    if not case.optimizer_on_host:
        names |= {"multi_tensor_adam"}
    return names


def expected_moves(case: Case) -> set[str]:
    """Names of transformer-engine's operators that take rows to experts: they are sorted again where ranks share
    experts, or send them to each other."""
    if not has_experts(case.model):
        return set()
    alone = case.ep * (case.tp if case.etp is None else case.etp) == 1
    sorts = not alone and not case.megatron.get("moe_pad_expert_input_to_capacity")
    return {"permute_mask_map_fwd", "unpermute_mask_map_fwd"} | ({"chunk_sort_fwd"} if sorts else set())


CONDITIONAL = {
    "fused_rope_forward",
    "te_general_grouped_gemm",
    "fused_topk_with_score_function_fwd",
    "multi_tensor_adam",
}


def te_ceilings(case: Case) -> dict[str, float]:
    """As `ceilings`: no line of megatron waits in layers of experts, whose tokens are counted once a layer."""
    own = {line: most for line, most in ceilings(case).items() if not line.startswith("megatron/core/transformer/moe")}
    return own | {"transformer_engine/pytorch/utils.py _empty_tensor to_gpu": 1}  # kept for all layers, once a process


def te_step_ceilings(case: Case, updated: int) -> dict[str, float]:
    """transformer-engine's norm of gradients has one number of all parameters."""
    return {  # of megatron-core 0.16 and 0.19
        r"(megatron/core/optimizer/clip_grads.py get_grad_norm_fp32 item|mrl/engine/megatron/optim.py _norm_without __float__)":
            4 if case.detached else 2,
        "mrl/engine/megatron/rounded_adam.py step (cpu|to_gpu)": updated if case.optimizer_on_host else 0,
    }  # fmt: skip
