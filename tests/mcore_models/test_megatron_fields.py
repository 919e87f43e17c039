"""`engine.megatron`: fields of the installed megatron-core by name, and what is refused."""

import dataclasses
import re

import pytest
import torch

from mrl.config.megatron_speed import REMOVED_FIELDS, ROUNDING
from mrl.errors import ConfigError
from mrl.mcore_models import cpu_stand_in, platform
from mrl.mcore_models.megatron_fields import (
    REFUSED_FIELDS,
    SET_BY_MRL,
    TRANSFORMER_ENGINE_FIELDS,
    check,
    fields,
    fields_of_kind,
)
from mrl.parallel import ParallelDims
from mrl.weights.hf_config import normalize
from tests.engine import tiny

cpu_stand_in.prepare()

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from mrl.mcore_models import build  # noqa: E402

AWARE = {"use_precision_aware_optimizer": True}
REVIEWED = frozenset("""
    apply_rope_fusion bias_activation_fusion bias_dropout_fusion fused_residual_rmsnorm gradient_accumulation_fusion
    activation_func_fp8_input_store clone_scatter_output_in_embedding deterministic_mode
    disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache symmetric_ar_type
    fp8 fp8_recipe first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 tp_only_amax_red
    moe_token_dispatcher_type moe_enable_deepep moe_deepep_num_sms moe_flex_dispatcher_backend
    moe_flex_dispatcher_num_sms moe_permute_fusion moe_router_fusion moe_shared_expert_overlap moe_input_jitter_eps
    moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_router_force_biased
    moe_router_force_load_balancing
    deallocate_pipeline_outputs microbatch_group_size_per_vp_stage overlap_p2p_comm_warmup_flush
    overlap_grad_reduce overlap_param_gather bucket_size pad_buckets_for_high_nccl_busbw
    reduce_scatter_with_fp32_accumulation check_for_nan_in_grad check_for_large_grads
    tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_overlap_disable_qkv
    tp_comm_overlap_disable_fc1 tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_bootstrap_backend
    apply_wd_to_qk_layernorm optimizer_cpu_offload use_precision_aware_optimizer exp_avg_dtype exp_avg_sq_dtype
""".split())  # fmt: skip  # noqa: SIM905
"""Fields of megatron-core 0.16.1 or 0.19.2 that code reads which mrl runs: by its source, of each."""

CLASSES = {"transformer": TransformerConfig, "ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}


@pytest.mark.parametrize("kind, made", CLASSES.items(), ids=CLASSES)
def test_the_source_names_the_fields_that_the_class_has(kind, made):
    named = {name for name, field in fields().items() if kind in field.kinds}
    assert named == {field.name for field in dataclasses.fields(made) if not field.name.startswith("_")}


@pytest.mark.parametrize(
    "given",
    [
        {"bucket_size": None}, {"bucket_size": 1000}, {"moe_input_jitter_eps": 1}, {"moe_input_jitter_eps": 0.5},
        {"apply_wd_to_qk_layernorm": True}, {"moe_token_dispatcher_type": "flex"},
        {"overlap_grad_reduce": True}, AWARE | {"exp_avg_dtype": "bfloat16"}, {"symmetric_ar_type": None},
    ],
    ids=str,
)  # fmt: skip
def test_values_of_the_type_are_taken(given):
    check(given)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"overlap_grad_reduc": True}, "overlap_grad_reduc: value true is for a field that megatron-core .* does not have; leave it out"),
        ({"hidden_size": 8}, "hidden_size: value 8 is for a field that mrl sets itself; the model's config.json has it"),
        ({"overlap_grad_reduce": 1}, "overlap_grad_reduce: value 1 is of another type than megatron-core has; give true or false"),
        ({"bucket_size": "much"}, '.*"much" is of another type .*; give a whole number, or null'),
        ({"main_params_dtype": "float16"}, ".* is for what mrl does not have: masters are fp32; leave it out"),
        ({"exp_avg_dtype": "bfloat16"}, ".* is read with engine.megatron.use_precision_aware_optimizer alone; set that"),
        (AWARE | {"exp_avg_sq_dtype": "uint8"}, "exp_avg_sq_dtype: value \"uint8\" is no dtype .*; give float32 or bfloat16"),
        ({"moe_token_dispatcher_type": "all"}, ".* give one of allgather, alltoall, flex"),
        ({"no_sync_func": "f"}, ".* is for a field that takes a Python object; leave it out"),
    ],
    ids=str,
)  # fmt: skip
def test_others_are_refused_in_one_line(given, message):
    with pytest.raises(ConfigError) as refused:
        check(given)
    assert re.fullmatch(f"engine.megatron.{message}.*", str(refused.value)), str(refused.value)


def test_every_field_that_is_taken_has_been_looked_at():
    """A new megatron-core brings fields: each is refused, or read by what mrl runs and added to the list."""
    open_to_yaml = {name for name, field in fields().items() if field.annotation is not None}
    assert open_to_yaml - set(SET_BY_MRL) - set(REFUSED_FIELDS) - REVIEWED == set()
    assert not REVIEWED & (set(SET_BY_MRL) | set(REFUSED_FIELDS))


LAYOUTS = (
    {},
    {"world_size": 4, "tp": 2, "pp": 2, "sp": True},
    {"world_size": 2, "pp": 2, "vpp": 2},
    {"world_size": 2, "cp": 2},
)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_what_mrl_sets_is_refused(family, monkeypatch):
    """A field that a config may set and mrl sets too would be one or the other without a word."""
    hf, given = normalize(tiny.config_of(family, layers=4).to_dict()), set()
    own = {field.name for made in (build.Config, build.LatentConfig) for field in dataclasses.fields(made)} - set(
        fields()
    )
    config_class = build.config_class

    def watched(made):
        given.update(made)
        return config_class(made)

    monkeypatch.setattr(build, "config_class", watched)
    for layout in LAYOUTS:
        for recompute in ("none", "full"):
            build.transformer_config(hf, ParallelDims(**layout), dtype=torch.bfloat16, recompute=recompute)
    # chosen, but left to the user; `fields` holds no fusion but the one that a family cannot have
    assert given - own - {"moe_token_dispatcher_type", "bias_activation_fusion"} <= set(SET_BY_MRL)


def test_a_resumed_run_may_change_no_field_that_is_set_elsewhere():
    refused = set(SET_BY_MRL) | set(REFUSED_FIELDS)
    assert set(REFUSED_FIELDS) >= REMOVED_FIELDS
    assert (
        not ROUNDING & refused and not TRANSFORMER_ENGINE_FIELDS & refused and not set(SET_BY_MRL) & set(REFUSED_FIELDS)
    )


def made(further, family="qwen3", dims=ParallelDims(), **how):  # noqa: B008
    hf = normalize(tiny.config_of(family).to_dict())
    return build.transformer_config(hf, dims, dtype=torch.bfloat16, megatron_options=further, **how)


def test_fields_reach_megatrons_classes():
    given = {"moe_input_jitter_eps": 0.25, "bucket_size": 7, "overlap_param_gather": True}
    assert made(given, "qwen3_moe").moe_input_jitter_eps == 0.25
    assert fields_of_kind(given, "ddp") == {"bucket_size": 7, "overlap_param_gather": True}
    assert fields_of_kind(given, "optimizer") == {"overlap_param_gather": True}
    assert fields_of_kind({"main_params_dtype": "bfloat16"}, "optimizer") == {"main_params_dtype": torch.bfloat16}


def test_what_megatron_refuses_is_one_line(monkeypatch):
    given = {"moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "allgather"}
    with pytest.raises(ConfigError, match="^engine.megatron: sets .*, and megatron-core refuses it: .*alltoall"):
        made(given, "deepseek_v3")
    monkeypatch.setattr(platform, "without_transformer_engine", lambda: None)
    with pytest.raises(ConfigError, match="^engine.megatron.apply_rope_fusion: value true is for a model whose rotary"):
        made({"apply_rope_fusion": True}, "deepseek_v3", layer_spec="te")
    with pytest.raises(
        ConfigError, match="^engine.megatron.gradient_accumulation_fusion: value true needs apex's kernel"
    ):
        made({"gradient_accumulation_fusion": True})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match='^engine.megatron.moe_token_dispatcher_type: value "flex" needs DeepEP'):
        made({"moe_token_dispatcher_type": "flex"}, "qwen3_moe", dims=ParallelDims(2, ep=2))
