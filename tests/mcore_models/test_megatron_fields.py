"""`engine.megatron`: fields of the installed megatron-core by name, and what is refused."""

import dataclasses
import re

import pytest
import torch

from mrl.config.megatron_speed import ROUNDING
from mrl.converters.hf_config import normalize
from mrl.errors import ConfigError
from mrl.mcore_models import cpu_stand_in
from mrl.mcore_models.megatron_fields import NOT_THERE, OF_TRANSFORMER_ENGINE, SET_BY_MRL, check, fields, of_kind
from mrl.parallel import ParallelDims
from tests.engine import tiny

cpu_stand_in.prepare()

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from mrl.mcore_models import build  # noqa: E402

AWARE = {"use_precision_aware_optimizer": True}
CLASSES = {"transformer": TransformerConfig, "ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}


@pytest.mark.parametrize("kind, made", CLASSES.items(), ids=CLASSES)
def test_the_source_names_the_fields_that_the_class_has(kind, made):
    named = {name for name, field in fields().items() if kind in field.kinds}
    assert named == {field.name for field in dataclasses.fields(made) if not field.name.startswith("_")}


@pytest.mark.parametrize(
    "given",
    [
        {"bucket_size": None}, {"bucket_size": 1000}, {"moe_input_jitter_eps": 1}, {"moe_input_jitter_eps": 0.5},
        {"cuda_graph_scope": ["attn"]}, {"moe_token_dispatcher_type": "flex"},
        {"overlap_grad_reduce": True}, AWARE | {"exp_avg_dtype": "bfloat16"}, {"symmetric_ar_type": None},
    ],
    ids=str,
)  # fmt: skip
def test_values_of_the_type_are_taken(given):
    check(given)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"overlap_grad_reduc": True}, "overlap_grad_reduc: value true is for a field that megatron-core .* does not have; .*: .*overlap_grad_reduce"),
        ({"zzzz": 1}, "zzzz: value 1 is for a field .*; leave it out"),
        ({"hidden_size": 8}, "hidden_size: value 8 is for a field that mrl sets itself; the model's config.json has it"),
        ({"tensor_model_parallel_size": 2}, ".* sets itself; set engine.parallel.tp"),
        ({"lr": 1.0}, ".* sets itself; set optimizer.lr"),
        ({"muon_momentum": 0.9}, ".* sets itself; set optimizer.muon.momentum"),
        ({"overlap_grad_reduce": 1}, "overlap_grad_reduce: value 1 is of another type than megatron-core has; give true or false"),
        ({"bucket_size": "much"}, '.*"much" is of another type .*; give a whole number, or null'),
        ({"main_params_dtype": "float16"}, ".* is for what mrl does not have: masters are fp32; leave it out"),
        ({"exp_avg_dtype": "bfloat16"}, ".* is read with engine.megatron.use_precision_aware_optimizer alone; set that"),
        (AWARE | {"exp_avg_sq_dtype": "uint8"}, "exp_avg_sq_dtype: value \"uint8\" is no dtype .*; give float32 or bfloat16"),
        ({"moe_token_dispatcher_type": "all"}, ".* give one of allgather, alltoall, flex"),
        ({"offload_modules": ["core_attn"]}, ".* sets itself; set engine.offload to .activations."),
        ({"cuda_graph_scope": [1]}, ".* is of another type .* give text, or a list"),
        ({"no_sync_func": "f"}, ".* is for a field that takes a Python object; leave it out"),
    ],
    ids=str,
)  # fmt: skip
def test_others_are_refused_in_one_line(given, message):
    with pytest.raises(ConfigError) as refused:
        check(given)
    assert re.fullmatch(f"engine.megatron.{message}.*", str(refused.value)), str(refused.value)


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
    refused = set(SET_BY_MRL) | set(NOT_THERE)
    assert not ROUNDING & refused and not OF_TRANSFORMER_ENGINE & refused and not set(SET_BY_MRL) & set(NOT_THERE)


def made(further, family="qwen3", **how):
    hf = normalize(tiny.config_of(family).to_dict())
    return build.transformer_config(hf, ParallelDims(), dtype=torch.bfloat16, further=further, **how)


def test_fields_reach_megatrons_classes():
    given = {"moe_input_jitter_eps": 0.25, "bucket_size": 7, "overlap_param_gather": True}
    assert made(given).moe_input_jitter_eps == 0.25
    assert of_kind(given, "ddp") == {"bucket_size": 7, "overlap_param_gather": True}
    assert of_kind(given, "optimizer") == {"overlap_param_gather": True}
    assert of_kind({"main_params_dtype": "bfloat16"}, "optimizer") == {"main_params_dtype": torch.bfloat16}


def test_what_megatron_refuses_is_one_line():
    with pytest.raises(ConfigError, match="^engine.megatron: sets apply_rope_fusion, and megatron-core refuses it: "):
        made({"apply_rope_fusion": True})
    with pytest.raises(ConfigError, match="^engine.megatron.apply_rope_fusion: value true is for a model whose rotary"):
        made({"apply_rope_fusion": True}, "deepseek_v3")
    with pytest.raises(
        ConfigError, match="^engine.megatron.gradient_accumulation_fusion: value true needs apex's kernel"
    ):
        made({"gradient_accumulation_fusion": True})
    with pytest.raises(ConfigError, match="moe_token_dispatcher_type: value .flex. needs DeepEP, which is not"):
        made({"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}, "qwen3_moe")
