"""transformer-engine's own Python on each generation of GPUs, without its C++.

Attention: every micro-batch has a kernel, or is refused by name; transformer-engine is asked itself (te_attention.py), and
mrl's own table (te_limits.py) says the same. Modules: names, shapes, norms, adapters and checkpoints of every family. Each
model is built twice, of transformer-engine's modules and of the local spec's. The families' tables name every parameter of
both; what mrl and megatron know a parameter by is the same; and so is every entry of a checkpoint, so that one of either
spec goes on under the other. What the modules compute is not seen here: tests/engine/test_te_like.py.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata

import pytest

from mrl.mcore_models.te_limits import GENERATIONS
from tests.cuda.attention_cases import Layout
from tests.cuda.cases import as_shown, row
from tests.cuda.models import MODELS, fewer_experts
from tests.cuda.te_cases import (
    CONDITIONAL,
    EVERY_KEY,
    FAMILIES,
    OTHERS,
    PARTS,
    RECIPES,
    UNDER_BOTH,
    expected_kernels,
    expected_moves,
    has_experts,
    te_ceilings,
    te_step_ceilings,
)
from tests.cuda.test_engine import PAGE, beyond, dtypes_are_as_stated
from tests.tiers import nightly_but, slow_but

GPUS = [(capability, flash_attn) for capability in GENERATIONS for flash_attn in (False, True)]
DENSE, WINDOWS, SINKS = "Qwen/Qwen3-8B", "mistralai/Mistral-7B-v0.1", "openai/gpt-oss-20b"
MOE, LATENT = "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"
FEW_EXPERTS = fewer_experts(SINKS, 4)
NONE = "no kernel"
WRONG = "flash, of other tokens"
"""transformer-engine comes to flash-attn 2 and hands it the whole buffer of queries beside offsets that leave out half of
every sequence: its docstring of AttnFuncWithCPAndKVAllGather says that this kernel cannot serve it, and no check does."""

# What is reached without and with flash-attn, on sm80, sm89, sm90, sm100, sm120.
FUSED = [("fused", "fused")] * 3
TABLE = [
    (Layout(DENSE), [("unfused", "flash")] * 2 + FUSED),
    (Layout(DENSE, cp=2), [(NONE, "flash")] * 2 + FUSED),
    (Layout(WINDOWS), [("unfused", "flash")] * 2 + FUSED),
    (Layout(WINDOWS, cp=2), [(NONE, "flash")] * 2 + FUSED),
    (Layout(WINDOWS, tp=8, cp=2), [(NONE, WRONG)] * 2 + FUSED),  # a key-value head a rank: all_gather
    (Layout(SINKS, changes=FEW_EXPERTS), [("unfused", "unfused")] * 2 + FUSED),
    (Layout(SINKS, cp=2, changes=FEW_EXPERTS), [(NONE, NONE)] * 2 + FUSED),
    (Layout(SINKS, tp=8, cp=2, changes=FEW_EXPERTS), [(NONE, NONE)] * 5),
    (
        Layout(LATENT, changes={"first_k_dense_replace": 2}),
        [("unfused", "flash")] * 2 + FUSED[:2] + [("unfused", "flash")],
    ),
    (Layout(LATENT, cp=2, changes={"first_k_dense_replace": 2}), [(NONE, "flash")] * 2 + FUSED[:2] + [(NONE, "flash")]),
    (Layout(DENSE, dtype="float32"), [("unfused", "unfused")] * 5),
    (Layout(DENSE, cp=2, dtype="float32"), [(NONE, NONE)] * 5),
]


@pytest.mark.parametrize("layout, wanted", TABLE, ids=lambda value: str(value) if isinstance(value, Layout) else "")
def test_transformer_engine_and_the_table_choose_alike(te_worker, layout, wanted):
    _compare(te_worker, layout, wanted)


FLASH_OFF, FUSED_OFF, UNFUSED_OFF = "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"


@pytest.mark.slow
@pytest.mark.parametrize(
    "off, wanted",
    [
        ((FLASH_OFF,), [("unfused", "unfused")] * 2 + FUSED),
        ((FUSED_OFF,), [("unfused", "flash")] * 5),
        ((FUSED_OFF, UNFUSED_OFF), [(NONE, "flash")] * 5),  # engine.attention: flash
        ((FLASH_OFF, UNFUSED_OFF), [(NONE, NONE)] * 2 + FUSED),
        ((FLASH_OFF, FUSED_OFF, UNFUSED_OFF), [(NONE, NONE)] * 5),
    ],
)
def test_variables_switch_kernels_off(te_worker, off, wanted):
    _compare(te_worker, Layout(DENSE), wanted, off)


def _compare(te_worker, layout, wanted, off=()):
    found = te_worker.call("tests.cuda.te_attention:ask", layout, GPUS, off)
    wanted = [kernel for pair in wanted for kernel in pair]
    for (capability, flash_attn), result, kernel in zip(GPUS, found, wanted, strict=True):
        where = f"sm{capability[0]}{capability[1]} {'with' if flash_attn else 'without'} flash-attn: {result}"
        if kernel == WRONG:
            assert result.reached == {"flash"} and not result.kernels and result.told, where
        elif kernel == NONE:
            assert not result.reached & {"flash", "fused", "unfused"} and not result.kernels and result.told, where
        else:
            assert result.reached == {kernel} and result.told is None and result.kernels[0] == kernel, where


# -- modules ----------------------------------------------------------------------------------------------------------

FURTHER = {  # beside fewer experts: a dense layer before those, and other values that such a model can have
    "Qwen/Qwen3-30B-A3B": {"mlp_only_layers": [0]},
    "zai-org/GLM-4.5-Air": {"use_qk_norm": True},
    "deepseek-ai/DeepSeek-V3": {"first_k_dense_replace": 1, "rms_norm_eps": 1e-5},
    "Qwen/Qwen3.5-9B": {"full_attention_interval": 2},
    "Qwen/Qwen3.5-35B-A3B": {"full_attention_interval": 2},
}
SMALLER = {
    model: fewer_experts(model, 16 if model == "deepseek-ai/DeepSeek-V3" else 8) | FURTHER.get(model, {})
    for model in MODELS
    if model != "meta-llama/Llama-3.2-1B"  # as Llama-3.1-8B
}
WITHOUT_EXPERTS = (
    "Qwen/Qwen1.5-MoE-A2.7B",
    "openai/gpt-oss-20b",
    "Qwen/Qwen3.5-35B-A3B",
)  # of which peft's "all-linear" takes no experts
WITH_MTP = ("zai-org/GLM-4.5-Air", "deepseek-ai/DeepSeek-V3")
EXPERTS, NO_EXPERTS = {"rank": 3, "world": 4, "tp": 2, "ep": 2}, {"rank": 3, "world": 4, "tp": 2, "pp": 2}
FAST = {("Qwen/Qwen3.5-9B", False), ("Qwen/Qwen3-30B-A3B", True), ("deepseek-ai/DeepSeek-V3", False),
        ("openai/gpt-oss-20b", False)}  # fmt: skip
CASES = [
    pytest.param(
        model, lora, id=model.split("/")[1] + " lora" * lora, marks=() if (model, lora) in FAST else pytest.mark.nightly
    )
    for lora in (False, True)
    for model in SMALLER
]


@pytest.mark.parametrize("model, lora", CASES)
def test_both_specs_hold_the_same(te_worker, model, lora):
    """Trap 10: a parameter that is not marked as a part is left out of the gradient's norm."""
    changes = SMALLER[model]
    experts = any("experts" in name for name in changes)
    layout = EXPERTS if experts else NO_EXPERTS
    mtp = model in WITH_MTP and not lora
    te, local = te_worker.call(
        "tests.cuda.te_modules:both", model, layers=2, lora=lora, changes=changes, mtp=mtp, **layout
    )
    assert mtp == any(name.startswith("model.layers.2.") for names, *_ in te.parameters for name in names)
    assert (te.spec, local.spec) == ("te", "local")
    theirs = {name for package, names in te.modules.items() if "transformer_engine" in package for name in names}
    assert {"TERowParallelLinear", "TEDotProductAttention"} <= theirs
    assert ("TEColumnParallelGroupedLinear" in theirs) == experts
    assert te.parameters.keys() == local.parameters.keys()
    different = {name: (p, local.parameters[name]) for name, p in te.parameters.items() if p != local.parameters[name]}
    assert not different
    assert {p.device for p in te.parameters.values()} == {"cuda"}
    assert te.stored == local.stored and len(te.stored) > 4
    adapted = {expert is not None for _, _, expert, tensor in te.parameters if tensor is not None}
    assert adapted == ({False} | ({True} if experts and model not in WITHOUT_EXPERTS else set()) if lora else set())


# -- AdamW ------------------------------------------------------------------------------------------------------------

AWARE = {"use_precision_aware_optimizer": True}
BOTH = AWARE | {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}


ADAM = [
    ({}, "transformer_engine FusedAdam", ("cuda float32", "cuda float32", "cuda float32")),
    (AWARE | {"exp_avg_dtype": "bfloat16"}, "transformer_engine FusedAdam", ("cuda float32", "cuda bfloat16", "cuda float32")),
    (BOTH, "transformer_engine FusedAdam", ("cuda float32", "cuda bfloat16", "cuda bfloat16")),
    (BOTH | {"optimizer_cpu_offload": True}, "mrl HostAdamW", ("cpu float32", "cpu bfloat16", "cpu bfloat16")),
]  # fmt: skip


@pytest.mark.parametrize("further, of, places", nightly_but(ADAM[1::2], ADAM))
def test_masters_and_moments_are_where_and_as_stated(te_worker, further, of, places):
    """FusedAdam keeps no masters of its own, beside megatron's, and takes plain gradients."""
    found = te_worker.call("tests.cuda.te_modules:adam", DENSE, further, layers=2)
    assert found["class"] == of
    assert tuple(found[name] for name in ("masters", "exp_avg", "exp_avg_sq")) == tuple([place] for place in places)
    if of.endswith("FusedAdam"):
        dtypes = {
            f"{name}_dtype": f"torch.{place.split()[1]}"
            for name, place in zip(("exp_avg", "exp_avg_sq"), places[1:], strict=True)
        }
        assert found["fused"] == dtypes | {"master_weights": "False", "use_decoupled_grad": "False", "adam_w_mode": "1"}


# -- updates ----------------------------------------------------------------------------------------------------------

QUICK = [EVERY_KEY[FAMILIES.index(MOE)]]
IN_CI = [*QUICK, EVERY_KEY[FAMILIES.index(LATENT)], PARTS[1]]
AT_NIGHT = [case for case in [*EVERY_KEY, *PARTS, *OTHERS] if case not in IN_CI]


@pytest.mark.parametrize("case", slow_but(QUICK, IN_CI) + nightly_but([], AT_NIGHT), ids=str)
def test_an_update_of_transformer_engines_modules(te_worker, case):
    """Its kernels are shapes alone (te_kernels.py). Gradients of weights are added to fp32 sums, which only the first
    micro-batch of a step may write over; under FP8 all products are of 8 bits; the host waits for less than with the
    local spec."""
    recipe = case.megatron.get("fp8_recipe")
    kind, capability = RECIPES[recipe] if recipe else ("bfloat16", (9, 0))
    found = te_worker.call("tests.cuda.te_update:update", case, capability)
    result, kernels = found.result, found.kernels
    dtypes_are_as_stated(case, result)
    wanted = expected_kernels(case)
    assert wanted <= kernels.calls.keys() and not (CONDITIONAL - wanted) & kernels.calls.keys()
    assert {name for name in result.of_te if name.endswith("_fwd")} == expected_moves(case)
    # in no FP8: MTP layers, and routers, whose products are transformer-engine's in megatron-core 0.19
    others = kernels.products.total() - kernels.products[kind]
    routers = 4 * case.layers * case.micro_batches * case.calls if has_experts(case.model) else 0
    assert kernels.products[kind] and (others <= routers or case.mtp), kernels.products
    fused = not case.lora and "activations" not in case.offload
    assert (kernels.summed["float32 sum"] > 0) == fused and kernels.summed.keys() <= (
        {"float32 sum", "float32 over"} if fused else {"bfloat16 over"}
    ), kernels.summed
    assert kernels.summed["float32 over"] * case.calls * case.micro_batches <= kernels.summed.total()
    waits = beyond(te_ceilings(case), result.syncs, "a micro-batch")
    assert not waits + beyond(te_step_ceilings(case, result.updated), result.step_syncs, "a step")
    if case.modules not in (None, ("moe_act",)):  # that one is megatron's own code
        kept = dataclasses.replace(case, recompute="none", modules=None)
        without = te_worker.call("tests.cuda.te_update:update", kept, capability)
        assert kernels.calls.total() > without.kernels.calls.total()


@pytest.mark.nightly
@pytest.mark.parametrize("case", UNDER_BOTH, ids=str)
def test_the_pages_rows_are_what_is_printed(te_worker, case):
    case = dataclasses.replace(as_shown(case), spec="te")
    found = row(case, te_worker.call("tests.cuda.te_update:update", case, (9, 0)).result)
    if importlib.metadata.version("megatron-core") != "0.16.1":  # its grouped GEMM and lists of gradients are others
        found = found.rpartition(" | ")[0]
    assert found in PAGE.read_text()
