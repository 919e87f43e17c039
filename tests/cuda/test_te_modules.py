"""transformer-engine's own modules, without its C++: names, shapes, norms, adapters and checkpoints of every family.

Each model is built twice, of transformer-engine's modules and of the local spec's. The families' tables name every
parameter of both; what mrl and megatron know a parameter by is the same; and so is every entry of a checkpoint, so that
one of either spec goes on under the other. What the modules compute is not seen here: tests/engine/test_te_like.py.
"""

from __future__ import annotations

import pytest

from tests.cuda.models import MODELS, fewer_experts

FURTHER = {  # beside fewer experts: a dense layer before those, and other values that such a model can have
    "Qwen/Qwen3-30B-A3B": {"mlp_only_layers": [0]},
    "zai-org/GLM-4.5-Air": {"use_qk_norm": True},
    "deepseek-ai/DeepSeek-V3": {"first_k_dense_replace": 1, "rms_norm_eps": 1e-5},
}
SMALLER = {
    model: fewer_experts(model, 16 if model == "deepseek-ai/DeepSeek-V3" else 8) | FURTHER.get(model, {})
    for model in MODELS
    if model != "meta-llama/Llama-3.2-1B"  # as Llama-3.1-8B
}
WITHOUT_EXPERTS = ("Qwen/Qwen1.5-MoE-A2.7B", "openai/gpt-oss-20b")  # of which peft's "all-linear" takes no experts
EXPERTS, DENSE = {"rank": 3, "world": 4, "tp": 2, "ep": 2}, {"rank": 3, "world": 4, "tp": 2, "pp": 2}
FAST = {("Qwen/Qwen3-8B", False), ("Qwen/Qwen3-30B-A3B", True), ("deepseek-ai/DeepSeek-V3", False),
        ("openai/gpt-oss-20b", False)}  # fmt: skip
CASES = [
    pytest.param(
        model, lora, id=model.split("/")[1] + " lora" * lora, marks=() if (model, lora) in FAST else pytest.mark.slow
    )
    for lora in (False, True)
    for model in SMALLER
]


@pytest.mark.parametrize("model, lora", CASES)
def test_both_specs_hold_the_same(te_worker, model, lora):
    """Trap 10: a parameter that is not marked as a part is left out of the gradient's norm."""
    changes = SMALLER[model]
    experts = any("experts" in name for name in changes)
    layout = EXPERTS if experts else DENSE
    te, local = te_worker.call("tests.cuda.te_modules:both", model, layers=2, lora=lora, changes=changes, **layout)
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
