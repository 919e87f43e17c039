"""Tensor-parallel communication beside products: what is taken, and the line that is said of the rest."""

from __future__ import annotations

import dataclasses
import re

import pytest

from mrl.config.schema import EngineConfig, LoraConfig, MicroBatchConfig, ModelConfig, MTPConfig, TrainedModelConfig
from mrl.engine.checks import Sequences
from mrl.engine.megatron.checks import MegatronChecks
from mrl.errors import ConfigError
from mrl.mcore_models import userbuffers
from mrl.mcore_models.megatron_fields import check
from mrl.mcore_models.userbuffers import WITH_OVERLAP, BufferShape
from mrl.parallel import ParallelDims
from mrl.weights.families import fields_of
from mrl.weights.hf_config import normalize
from tests.cuda.models import COMMON, MODELS

ON = {"tp_comm_overlap": True}
ENGINE = EngineConfig(megatron=ON, micro_batch=MicroBatchConfig(tokens=1001))
DIMS = ParallelDims(8, tp=2, cp=2, sp=True)
DENSE, MODEL = fields_of(normalize(COMMON | MODELS["Qwen/Qwen3-8B"])), ModelConfig(path="none")
MOST = {"longest": 1001, "key": "data.max_length 1001", "packed": True}


def says(message, function, *args, at="engine.megatron.tp_comm_overlap", **more):
    with pytest.raises(ConfigError) as refused:
        function(*args, **more)
    assert re.fullmatch(f"{at}: value {message}", str(refused.value)), str(refused.value)


def test_fields_that_go_together():
    for given in (ON, ON | dict.fromkeys(WITH_OVERLAP[:-1], True) | {"tp_comm_bootstrap_backend": "gloo"}):
        check(given)
        userbuffers.check_fields(given)
    userbuffers.check_fields({"fp8": "hybrid", "fp8_recipe": "tensorwise", "tp_comm_overlap": False})
    for given in ({"tp_comm_overlap": False}, {}):
        says("true is read with engine.megatron.tp_comm_overlap alone; set that to true, or leave this out",
             userbuffers.check_fields, given | {"tp_comm_bulk_dgrad": True}, at="engine.megatron.tp_comm_bulk_dgrad")  # fmt: skip
    for given, why in (
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "has buffers of bfloat16 here, and engine.megatron.fp8 is set"),
        ({"moe_expert_capacity_factor": 1.0}, "pads with tokens that take places of experts, which .* makes few"),
        ({"moe_shared_expert_overlap": True}, "needs one queue to the GPU, and .* several"),
    ):
        says(f"true {why}; leave out one of them", userbuffers.check_fields, ON | given)


def test_configs_that_have_it():
    userbuffers.check_config(MODEL, ENGINE)
    userbuffers.check_config(dataclasses.replace(MODEL, lora=LoraConfig()), EngineConfig())
    for micro_batch in (MicroBatchConfig(), MicroBatchConfig(size=1), MicroBatchConfig(tokens="auto")):
        says("true needs micro-batches of one size, .*; set engine.micro_batch.tokens to a number, and no engine.micro_batch.size",
             userbuffers.check_config, MODEL, dataclasses.replace(ENGINE, micro_batch=micro_batch))  # fmt: skip
    says("true is not for adapters: .*; leave it out",
         userbuffers.check_config, dataclasses.replace(MODEL, lora=LoraConfig()), ENGINE)  # fmt: skip
    says("true is not for MTP layers, .*; leave out one of them",
         userbuffers.check_config, TrainedModelConfig(path="none", mtp=MTPConfig()), ENGINE)  # fmt: skip


@pytest.mark.parametrize(
    "model",
    [name for name in MODELS if not name.startswith("deepseek-ai/")] + [pytest.param(None, id="another engine")],
)
def test_published_models_have_it(model):
    engine = ENGINE if model else EngineConfig()
    fields = fields_of(normalize(COMMON | MODELS[model or "deepseek-ai/DeepSeek-V3"]))
    userbuffers.check_model(engine, fields, DIMS if model else ParallelDims(), **MOST)


def test_models_layouts_and_sequences_that_have_not():
    refused = [
        ({"dims": ParallelDims(2, tp=2)}, "overlaps what sequence parallelism sends; leave engine.parallel.sp at auto, .*"),
        ({"dims": ParallelDims(6, tp=3, sp=True)}, "is for 2, 4 or 8 tensor-parallel ranks, and engine.parallel.tp is 3; set one of them there"),
        ({"packed": False}, "needs packed micro-batches, of one size each; set data.packing to true, or leave this out"),
        ({"fields": fields_of(normalize(COMMON | MODELS["deepseek-ai/DeepSeek-V3"]))}, "is not for latent attention: .*; leave it out"),
        ({"fields": DENSE | {"hidden_size": 80}}, "takes hidden sizes that are multiples of 32, and 80 is none; leave it out"),
    ]  # fmt: skip
    for changed, message in refused:
        given = {"fields": DENSE, "dims": DIMS} | MOST | changed
        says(f"true {message}", userbuffers.check_model, ENGINE, **given)


@pytest.mark.parametrize("more, most", [({}, 524284), ({"tp_comm_overlap_rs_dgrad": True}, 349524)], ids=str)
def test_buffers_whose_offsets_transformer_engine_cannot_count_are_refused(more, most):
    """With 4096 columns and cp2 524,288 places are 2^31 bytes of each rank; a ring has half as much beside."""
    says(
        rf"600000 makes a buffer of [23]\.\d GiB, and engine.megatron.tp_comm_overlap takes less than 2; give at most {most}",
        check_tokens, 600000, more, at="engine.micro_batch.tokens",
    )  # fmt: skip
    check_tokens(most, more)
    with pytest.raises(ConfigError, match=r"makes a buffer of 2\.0 GiB"):
        check_tokens(most + 4, more)


def check_tokens(tokens, more):
    engine = dataclasses.replace(ENGINE, megatron=ON | more, micro_batch=MicroBatchConfig(tokens=tokens))
    userbuffers.check_model(engine, DENSE, DIMS, **MOST)


def test_ranks_of_several_machines_are_refused(monkeypatch):
    for here, tp in (("8", 8), ("8", 2), (None, 8)):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if here is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
        userbuffers.check_machine(tp)
    for here, tp in ((4, 8), (6, 4)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
        says(f"true needs tensor-parallel ranks that share a machine, and its {here} processes are no multiple of {tp}; set engine.parallel.tp .*",
             userbuffers.check_machine, tp)  # fmt: skip


def test_a_sequence_that_no_micro_batch_holds_is_refused_before_a_run():
    with pytest.raises(ConfigError) as refused:
        userbuffers.check_model(ENGINE, DENSE, DIMS, longest=1005, key="data.max_length 1005", packed=True)
    assert str(refused.value) == (
        "engine.micro_batch.tokens: value 1001 is less than 1005 (data.max_length 1005), and with "
        "engine.megatron.tp_comm_overlap no micro-batch can have more; give at least 1005"
    )


def test_a_run_asks_each_before_a_model_is_built():
    raw, fp8 = COMMON | MODELS["Qwen/Qwen3-8B"], ON | {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    says(
        "true is not for adapters: .*",
        MegatronChecks.check_config,
        dataclasses.replace(MODEL, lora=LoraConfig()),
        ENGINE,
    )
    says("true has buffers of bfloat16 here, .*", MegatronChecks.check_model, dataclasses.replace(ENGINE, megatron=fp8), DIMS, raw,
         Sequences(1001, "data.max_length", packed=True, generated=False))  # fmt: skip
    local = dataclasses.replace(MODEL, dtype="bfloat16"), dataclasses.replace(ENGINE, layer_spec="local"), DIMS, raw
    for check_spec in (MegatronChecks.notes_on, MegatronChecks.check_here):
        says("true needs the layers of transformer-engine, .*", check_spec, *local)


def test_places_and_bytes():
    """Of 1001 tokens over two tensor- and two context-parallel ranks: places that both divide, each of two segments."""
    assert userbuffers.places_of(EngineConfig(), DIMS) is None
    assert userbuffers.places_of(ENGINE, DIMS) == 1004
    assert userbuffers.places_of(ENGINE, ParallelDims(8, tp=8, cp=1, sp=True)) == 1008
    assert BufferShape.of(EngineConfig(), 64, DIMS) is None
    plain = BufferShape.of(ENGINE, 64, DIMS)
    assert (plain.places, plain.nbytes) == (502, 12 * 502 * 64 * 2)
    in_chunks = dataclasses.replace(ENGINE, megatron=ON | {"tp_comm_overlap_rs_dgrad": True})
    ring = BufferShape.of(in_chunks, 64, DIMS)
    met_by_gloo = dataclasses.replace(ENGINE, megatron=ON | {"tp_comm_bootstrap_backend": "gloo"})
    by_gloo = BufferShape.of(met_by_gloo, 64, DIMS)
    assert by_gloo == plain != ring and by_gloo.bootstrap_backend == "gloo"
    assert (ring.nbytes, ring.largest, plain.largest) == (13 * 502 * 64 * 2, 3 * 502 * 64, 2 * 502 * 64)
    one = dataclasses.replace(in_chunks, megatron=in_chunks.megatron | {"tp_comm_overlap_disable_qkv": True})
    assert BufferShape.of(one, 64, DIMS).scattering == ("fc1",)
