"""Derived values and cross checks that pass; those that fail are in tests/bad_input/config_cases.py."""

from __future__ import annotations

import pytest

from mrl.config.checks import check_replicas, micro_batch_tokens, parallel_dims, smallest_world
from mrl.config.load import from_dict
from mrl.config.schema import ParallelConfig, SFTConfig
from mrl.engine.checks import Sequences
from mrl.engine.fsdp.checks import FSDPChecks
from mrl.engine.megatron.checks import MegatronChecks, check_counts
from mrl.errors import ConfigError, ModelError
from mrl.launch.preflight import choose_nproc
from mrl.parallel import ParallelDims
from mrl.weights.hf_config import normalize
from tests.bad_input.mistakes import MODEL, MOE
from tests.config.test_load import base


def check_world(config: SFTConfig, processes: int) -> ParallelDims:
    dims = parallel_dims(config.engine.parallel, processes)
    check_replicas(dims, "train.global_batch_size", config.train.global_batch_size)
    return dims


@pytest.mark.parametrize(
    ("parallel", "processes"),
    [
        ({}, 1), ({"tp": 2}, 2), ({"tp": 2, "pp": 2, "cp": 2}, 8), ({"pp": 2, "vpp": 2}, 2),
        ({"ep": 2}, 2), ({"ep": 4, "tp": 2}, 4), ({"ep": 2, "etp": 2, "tp": 2}, 4), ({"ep": 2, "pp": 2, "tp": 2}, 4),
        ({"ep": 3, "tp": 2}, 6),
    ],
)  # fmt: skip
def test_the_smallest_world_is_one_that_fits(parallel, processes):
    assert smallest_world(ParallelConfig(**parallel)) == processes
    config = from_dict(base(engine={"parallel": parallel}))
    dims = check_world(config, processes)
    assert dims.model_size * dims.dp == processes
    for fewer in range(1, processes):
        with pytest.raises(ConfigError):
            check_world(config, fewer)


def test_auto_and_null_degrees_are_resolved():
    dims = check_world(from_dict(base(engine={"parallel": {"tp": 2}})), 4)
    assert (dims.sp, dims.etp, dims.dp) == (True, 2, 2)
    dims = check_world(from_dict(base(engine={"parallel": {"tp": 2, "ep": 2, "sp": False}})), 4)
    assert (dims.sp, dims.etp, dims.edp) == (False, 1, 2)


@pytest.mark.parametrize(
    ("max_length", "micro_batch", "tokens"),
    [(64, {}, 4096), (8192, {}, 8192), (64, {"tokens": 64}, 64), (64, {"size": 2}, None)],
)
def test_micro_batch_tokens(max_length, micro_batch, tokens):
    config = from_dict(base(data={"max_length": max_length}, engine={"micro_batch": micro_batch}))
    assert micro_batch_tokens(config.engine.micro_batch, config.data.max_length) == tokens


@pytest.mark.parametrize(("train", "epochs"), [({}, 1.0), ({"epochs": 2}, 2.0), ({"steps": 3}, None)])
def test_length_of_the_run(train, epochs):
    assert from_dict(base(train=train)).train.resolved_epochs == epochs


@pytest.mark.parametrize(
    ("parallel", "processes"),
    [({"tp": 4}, 4), ({"tp": 8}, 8), ({"pp": 4}, 4), ({"pp": 3}, 3), ({"pp": 2, "vpp": 2}, 2), ({"cp": 2, "tp": 2}, 4)],
)
def test_layouts_of_a_dense_model(parallel, processes):
    """tp may be above the 2 key-value heads, and the layers need not divide evenly over the stages."""
    config = from_dict(base(engine={"parallel": parallel}))
    check_counts(config.engine, check_world(config, processes), normalize(MODEL))


@pytest.mark.parametrize("parallel", [{"ep": 2}, {"ep": 6}, {"ep": 2, "tp": 2}, {"ep": 2, "etp": 2, "tp": 2, "pp": 2}])
def test_layouts_of_an_moe_model(parallel):
    config = from_dict(base(engine={"parallel": parallel, "moe": {"aux_loss": 0.01, "z_loss": 0.001}}))
    check_counts(config.engine, check_world(config, smallest_world(config.engine.parallel)), normalize(MODEL | MOE))


def test_a_model_that_reads_images_needs_the_fsdp_backend():
    model = {"model_type": "qwen2_5_vl", "text_config": MODEL, "vision_config": {"depth": 2}}
    any_sequences = Sequences(8, "", packed=True, generated=False)
    config = from_dict(base())
    with pytest.raises(
        ModelError, match="'qwen2_5_vl' is not supported by the megatron engine; .* engine.backend=fsdp$"
    ):
        MegatronChecks.check_model(config.engine, check_world(config, 1), model, any_sequences)
    config = from_dict(base(engine={"backend": "fsdp"}))
    FSDPChecks.check_model(config.engine, check_world(config, 1), model, any_sequences)
    with pytest.raises(
        ConfigError, match=r"^engine.parallel.cp: value 3 does not divide the model's 8 attention heads"
    ):
        FSDPChecks.check_model(config.engine, parallel_dims(ParallelConfig(cp=3), 3), model, any_sequences)
    whole = {"model_type": "qwen3_5", "text_config": {**MODEL, "linear_num_key_heads": 2}}
    with pytest.raises(ConfigError, match=r"^engine.parallel.cp: value 4 .* 2 linear attention's key heads, .* 1, 2$"):
        FSDPChecks.check_model(config.engine, parallel_dims(ParallelConfig(cp=4), 4), whole, any_sequences)


def test_number_of_processes():
    assert choose_nproc(None, gpus=8, needed=2) == 8
    assert choose_nproc(None, gpus=0, needed=2) == 2
    assert choose_nproc(4, gpus=8, needed=2) == choose_nproc(4, gpus=0, needed=2) == 4
    with pytest.raises(ConfigError, match="--nproc: value 16 is above the 8 GPUs"):
        choose_nproc(16, gpus=8, needed=1)
    with pytest.raises(ConfigError, match="engine.parallel: the layout needs 4096 processes, and at most 1024"):
        choose_nproc(None, gpus=0, needed=4096)
    assert choose_nproc(None, gpus=0, needed=4096, here=False) == choose_nproc(4096, gpus=0, needed=1) == 4096


MUON = {"optimizer": {"name": "muon"}}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (MUON | {"engine": {"backend": "fsdp"}}, 'optimizer.name: value "muon" does not go with engine.backend fsdp, '),
        (MUON | {"model": {"path": "m", "lora": {"rank": 4}}}, 'optimizer.name: value "muon" does not go with model.lora: '),
        (MUON | {"engine": {"megatron": {"optimizer_cpu_offload": True}}}, "engine.megatron.optimizer_cpu_offload, which is of AdamW"),
        (MUON | {"engine": {"megatron": {"use_precision_aware_optimizer": True}}}, "use_precision_aware_optimizer, which is"),
        ({"optimizer": {"muon": {"momentum": 0.5}}}, "optimizer.muon.momentum: value 0.5 is not used by optimizer.name adamw; set"),
    ],
)  # fmt: skip
def test_what_muon_goes_with(sections, says):
    from_dict(base(**MUON))
    with pytest.raises(ConfigError) as refused:
        from_dict(base(**sections))
    assert says in str(refused.value) and "\n" not in str(refused.value)
