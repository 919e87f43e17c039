"""What fields of `engine.megatron` need of a model, a layout and layers: said before a run, by one line each."""

import re
import typing

import pytest
import torch

from mrl.config.schema import EngineConfig, ModelConfig
from mrl.engine.megatron.checks import MegatronChecks
from mrl.errors import ConfigError
from mrl.mcore_models import cpu_stand_in, megatron_fields, megatron_needs, platform
from mrl.mcore_models.megatron_fields import REFUSED_FIELDS, SET_BY_MRL, TRANSFORMER_ENGINE_FIELDS, fields
from mrl.parallel import ParallelDims
from mrl.weights.families import fields_of
from mrl.weights.hf_config import normalize
from tests.engine import tiny
from tests.engine.harness import run_case

cpu_stand_in.prepare()

from mrl.mcore_models import build  # noqa: E402

EP, FLEX = {"world_size": 2, "ep": 2}, {"moe_token_dispatcher_type": "flex"}
INSIDE = {"world_size": 2, "tp": 2, "sp": True, "ep": 2}  # of one replica's ranks


def model_of(family):
    return fields_of(normalize(tiny.config_of(family).to_dict()))


def check(given, family="deepseek_v3", **layout):
    megatron_needs.check(given, model_of(family), ParallelDims(**layout))


@pytest.mark.parametrize(
    "given, family, layout",
    [
        ({"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"}, "qwen3_moe", {}),
        ({"moe_shared_expert_overlap": True}, "deepseek_v3", {}),
        ({"moe_shared_expert_overlap": False, "moe_router_fusion": False}, "qwen3", {}),  # not to have it
        ({"moe_expert_capacity_factor": None, "bucket_size": None}, "qwen3", {}),
        ({"moe_token_dispatcher_type": "alltoall"}, "qwen3", {}),  # as without
        ({"deallocate_pipeline_outputs": True}, "qwen3", {}),  # of another layout of the config
        (FLEX, "qwen3_moe", {"world_size": 2, "tp": 2, "sp": True, "etp": 2}),
        ({"moe_token_dispatcher_type": "allgather"}, "qwen3_moe", INSIDE),
        (FLEX | {"moe_enable_deepep": True, "moe_flex_dispatcher_backend": "deepep"}, "qwen3_moe", EP),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_read_is_taken(given, family, layout):
    check(given, family, **layout)


@pytest.mark.parametrize(
    "given, family, layout, message",
    [
        ({"moe_router_fusion": True}, "qwen3", {}, "moe_router_fusion: value true is for a model with experts, and .*"),
        ({"moe_shared_expert_overlap": True}, "qwen3_moe", {}, ".* is for a model with shared experts, .*; leave it out"),
        ({"moe_enable_deepep": True}, "qwen3_moe", EP, ".* is read with engine.megatron.moe_token_dispatcher_type flex alone.*"),
        ({"moe_token_drop_policy": "probs"}, "qwen3_moe", {}, ".* is read with engine.megatron.moe_expert_capacity_factor alone.*"),
        ({"microbatch_group_size_per_vp_stage": 0}, "qwen3", {"world_size": 2, "pp": 2, "vpp": 2}, ".* is no number above 0.*"),
        ({"moe_token_dispatcher_type": "allgather"}, "qwen3_moe", EP, ".* as many tokens from each rank, and replicas have .*dp2.*"),
        (FLEX, "qwen3_moe", {}, ".* is for experts on several ranks, and here each has all of them .*"),
        (FLEX | {"moe_flex_dispatcher_backend": "hybridep"}, "qwen3_moe", EP, 'moe_flex_dispatcher_backend: value "hybridep" is no way .*'),
        ({"moe_expert_capacity_factor": 0.0}, "qwen3_moe", {}, ".* value 0.0 is no number above 0; give one, or leave it out"),
        ({"moe_expert_capacity_factor": float("inf")}, "qwen3_moe", {}, ".* is no number above 0; .*"),
        ({"bucket_size": 0}, "qwen3", {}, "bucket_size: value 0 is no number above 0; .*"),
        ({"overlap_grad_reduc": True}, "qwen3", {}, ".* is for a field that megatron-core .* does not have; .*"),
        ({"fp8": "hybrid"}, "qwen3", {}, "fp8_recipe: .*"),
        ({"tp_comm_overlap_ag": True}, "qwen3", {}, ".* is read with engine.megatron.tp_comm_overlap alone; .*"),
    ],
    ids=str,
)  # fmt: skip
def test_what_would_not_be_read_or_break_is_refused(given, family, layout, message):
    with pytest.raises(ConfigError) as refused:
        check(given, family, **layout)
    assert re.fullmatch(f"engine.megatron.{message}", str(refused.value)), str(refused.value)


def test_fields_of_experts_need_some():
    """All of them: a name that the list lacks would do nothing in silence."""
    open_to_yaml = {name for name, field in fields().items() if field.annotation is not None}
    open_to_yaml -= set(SET_BY_MRL) | set(REFUSED_FIELDS)
    assert {name for name in open_to_yaml if name.startswith("moe_")} <= set(megatron_needs.NEEDS[0].fields.split())
    [flex] = [need for need in megatron_needs.NEEDS if "flex" in need.words]
    assert set(flex.fields.split()) <= TRANSFORMER_ENGINE_FIELDS, "a plan leaves the dispatcher out"


def said_of(given, spec="local", dtype=torch.float32, **how):
    """What is said of fields for layers that were chosen."""
    try:
        megatron_needs.check_spec(given, spec, "as configured", dtype, **how)
    except ConfigError as error:
        return str(error)
    return ""


def test_what_is_of_transformer_engine_needs_it(monkeypatch):
    assert megatron_needs.LAYER_FIELDS | megatron_needs.KERNEL_FIELDS <= TRANSFORMER_ENGINE_FIELDS
    layers = [{name: True} for name in sorted(megatron_needs.LAYER_FIELDS)]
    kernels = [{name: True} for name in sorted(megatron_needs.KERNEL_FIELDS)]
    for given in (*layers, *kernels):  # there is no GPU here
        assert not said_of(dict.fromkeys(given, False)) and not said_of(given, elsewhere="auto")
    for given in layers:
        assert "needs the layers of transformer-engine, and engine.layer_spec is local" in said_of(given)
        assert "needs the layers of transformer-engine" in said_of(given, elsewhere="local") and not said_of(
            given, "te"
        )
    for given in kernels:
        assert "value true needs a GPU, and torch sees none; leave it out" in said_of(given)
    monkeypatch.setattr(platform, "without_transformer_engine", lambda: platform.ABSENT)
    for given in kernels:
        assert f"needs transformer-engine, which {platform.ABSENT}" in said_of(given, elsewhere="auto")
    monkeypatch.setattr(platform, "without_transformer_engine", lambda: None)
    assert not any(map(said_of, kernels)) and all(map(said_of, layers))


def test_a_run_is_checked_for_the_machine_that_it_starts_on():
    given = {"symmetric_ar_type": "two_shot"}
    asked = ModelConfig(path="none"), EngineConfig(megatron=given), ParallelDims(), tiny.config_of("qwen3").to_dict()
    MegatronChecks.notes_on(*asked)  # of `--dry-run`
    with pytest.raises(ConfigError, match="engine.megatron.symmetric_ar_type: .* needs "):
        MegatronChecks.check_here(*asked)


@pytest.mark.parametrize("error", [AssertionError, ImportError])
def test_what_megatron_raises_is_one_line(monkeypatch, error):
    def refuse(**given):
        raise error("no\nway")

    monkeypatch.setattr(build, "config_class", lambda fields: refuse)
    hf = normalize(tiny.config_of("qwen3").to_dict())
    with pytest.raises(ConfigError, match="sets bias_dropout_fusion, and megatron-core refuses it: no"):
        build.transformer_config(
            hf, ParallelDims(), dtype=torch.float32, megatron_options={"bias_dropout_fusion": True}
        )


RAN = frozenset("""
    activation_func_fp8_input_store apply_wd_to_qk_layernorm bias_activation_fusion bias_dropout_fusion bucket_size
    check_for_large_grads check_for_nan_in_grad clone_scatter_output_in_embedding deterministic_mode
    disable_bf16_reduced_precision_matmul moe_expert_capacity_factor moe_input_jitter_eps
    moe_router_force_load_balancing moe_shared_expert_overlap optimizer_cpu_offload overlap_grad_reduce
    deallocate_pipeline_outputs microbatch_group_size_per_vp_stage
    overlap_param_gather pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation
    use_precision_aware_optimizer
""".split())  # fmt: skip  # noqa: SIM905
"""Fields that do something, or nothing that is wrong, on one rank with local layers of experts."""


@pytest.mark.slow
def test_each_field_by_itself_runs_or_is_refused(tmp_path):
    """None of them ends in a traceback of megatron-core."""
    values = {
        name: value_of(field.annotation)
        for name, field in fields().items()
        if name not in SET_BY_MRL and name not in REFUSED_FIELDS and field.annotation is not None
    }
    folder = tiny.make_model(str(tmp_path / "model"), "deepseek_v3")
    config = tiny.role(folder, backend="megatron", tokens=2000)
    said = run_case(1, "tests.engine.padding:every_field", config=config, values=values)
    assert not [
        line for line in said.values() if line and not line.startswith(("engine.megatron.", "engine.megatron: "))
    ]
    assert {name for name, line in said.items() if not line} - {"moe_router_force_biased"} == RAN


def value_of(annotation):
    """A value of a field that asks for something."""
    arm = next(arm for arm in megatron_fields.arms_of(annotation) if arm is not type(None))
    if typing.get_origin(arm) is typing.Literal:
        return typing.get_args(arm)[-1]
    return {bool: True, int: 2, float: 0.5, str: "x"}[arm]
