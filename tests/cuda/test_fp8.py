"""FP8 as transformer-engine's own Python has it, without its kernels: which GPUs have a recipe, what a model is built as, in which
recipe a layer computes, and how far its linear layers come. No number is computed: docs/fp8.md."""

from __future__ import annotations

import pytest

from mrl.mcore_models.fp8 import RECIPES
from mrl.mcore_models.te_limits import GENERATIONS
from tests.cuda.models import fewer_experts
from tests.tiers import in_tiers, slow_but

DENSE, EXPERTS, LATENT = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"
CLASSES = {"tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling"}


def test_the_table_of_recipes_is_transformer_engines(te_worker):
    machines = [(capability, cuda) for capability in GENERATIONS for cuda in ((12, 8), (12, 9), (13, 0))]
    found = te_worker.call("tests.cuda.te_fp8:recipes", list(RECIPES), machines)
    ours = {name: (recipe.multiple, [recipe.runs_on(*each) for each in machines]) for name, recipe in RECIPES.items()}
    assert found == ours


CASES = in_tiers(
    [],
    [(DENSE, "mxfp8", (10, 0), {"tp": 2, "world": 2})],
    [
        (DENSE, "tensorwise", (9, 0), {}),
        (DENSE, "mxfp8", (10, 0), {"tp": 2, "world": 2}),
        (EXPERTS, "blockwise", (9, 0), {}),
        (LATENT, "mxfp8", (10, 0), {}),
        (DENSE, "blockwise", (9, 0), {"lora": True}),
    ],
)


@pytest.mark.parametrize("model, recipe, capability, how", CASES, ids=str)
def test_a_model_is_built_as_without_and_layers_compute_in_the_recipe(te_worker, model, recipe, capability, how):
    changes = fewer_experts(model, 16)
    call = ("tests.cuda.te_fp8:built", model)
    rest = {"layers": 2, "changes": changes, **how}
    plain = te_worker.call(*call, {}, capability, **rest)
    found = te_worker.call(*call, {"fp8": "hybrid", "fp8_recipe": recipe}, capability, **rest)
    assert found.parameters == plain.parameters == {"torch.bfloat16"}
    assert found.stored == plain.stored and len(found.stored) > 4
    assert found.context == (CLASSES[recipe], "none") and plain.context == ("none", "none")
    assert (found.multiple, plain.multiple) == (RECIPES[recipe].multiple, 1)
    experts = found.reached.pop("experts", None)
    assert experts == (("fused_multi_row_padding", "done") if model == EXPERTS else None)
    assert len(found.reached) >= 2 and found.reached.keys() == plain.reached.keys()
    for name, (fits, one_more) in found.reached.items():
        assert fits in ("quantize", "layernorm_fwd"), (name, fits)
        assert one_more.startswith("FP8 execution requires"), (name, one_more)
    assert found.reached["self_attention.linear_proj"][0] == "quantize"
    assert plain.reached["self_attention.linear_proj"] == ("generic_gemm", "generic_gemm")


@pytest.mark.parametrize(
    "recipe, capability",
    slow_but([("tensorwise", (9, 0))], [("tensorwise", (9, 0)), ("blockwise", (9, 0)), ("mxfp8", (10, 0))]),
)
def test_copies_of_weights_stay_as_they_are_and_leave_with_the_parameters(te_worker, recipe, capability):
    further = {"fp8": "hybrid", "fp8_recipe": recipe}
    found = te_worker.call("tests.cuda.te_fp8:copies_of_weights", DENSE, further, capability)
    assert len(found["linears"]) == 4 and set(found["linears"].values()) == {(True, 64, 64)}, found
    assert (found["inside"], found["after"], found["handed_over"]) == (4, 0, 0)


@pytest.mark.parametrize("recompute", in_tiers([], ["full"], ["full", "selective"]))
def test_recomputation_is_transformer_engines_in_fp8(te_worker, recompute):
    """Its checkpoint computes again with the recipe of the first pass; without FP8 megatron's own does."""
    further = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    found, plain = (te_worker.call("tests.cuda.te_fp8:recomputed", DENSE, given, recompute) for given in (further, {}))
    assert found[:2] == ["te_checkpoint", "checkpoint"] and found[2:] == [*plain[:1], *plain]
    assert "layernorm_fwd" in found[-1]
