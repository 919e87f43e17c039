"""What is planned is what a real run takes, on CPUs: state to the byte on every rank, activations within a tenth."""

from __future__ import annotations

import json

import pytest

from mrl.config.schema import FSDPConfig, LoraConfig
from mrl.parallel import ParallelDims
from mrl.weights.rules import padded_vocab
from tests.cuda.cases import DELTA, DELTA_MOE, Case
from tests.cuda.test_engine import DENSE, MOE, NARROW
from tests.engine import harness, tiny
from tests.tiers import nightly_but

FEW = NARROW | {"num_experts": 8, "num_experts_per_tok": 2}
LATENT = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4096,
    "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "first_k_dense_replace": 1, "head_dim": 16,
}  # fmt: skip
SMALL = NARROW | {
    "full_attention_interval": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
CASES = [
    Case(DENSE, world=2, tp=2, changes=NARROW),
    Case(DENSE, world=4, pp=2, changes=NARROW),
    Case(MOE, world=2, pp=2, vpp=2, micro_batches=6, grouped=True, changes=FEW),
    Case(DENSE, world=4, pp=4, micro_batches=6, changes=NARROW),
    Case(DENSE, world=2, cp=2, changes=NARROW),
    Case(DENSE, world=4, changes=NARROW | {"vocab_size": 4001}),  # shards of uneven content
    Case(DENSE, recompute="full", changes=NARROW),
    Case(DENSE, world=2, tp=2, sp=False, recompute="selective", changes=NARROW),
    Case(DENSE, world=2, head="value", changes=NARROW),
    Case(DENSE, world=2, dtype="float32", changes=NARROW),
    Case("meta-llama/Llama-3.2-1B", world=2, tp=2, lora=True, changes=NARROW),
    Case(MOE, world=4, tp=2, ep=2, etp=1, changes=FEW),
    # on a CPU torch has no kernel for values of another width than keys
    Case("deepseek-ai/DeepSeek-V3", world=2, ep=2, changes=LATENT),
    Case("deepseek-ai/DeepSeek-V3", world=2, pp=2, mtp=True, changes=LATENT),
    Case(DENSE, world=2, bf16_moments=True, changes=NARROW),
    Case(DELTA, world=2, pp=2, layers=4, changes=SMALL),
    Case(DELTA, world=2, tp=2, layers=4, recompute="selective", modules=("core_attn",), changes=SMALL),
    Case(DELTA, world=2, cp=2, layers=2, changes=SMALL),
    Case(DELTA_MOE, world=2, ep=2, layers=2, changes=SMALL | {"num_experts": 8, "num_experts_per_tok": 2}),
    Case(DENSE, world=2, pp=2, ids=512, micro_batches=6, changes=NARROW),  # half as much as all else
]


LORA = {"lora": LoraConfig(rank=3)}
IN_CI = [CASES[2], CASES[10], CASES[13], CASES[15]]  # of two ranks; `make test-nightly` runs them all


@pytest.mark.slow
@pytest.mark.parametrize("case", nightly_but(IN_CI, CASES), ids=str)
def test_a_plan_is_what_a_run_takes(planner, case):
    [real] = harness.run_world(case.world, [harness.Case("tests.cuda.update:on_cpu", {"case": case})])
    planned, measured = planner.call("tests.plan.planned:held", case), real.get()
    for rank, (expected, found) in enumerate(zip(measured, planned, strict=True)):
        for kind in ("parameters", "gradients", "optimizer"):
            assert found[kind] == expected.held[kind], f"{kind} of rank {rank}"
        if case.dtype == "float32":  # a GPU has other kernels than a CPU then, of attention and of norms
            continue
        if case.ep == 1:
            assert found["activations"] == pytest.approx(expected.activations, rel=0.1), f"activations of rank {rank}"
    if case.dtype == "float32":
        return
    # an untrained router gives experts unequal numbers of tokens: together they are those of the plan
    totals = [sum(one.activations for one in measured), sum(one["activations"] for one in planned)]
    assert totals[0] == pytest.approx(totals[1], rel=0.1)


def test_grouped_products_have_the_flops_of_one_after_another(planner):
    one_by_one, grouped = (
        planner.call("tests.plan.planned:held", Case(MOE, world=2, ep=2, grouped=on, changes=FEW))[0]["flops"]
        for on in (False, True)
    )
    assert one_by_one == grouped and all(min(of) > 0 for of in grouped)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "options"),
    nightly_but([(2, {})], [(2, {}), (4, {"fsdp": FSDPConfig(replicate=2), "dtype": "bfloat16", "model": LORA})]),
    ids=["uneven shards", "two copies, adapters"],
)
def test_what_backend_fsdp_holds(planner, tmp_path, world, options):
    """Weights with their padding, gradients and both moments of every rank, to the byte."""
    config = tiny.role(tiny.make_model(str(tmp_path), "llama", vocab=257), **options)
    found = planner.call("tests.plan.planned:sharded", config, world)
    [real] = harness.run_world(world, [harness.Case("tests.plan.recorded:sharded", {"config": config})])
    assert found == real.get()


def test_ends_of_a_pipeline_sum_the_gradient_of_a_tied_embedding(planner, tmp_path):
    config = tiny.role(tiny.make_model(str(tmp_path), "llama", tied=True), backend="megatron")
    found = planner.call("tests.plan.planned:tied_gradients", config, ParallelDims(4, tp=2, pp=2))
    hf = json.loads((tmp_path / "config.json").read_text())
    assert found == [4 * padded_vocab(hf["vocab_size"], 2) // 2 * hf["hidden_size"]] * 2
