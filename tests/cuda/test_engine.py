"""The Megatron engine on CUDA tensors that have no memory: published widths, every kind of layout, seen from one rank.

What must hold of each: it runs, nothing of the model or the optimizer is on the host, dtypes are as stated, and the host
waits for the GPU where the table of ceilings says and nowhere else.
"""

from __future__ import annotations

import re

import pytest

from tests.cuda.cases import Case
from tests.cuda.worker import Worker


@pytest.fixture(scope="module")
def worker():
    with Worker() as worker:
        yield worker


DENSE, MOE, LATENT = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"
SMALL = {"changes": {"num_experts": 16}, "layers": 2}

CASES = [
    Case(DENSE, layers=2),
    Case(DENSE, tp=2, pp=2, vpp=2, world=8, rank=5),
    Case(DENSE, tp=2, cp=2, world=8, recompute="full", layers=2),
    Case(MOE, world=8, rank=5, ep=4, tp=2, etp=1, **SMALL),
    Case(LATENT, world=2, tp=2, layers=2, changes={"n_routed_experts": 16, "first_k_dense_replace": 1}),
]

# Where the host may wait in a micro-batch's forward and backward, and how often; a layer of experts and each message
# between stages have their own. Anything else fails.
CEILINGS = {
    r"mrl/engine/megatron/pipeline.py totals __float__": 1,  # the loss, after the last micro-batch
    r"mrl/engine/megatron/engine.py most __int__": 1,
}
EXPERTS = {
    r"megatron/core/transformer/moe/moe_utils.py permute masked_select": 2,
    r"megatron/core/transformer/moe/token_dispatcher.py \w+ d2h_event.synchronize": 1,
}
STAGES = {
    r"megatron/core/pipeline_parallel/p2p_communication.py _communicate_shapes (tolist|torch.cuda.synchronize)": 4,
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_makes_an_update(worker, case):
    result = worker.call("tests.cuda.run:run", case)
    dtype = {"parameters": "cuda torch.bfloat16"}
    for kind, found in result.tensors.items():
        assert found == [dtype.get(kind, "cuda torch.float32")], kind
    assert result.parameters < result.after_init < result.peak
    layers = (case.layers or 0) * (2 if case.recompute == "full" else 1)
    ceilings = CEILINGS | {k: v * layers for k, v in EXPERTS.items()} | {k: v * case.vpp for k, v in STAGES.items()}
    for line, count in result.syncs.items():
        allowed = [most for pattern, most in ceilings.items() if re.fullmatch(pattern, line)]
        assert allowed and count <= allowed[0], f"{line} waits {count} times a micro-batch"
