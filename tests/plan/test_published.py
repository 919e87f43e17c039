"""Published recipes, which run on the GPUs that they name, come out as fitting; what is reported not to fit does not.

They are of other trainers on the same megatron-core, with transformer-engine's layers. A row has where it stands, and
docs/evidence/plan.md has the table: what was planned of each, and what it takes. Recipes in FP8 and with what mrl has
no key for (optimizer states in bf16, offload of activations) are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.models import MODELS, _sizes
from tests.tiers import nightly_but

LLAMA2_7B = {"model_type": "llama", **_sizes(4096, 11008, 32, 32, 32, 32000)}
LLAMA_8B = {"model_type": "llama", **_sizes(4096, 14336, 32, 32, 8, 128256)}
LLAMA_70B = {"model_type": "llama", **_sizes(8192, 28672, 80, 64, 8, 128256)}
LLAMA_405B = {"model_type": "llama", **_sizes(16384, 53248, 126, 128, 8, 128256)}
QWEN_30B_A3B = MODELS["Qwen/Qwen3-30B-A3B"]
DEEPSEEK = MODELS["deepseek-ai/DeepSeek-V3"]

GITHUB = "https://github.com"
LLAMA3 = (
    f"{GITHUB}/NVIDIA-NeMo/Megatron-Bridge/blob/71eaba6f38a619579211703decf4f5fd37c787fa"
    "/src/megatron/bridge/perf_recipes/llama/h100/llama3.py"
)
LLAMA31 = (
    f"{GITHUB}/NVIDIA-NeMo/Megatron-Bridge/blob/7096520644ed5d4ae2b59d593d9ae0ce8b3644d7"
    "/src/megatron/bridge/perf_recipes/llama/h100/llama31.py"
)
NEMO_RL = f"{GITHUB}/NVIDIA-NeMo/RL/blob"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What somebody ran, or could not."""

    name: str
    source: str  # its address, with the commit where it is a file
    model: Mapping[str, Any]  # what config.json says
    gpus: int
    words: Sequence[str]  # overrides of the config below
    gpu: str = "h100-80gb"
    command: str = "sft"
    fits: bool = True
    bf16_gradients: bool = False  # grad_reduce_in_fp32 is false there; mrl keeps fp32, twice the bytes


def sft(length: int, batch: int, parallel: str, recompute: str = "none", size: int = 1) -> tuple[str, ...]:
    return (
        f"data.max_length={length}", f"train.global_batch_size={batch}", f"engine.parallel={parallel}",
        f"engine.recompute={recompute}", f"engine.micro_batch={{size: {size}}}",
    )  # fmt: skip


def grpo(length: int, prompts: int, samples: int, parallel: str, recompute: str, fraction: float, tp: int
         ) -> tuple[str, ...]:  # fmt: skip
    """Of mini-batches of 512 sequences, with vLLM inside the trainer and a reference."""
    return (
        f"data.max_prompt_length={length // 2}", f"rollout.max_new_tokens={length // 2}",
        f"rollout.samples_per_prompt={samples}", f"train.global_batch_size={prompts * samples}",
        "algorithm.mini_batch_size=512", f"train.steps={prompts * samples // 512}",
        f"actor.engine.parallel={parallel}", f"actor.engine.recompute={recompute}",
        f"rollout.server={{memory_fraction: {fraction}, tp: {tp}}}",
    )  # fmt: skip


RECIPES = [
    Recipe("Megatron-Bridge, Llama 3 8B SFT", LLAMA3, LLAMA_8B, 8, sft(4096, 32, "{}"), bf16_gradients=True),
    Recipe("Megatron-Bridge, Llama 3 70B pre-training", LLAMA3, LLAMA_70B, 64,
           sft(8192, 256, "{tp: 4, pp: 4, vpp: 5, cp: 2}"), bf16_gradients=True),
    Recipe("Megatron-Bridge, Llama 3 70B SFT", LLAMA3, LLAMA_70B, 32, sft(4096, 32, "{tp: 4, pp: 4, vpp: 5}"),
           bf16_gradients=True),
    Recipe("Megatron-Bridge, Llama 3.1 405B pre-training", LLAMA31, LLAMA_405B, 1024,
           sft(8192, 1536, "{tp: 8, pp: 8, vpp: 8, cp: 2}"), bf16_gradients=True),
    Recipe("NeMo-RL, Llama 3.1 8B DPO",
           f"{NEMO_RL}/02f26e8ba1ad1f34d331daf8dd0c2839bb5b6d69/examples/configs/recipes/llm/"
           "dpo-llama3.1-8b-instruct-4n8g-megatrontp2pp2-quick.yaml",
           LLAMA_8B, 32, sft(2048, 512, "{tp: 2, pp: 2}", size=2), bf16_gradients=True),
    Recipe("NeMo-RL, Qwen3-30B-A3B GRPO",
           f"{NEMO_RL}/1c4a1f5cc47b185354631cc67aa78c1395f79819/examples/configs/recipes/llm/"
           "grpo-qwen3-30ba3b-8n8g-megatron.yaml",
           QWEN_30B_A3B, 64, grpo(4096, 64, 32, "{tp: 4, pp: 4, ep: 4, etp: 1}", "none", 0.7, 4), command="ppo",
           bf16_gradients=True),
    Recipe("NeMo-RL, DeepSeek-V3 GRPO",
           f"{NEMO_RL}/05234541dcfd1b33e51555bf16273cab83a64b78/examples/configs/recipes/llm/"
           "grpo-dapomath17k-dsv3-megatron.yaml",
           DEEPSEEK, 256, grpo(16384, 32, 16, "{tp: 8, pp: 8, cp: 4, ep: 32, etp: 1}", "full", 0.6, 32), command="ppo",
           bf16_gradients=True),
    Recipe("verl, DeepSeek-V3 GRPO", f"{GITHUB}/verl-project/verl/pull/1867", DEEPSEEK, 512,
           sft(6144, 512, "{pp: 16, ep: 32}", "full")),
    Recipe("Megatron-LM, Qwen3-30B-A3B on one node", f"{GITHUB}/NVIDIA/Megatron-LM/issues/2762", QWEN_30B_A3B, 8,
           sft(4096, 64, "{ep: 8}"), fits=False),
    Recipe("Megatron-LM, Llama 2 7B at 64 tokens", f"{GITHUB}/NVIDIA/Megatron-LM/issues/606", LLAMA2_7B, 8,
           sft(64, 8, "{}"), gpu="a100-40gb", fits=False),
    Recipe("verl, DeepSeek-V3 GRPO with Adam on the GPUs", f"{GITHUB}/verl-project/verl/pull/3019", DEEPSEEK, 96,
           sft(6144, 96, "{pp: 12, ep: 8}", "full"), fits=False),
]  # fmt: skip

IN_CI = [RECIPES[0], RECIPES[8]]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", nightly_but(IN_CI, RECIPES), ids=lambda recipe: recipe.name)
def test_what_others_published(planner, recipe, tmp_path):
    words = list(recipe.words)
    _, uses, room = planner.call(
        "tests.plan.planned:published", recipe.model, recipe.command, words, recipe.gpus, recipe.gpu, str(tmp_path)
    )
    theirs = max(total - gradients / 2 if recipe.bf16_gradients else total for total, gradients in uses)
    assert (theirs <= room) is recipe.fits, f"{theirs:.1f} of {room:.1f} GiB"
    page = (Path(__file__).parents[2] / "docs" / "evidence" / "plan.md").read_text()
    verdict = "yes" if recipe.fits else "no"
    gpus = f"{recipe.gpus:,}" + ("" if recipe.gpu == "h100-80gb" else f" {recipe.gpu}")
    row = f"| {recipe.name} | {gpus} | {theirs:.1f} | {verdict} | [source]({recipe.source}) |"
    assert row in page, f"docs/evidence/plan.md has no such row: {row}"
