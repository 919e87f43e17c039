"""Published recipes, which run on the GPUs that they name, come out as fitting; reported out-of-memory errors do not.

They are of other trainers on the same megatron-core, with transformer-engine's layers. Recipes in FP8 and with what mrl
has no key for (optimizer states in bf16, offload of activations) are left out.
"""

from __future__ import annotations

import pytest

from tests.cuda.models import MODELS, _sizes
from tests.tiers import nightly_but

LLAMA_8B = {"model_type": "llama", **_sizes(4096, 14336, 32, 32, 8, 128256)}
LLAMA_70B = {"model_type": "llama", **_sizes(8192, 28672, 80, 64, 8, 128256)}
LLAMA_405B = {"model_type": "llama", **_sizes(16384, 53248, 126, 128, 8, 128256)}
QWEN_30B_A3B = MODELS["Qwen/Qwen3-30B-A3B"]
DEEPSEEK = MODELS["deepseek-ai/DeepSeek-V3"]

BRIDGE, NEMO = "Megatron-Bridge, perf_recipes/llama/h100", "NeMo-RL, examples/configs/recipes/llm"
FITS = {  # name: (model, GPUs, tokens, batch, engine.parallel, engine.recompute)
    f"{BRIDGE}/llama3.py, 8B SFT": (LLAMA_8B, 8, 4096, 32, "{}", "none"),
    f"{BRIDGE}/llama3.py, 70B pre-training": (LLAMA_70B, 64, 8192, 256, "{tp: 4, pp: 4, vpp: 5, cp: 2}", "none"),
    f"{BRIDGE}/llama3.py, 70B SFT": (LLAMA_70B, 32, 4096, 32, "{tp: 4, pp: 4, vpp: 5}", "none"),
    f"{BRIDGE}/llama31.py, 405B pre-training": (LLAMA_405B, 1024, 8192, 1536, "{tp: 8, pp: 8, cp: 2}", "none"),
    f"{NEMO}/dpo-llama3.1-8b-instruct-4n8g-megatrontp2pp2-quick.yaml": (
        LLAMA_8B, 32, 2048, 256, "{tp: 2, pp: 2}", "none"),
    f"{NEMO}/grpo-qwen3-30ba3b-8n8g-megatron.yaml": (
        QWEN_30B_A3B, 64, 4096, 2048, "{tp: 4, pp: 4, ep: 4, etp: 1}", "none"),
    f"{NEMO}/grpo-dapomath17k-dsv3-megatron.yaml": (
        DEEPSEEK, 256, 16384, 512, "{tp: 8, pp: 8, cp: 4, ep: 32, etp: 1}", "full"),
    "verl#1867, DeepSeek-V3 on 512 GPUs": (DEEPSEEK, 512, 6144, 512, "{pp: 16, ep: 32}", "full"),
}  # fmt: skip
TOO_MUCH = {
    "Megatron-LM#2762, Qwen3-30B-A3B on one node of 8 H100, out of memory at micro-batch size 1": (
        QWEN_30B_A3B, 8, 4096, 64, "{ep: 8}", "none"),
    "verl#3019, DeepSeek-V3 on 96 GPUs, which needs its optimizer on the host": (
        DEEPSEEK, 96, 6144, 96, "{pp: 12, ep: 8}", "full"),
}  # fmt: skip

IN_CI = [next(iter(FITS)), next(iter(TOO_MUCH))]


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but(IN_CI, [*FITS, *TOO_MUCH]))
def test_what_others_published(planner, name, tmp_path):
    model, gpus, length, batch, parallel, recompute = (FITS | TOO_MUCH)[name]
    words = [f"data.max_length={length}", f"train.global_batch_size={batch}", f"engine.parallel={parallel}",
             f"engine.recompute={recompute}"]  # fmt: skip
    _, total, gradients, room = planner.call(
        "tests.plan.planned:published", model, words, gpus, "h100-80gb", str(tmp_path)
    )
    # NVIDIA's recipes sum gradients in bfloat16 (grad_reduce_in_fp32: false), of which mrl keeps twice the bytes
    theirs = total - gradients / 2 if name.startswith((BRIDGE, NEMO)) else total
    assert (theirs <= room) is (name in FITS), f"{theirs:.1f} of {room:.1f} GiB"
