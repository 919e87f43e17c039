"""Which layouts `mrl plan --suggest` tries."""

from __future__ import annotations

import dataclasses

import pytest

from mrl.config.command import Part
from mrl.config.schema import EngineConfig, ModelConfig, OptimizerConfig
from mrl.errors import ConfigError
from mrl.parallel import ParallelDims
from mrl.plan.gpus import gpu_of
from mrl.plan.suggesting import candidates, lines, search, spread
from tests.cuda.models import COMMON, MODELS
from tests.engine import tiny

H100 = gpu_of("h100-80gb")
ROOM = H100.memory - 4 * 2**30


def tried(model: str, world_size: int, *, dtype: str = "bfloat16", room: int = ROOM) -> list[dict]:
    part = Part("", ModelConfig(path="none", dtype=dtype), EngineConfig(), "lm", OptimizerConfig(lr=1e-3),
                hf=COMMON | MODELS[model])  # fmt: skip
    return candidates(part, world_size, 4096, H100, room)


def test_a_dense_model_is_divided_least_first():
    found = tried("Qwen/Qwen3-8B", 8)
    assert found[0] == {}  # 8.2e9 parameters of 6 bytes and 12 / 8
    assert {"tp": 8} in found and {"tp": 2, "pp": 2, "vpp": 2} in found and {"pp": 8} in found
    assert not any("ep" in degrees or "cp" in degrees for degrees in found)


def test_experts_may_span_tensor_parallel_ranks():
    """The layout in which NVIDIA trains DeepSeek-V3 on 256 H100s (test_published.py): ep 32 on 32 ranks a stage, tp 8."""
    assert {"tp": 8, "pp": 8, "ep": 32, "etp": 1} in tried("deepseek-ai/DeepSeek-V3", 256)


def test_parameters_count_as_their_dtype_has_them():
    """On 8 ranks 2 + 4 + 12 / 8 bytes in bf16, 4 + 4 + 8 / 8 in fp32, which is its own master."""
    room = int(8.19e9 * 8)
    assert {} in tried("Qwen/Qwen3-8B", 8, room=room)
    assert {} not in tried("Qwen/Qwen3-8B", 8, room=room, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "recompute"), [("llama", "none"), pytest.param("qwen3_moe", "full", marks=pytest.mark.nightly)]
)
def test_a_chunk_is_measured_once_for_all_layouts_that_have_it(planner, tmp_path, family, recompute):
    """What it takes goes by its own layers, whatever stages and chunks there are beside it."""
    config = tiny.role(tiny.make_model(str(tmp_path), family, layers=8), backend="megatron", dtype="bfloat16")
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, recompute=recompute))
    layouts = [ParallelDims(8, tp=2, pp=pp, vpp=vpp, sp=True) for pp, vpp in [(2, 2), (4, 1), (2, 1), (4, 2)]]
    alone, together = planner.call("tests.plan.planned:chunks_of_layouts", config, layouts, [64, 32])
    assert alone == together


def test_the_most_divided_is_tried_too():
    assert spread(range(10), 10) == list(range(10))
    assert spread(range(100), 8) == [0, 1, 2, 3, 4, 35, 67, 99]


def test_a_model_that_no_layout_holds():
    assert tried("Qwen/Qwen3-8B", 2, room=2**30) == []
    said = list(lines([], "engine", [], 8, H100, 0, 0))
    assert (
        said[0].startswith("no layout of engine fits on 8 GPUs (h100-80gb): parameters,") and "0 layouts" not in said[0]
    )


def test_refusals_are_kept():
    def plan_of(overrides):
        raise ConfigError("engine.parallel", why=overrides[0])

    part = Part("", ModelConfig(path="none"), EngineConfig(), "lm", None)
    refused: list = []
    assert list(search(plan_of, part, [{"tp": 2}, {"tp": 4}], refused)) == []
    assert [str(error) for error in refused] == [
        "engine.parallel: engine.parallel={tp: 2}", "engine.parallel: engine.parallel={tp: 4}"
    ]  # fmt: skip
