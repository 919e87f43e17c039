"""Every micro-batch has an attention kernel of transformer-engine's on each generation of GPUs, or is refused by name.

transformer-engine is asked itself (te_attention.py), and mrl's own table (te_limits.py) says the same.
"""

from __future__ import annotations

import pytest

from mrl.mcore_models.te_limits import GENERATIONS
from tests.cuda.attention_cases import Layout
from tests.cuda.models import fewer_experts

GPUS = [(capability, flash_attn) for capability in GENERATIONS for flash_attn in (False, True)]
DENSE, WINDOWS, SINKS = "Qwen/Qwen3-8B", "mistralai/Mistral-7B-v0.1", "openai/gpt-oss-20b"
LATENT = "deepseek-ai/DeepSeek-V3"
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


@pytest.mark.parametrize(
    "off, wanted",
    [
        ((FLASH_OFF,), [("unfused", "unfused")] * 2 + FUSED),
        (("NVTE_FLASH_ATTN_V2",), [("unfused", "unfused")] * 2 + FUSED),
        ((FUSED_OFF,), [("unfused", "flash")] * 5),
        ((UNFUSED_OFF,), [(NONE, "flash")] * 2 + FUSED),
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
            assert result.reached == {kernel} and result.told is None and kernel in result.kernels, where
