"""What `engine.micro_batch.pad` and `engine.cuda_graphs` are refused with, by name."""

from __future__ import annotations

import re

import pytest
import torch

from mrl.config.schema import (
    EngineConfig,
    LoraConfig,
    MicroBatchConfig,
    MoEConfig,
    MTPConfig,
    ParallelConfig,
    TrainedModelConfig,
)
from mrl.engine.checks import Sequences
from mrl.engine.fsdp.checks import FSDPChecks
from mrl.engine.megatron.checks import MegatronChecks, choice_lines
from mrl.errors import ConfigError
from mrl.mcore_models import graph_limits
from mrl.mcore_models.layer_spec import LayerSpec
from mrl.ops import devices
from mrl.parallel import ParallelDims
from tests.engine import tiny

PADDED = MicroBatchConfig(tokens=64, pad=True)
SEQUENCES = Sequences(64, "data.max_length 64", packed=True, generated=False)
GRAPHS, PAD = "engine.cuda_graphs: value true ", "engine.micro_batch.pad: value true "

OF_KEYS = [
    ({"micro_batch": MicroBatchConfig(tokens=64)}, {}, GRAPHS + "needs micro-batches of one shape"),
    ({"parallel": ParallelConfig(pp=2)}, {}, GRAPHS + "is not for engine.parallel.pp 2; set that to 1"),
    ({"recompute": "full"}, {}, GRAPHS + "is not for engine.recompute full"),
    ({"offload": ("optimizer", "parameters", "gradients")}, {}, GRAPHS + "needs tensors that stay where they are, and engine.offload moves gradients and parameters"),
    ({"megatron": {"moe_router_fusion": 2}}, {}, "engine.megatron.moe_router_fusion: value 2 is of another type"),
    ({"micro_batch": MicroBatchConfig(tokens="auto", pad=True)}, {}, PAD + "pads every micro-batch to a number of tokens, and engine.micro_batch.tokens is auto"),
    ({"megatron": {"moe_router_fusion": True}}, {}, GRAPHS + "is not for engine.megatron.moe_router_fusion"),
    ({"megatron": {"overlap_grad_reduce": True}}, {}, GRAPHS + "is not for engine.megatron.overlap_grad_reduce"),
    ({}, {"lora": LoraConfig()}, GRAPHS + "is not for adapters"),
    ({}, {"mtp": MTPConfig()}, GRAPHS + "is not for MTP layers"),
    ({"micro_batch": MicroBatchConfig(pad=True)}, {}, PAD + "pads every micro-batch to a number of tokens, and there is none; set engine.micro_batch.tokens"),
    ({"megatron": {"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "cuda_graphs": False}, {}, PAD + "is not for engine.megatron.fp8"),
    ({"megatron": {"moe_expert_capacity_factor": 1.0}, "cuda_graphs": False}, {}, PAD + "pads with tokens that take places of experts"),
]  # fmt: skip


@pytest.mark.parametrize("engine, model, said", OF_KEYS)
def test_keys_that_do_not_go_together(engine, model, said):
    config = EngineConfig(**{"micro_batch": PADDED, "cuda_graphs": True} | engine)
    with pytest.raises(ConfigError, match="^" + re.escape(said)):
        MegatronChecks.check_config(TrainedModelConfig(path="folder", **model), config)


EXPERTS, ONE = "needs layers of experts that ask the host for nothing, and ", ParallelDims()
OF_MODELS = [
    ("deepseek_v3", {}, {}, ONE, "is not for latent attention"),
    ("qwen3_5", {}, {}, ONE, "is not for latent attention and gated delta nets"),
    ("qwen3", {"attention_dropout": 0.1}, {}, ONE, "draws no random numbers, and the model's config.json has a dropout"),
    ("gpt_oss", {}, {}, ONE, EXPERTS + "the model's have biases"),
    ("qwen3_moe", {}, {"moe": MoEConfig(grouped_mm=False)}, ONE, EXPERTS + "engine.moe.grouped_mm is false"),
    ("qwen3_moe", {}, {"layer_spec": "te"}, ONE, EXPERTS + "transformer-engine's do (engine.layer_spec is te)"),
    ("qwen3_moe", {}, {}, ParallelDims(2, tp=2, etp=2, sp=True), EXPERTS + "these are on 2 ranks (engine.parallel.etp is 2); set engine.parallel.etp to 1"),
]  # fmt: skip


@pytest.mark.parametrize("family, changes, engine, dims, said", OF_MODELS)
def test_models_and_layouts_that_are_not_captured(family, changes, engine, dims, said):
    config = EngineConfig(micro_batch=PADDED, cuda_graphs=True, **engine)
    with pytest.raises(ConfigError, match="^" + re.escape(GRAPHS + said)):
        MegatronChecks.check_model(config, dims, tiny.config_of(family, **changes).to_dict(), SEQUENCES)


@pytest.mark.parametrize(
    ("device", "has_gpu", "says"),
    [("cuda", False, "a GPU replays"), ("auto", True, "a GPU replays"), ("auto", False, "on a CPU nothing is captured"), ("cpu", True, "on a CPU nothing is captured")],
)  # fmt: skip
def test_on_a_cpu_nothing_is_captured(device, has_gpu, says, monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: has_gpu)
    engine = EngineConfig(micro_batch=PADDED, cuda_graphs=True, device=device)
    assert f"engine.cuda_graphs: {says}" in choice_lines(LayerSpec("local", "given"), engine, {})[-1]


def test_what_is_captured_passes():
    config = EngineConfig(
        micro_batch=PADDED,
        cuda_graphs=True,
        offload=("optimizer",),
        megatron={"bucket_size": 9, "apply_rope_fusion": True},
    )
    MegatronChecks.check_config(TrainedModelConfig(path="folder"), config)
    for family, dims in (
        ("qwen3", ParallelDims(2, tp=2)),
        ("qwen3_moe", ParallelDims(2, tp=2, sp=True)),
        ("mistral", ParallelDims()),
    ):
        MegatronChecks.check_model(config, dims, tiny.config_of(family).to_dict(), SEQUENCES)


def test_sequences_that_are_not_padded_to_one_size():
    model, pad = tiny.config_of("qwen3").to_dict(), EngineConfig(micro_batch=PADDED)
    for sequences, said in (
        (Sequences(65, "data.max_length", packed=True, generated=False), "engine.micro_batch.tokens: value 64 is less than 65 (data.max_length), and with engine.micro_batch.pad no micro-batch can have more; give at least 65"),
        (Sequences(64, "data.max_length", packed=False, generated=False), PAD + "needs packed micro-batches"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="^" + re.escape(said)):
            MegatronChecks.check_model(pad, ParallelDims(), model, sequences)


def test_layers_that_a_gpu_gets(monkeypatch):
    graph_limits.check_layers("local", torch.bfloat16, counts_stay=True)
    graph_limits.check_layers("te", torch.float32, counts_stay=True)
    for dtype, stay, why in (
        (torch.float32, True, "needs attention in one call"),
        (torch.bfloat16, False, "needs layers of experts"),
    ):
        with pytest.raises(ConfigError, match="^" + GRAPHS + why):
            graph_limits.check_layers("local", dtype, counts_stay=stay)
    with monkeypatch.context() as older, pytest.raises(ConfigError, match="^" + GRAPHS + "needs torch 2.13"):
        older.delattr(torch.autograd.graph, "set_override_stale_capture_stream")
        graph_limits.check_layers("te", torch.float32, counts_stay=True)
    model = TrainedModelConfig(path="folder", dtype="float32")
    given = model, EngineConfig(micro_batch=PADDED, cuda_graphs=True, layer_spec="local"), ParallelDims()
    MegatronChecks.check_here(*given, tiny.config_of("qwen3").to_dict())
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    with pytest.raises(ConfigError, match="^" + GRAPHS + "needs attention in one call"):
        MegatronChecks.check_here(*given, tiny.config_of("qwen3").to_dict())


@pytest.mark.parametrize(
    "engine, key", [({"micro_batch": PADDED}, "micro_batch.pad"), ({"cuda_graphs": True}, "cuda_graphs")]
)
def test_the_other_engine_has_neither(engine, key):
    with pytest.raises(
        ConfigError,
        match=rf"^engine\.{key}: value true is not supported by backend fsdp; leave it out, or choose another",
    ):
        FSDPChecks.check_config(TrainedModelConfig(path="folder"), EngineConfig(backend="fsdp", **engine))
