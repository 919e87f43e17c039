"""HF config -> fields of TransformerConfig: every family in both spellings, and every refusal with the field's name."""

import json
import math

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mrl.errors import ConfigError, ModelError
from mrl.mcore_models import cpu_stand_in
from mrl.weights.hf_config import read_hf_config

cpu_stand_in.prepare()

from mrl.mcore_models.build import transformer_config  # noqa: E402
from mrl.mcore_models.layers import inverse_frequencies, rotary_scale  # noqa: E402
from mrl.parallel import ParallelDims  # noqa: E402
from mrl.weights.families import FAMILIES, fields_of  # noqa: E402

SIZES = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 5.0, "low_freq_factor": 1.5, "high_freq_factor": 3.5,
    "original_max_position_embeddings": 24,
}  # fmt: skip

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture
def read(tmp_path):
    """`read(model_type, **fields)`: what mrl makes of a config.json with these fields."""

    def of(model_type="llama", **fields):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **SIZES, **fields}))
        return read_hf_config(tmp_path)

    return of


# -- both spellings ----------------------------------------------------------------------------------------------------

OLD_AND_NEW = {
    "theta": ("llama", {"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama3": (
        "llama",
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
    ),
    "linear, called type": (
        "llama",
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    ),
    "dtype and heads": ("llama", {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16", "head_dim": None}),
    "experts": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2}, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD_AND_NEW)
def test_both_spellings_mean_the_same(read, name):
    model_type, old, new = OLD_AND_NEW[name]
    a, b = read(model_type, **old), read(model_type, **new)
    assert fields_of(a) == fields_of(b)
    for key in ("rope_theta", "head_dim", "num_experts", "dtype"):
        assert a[key] == b[key]
    keep = set(LLAMA3) | {"factor"}
    assert {k: v for k, v in (a["rope_scaling"] or {}).items() if k in keep} == {
        k: v for k, v in (b["rope_scaling"] or {}).items() if k in keep
    }


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_that_transformers_writes_is_understood(read, model_type):
    sizes = SIZES | ({"num_key_value_heads": 4} if model_type == "deepseek_v3" else {})
    written = json.loads(CONFIG_MAPPING[model_type](**sizes).to_json_string())
    fields = fields_of(read(**written))
    assert fields["num_layers"] == 4 and fields["num_query_groups"] == sizes["num_key_value_heads"]
    transformer_config(read(**written), ParallelDims(), dtype=torch.float32)


# -- what makes a family -----------------------------------------------------------------------------------------------


def test_windows(read):
    all_layers = {"window_size": (7, 0), "window_attn_skip_freq": [1, 1, 1, 1]}  # eight tokens, the own one included
    for model_type in ("mistral", "mixtral"):
        assert fields_of(read(model_type, sliding_window=8)).items() >= all_layers.items()
    moe = fields_of(read("qwen3_moe", use_sliding_window=True, sliding_window=8, max_window_layers=2))
    assert moe.items() >= all_layers.items()  # transformers reads no max_window_layers here
    qwen = fields_of(read("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2))
    assert qwen["window_attn_skip_freq"] == [0, 0, 1, 1]
    for model_type in ("qwen2", "qwen3", "qwen3_moe"):
        assert "window_size" not in fields_of(read(model_type, use_sliding_window=False, sliding_window=8))
    assert "window_size" not in fields_of(read("mistral", sliding_window=None))


def test_sparse_layers_and_routing(read):
    step = fields_of(
        read("qwen3_moe", num_experts=4, num_experts_per_tok=2, decoder_sparse_step=2, norm_topk_prob=True)
    )
    assert step["moe_layer_freq"] == [0, 1, 0, 1] and step["moe_router_pre_softmax"] is False
    only = fields_of(
        read("qwen3_moe", num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0, 3], norm_topk_prob=False)
    )
    assert only["moe_layer_freq"] == [0, 1, 1, 0] and only["moe_router_pre_softmax"] is True
    mixtral = fields_of(read("mixtral", num_local_experts=4))
    assert mixtral["moe_layer_freq"] == [1] * 4 and mixtral["moe_router_pre_softmax"] is False
    assert mixtral["moe_router_dtype"] == "fp32"


def test_a_router_of_sigmoids(read):
    fields = fields_of(read("glm4_moe", n_group=4, topk_group=2, num_experts_per_tok=5, routed_scaling_factor=2.5))
    assert fields["moe_router_score_function"] == "sigmoid" and fields["moe_router_topk_scaling_factor"] == 2.5
    assert (fields["moe_router_num_groups"], fields["moe_router_group_topk"]) == (4, 2)
    assert fields["moe_router_enable_expert_bias"] and fields["moe_router_bias_update_rate"] == 0.0
    assert "moe_router_num_groups" not in fields_of(read("glm4_moe", n_group=4, topk_group=4))  # limits nothing
    assert fields["moe_layer_freq"] == [0, 1, 1, 1] and fields["rotary_percent"] == 0.5
    assert fields_of(read("glm4_moe", partial_rotary_factor=0.25))["rotary_percent"] == 0.25
    assert fields["moe_shared_expert_intermediate_size"] == 1408


def test_biases_and_head_norms(read):
    assert fields_of(read("qwen2"))["add_qkv_bias"] and not fields_of(read("qwen2"))["qk_layernorm"]
    for model_type in ("qwen3", "qwen3_moe"):
        assert fields_of(read(model_type))["qk_layernorm"] and not fields_of(read(model_type))["add_qkv_bias"]


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0}, LLAMA3, LLAMA3 | {"factor": 8.0, "low_freq_factor": 1.0}, YARN,
        YARN | {"beta_fast": 4.0, "beta_slow": 2.0, "truncate": False}, YARN | {"attention_factor": 1.25},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}, YARN | {"mscale": 1.0}, YARN | {"beta_fast": 1.0, "beta_slow": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_frequencies_are_those_of_transformers(read, scaling):
    config = CONFIG_MAPPING["llama"](
        **SIZES, max_position_embeddings=128, rope_parameters={"rope_theta": 1e4, **scaling}
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    ours = read(rope_theta=1e4, rope_scaling=scaling)
    assert rotary_scale(ours["rope_scaling"]) == factor
    torch.testing.assert_close(inverse_frequencies(8, 1e4, ours["rope_scaling"]), expected, rtol=0, atol=0)


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED = {
    "yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling type 'yarn'"),
    "dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling type 'dynamic'"),
    "partial rotary": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "gelu": ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "attention bias, llama": ("llama", {"attention_bias": True}, "attention_bias = True"),
    "attention bias, qwen3": ("qwen3", {"attention_bias": True}, "attention_bias = True"),
    "attention bias, qwen3_moe": ("qwen3_moe", {"attention_bias": True}, "attention_bias = True"),
    "mlp bias": ("llama", {"mlp_bias": True}, "mlp_bias = True"),
    "unknown": ("llama", {"logit_softcap": 30.0}, "logit_softcap = 30.0"),
    "quantized": ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    "a window that llama does not have": ("llama", {"sliding_window": 8}, "sliding_window = 8"),
    "layer types of mistral": ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types"),
    "jitter": ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
    "top 1, normalised": ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
    "clipped projections": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
    "attention bias, olmoe": ("olmoe", {"attention_bias": True}, "attention_bias = True"),
    "heads of another size, olmoe": ("olmoe", {"head_dim": 16}, "head_dim = 16"),
    "experts not normalised, glm4_moe": ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob = False"),
    "groups that megatron would rank otherwise": (
        "glm4_moe",
        {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 8},
        "num_experts_per_tok = 8 with topk_group = 2",
    ),
    "experts not normalised, deepseek_v3": (
        "deepseek_v3",
        {"norm_topk_prob": False, "num_key_value_heads": 4},
        "norm_topk_prob = False",
    ),
    "scores of another kind": (
        "deepseek_v3",
        {"scoring_func": "softmax", "num_key_value_heads": 4},
        "scoring_func = 'softmax'",
    ),
    "grouped heads, deepseek_v3": ("deepseek_v3", {}, "num_key_value_heads = 2"),
    "attention bias, deepseek_v3": (
        "deepseek_v3",
        {"attention_bias": True, "num_key_value_heads": 4},
        "attention_bias = True",
    ),
    "quantized, deepseek_v3": (
        "deepseek_v3",
        {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}, "num_key_value_heads": 4},
        "quantization_config",
    ),
    "a bias that is left out": ("gpt_oss", {"attention_bias": False}, "attention_bias = False"),
    "dropout beside sinks": ("gpt_oss", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
    "quantized, gpt_oss": ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    "another family": ("gemma2", {}, "model_type 'gemma2'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_the_maths_is_refused_by_name(read, name):
    model_type, fields, message = REFUSED[name]
    with pytest.raises(ModelError) as error:
        fields_of(read(model_type, **fields))
    assert str(error.value).startswith("config.json: ") and message in str(error.value)
    assert "\n" not in str(error.value)


def test_layer_types_that_are_not_known_are_refused(read):
    hf = read("qwen3", use_sliding_window=True, sliding_window=8)
    for types in (["full_attention"] * 3 + ["chunked_attention"], ["full_attention"] * 3):
        with pytest.raises(
            ModelError, match="layer_types must name full_attention or sliding_attention for each of the 4"
        ):
            fields_of(hf | {"layer_types": types})


def test_what_is_off_or_private_or_neutral_is_no_reason_to_refuse(read):
    hf = read(
        logit_softcap=None, attention_multiplier=0, _name_or_path="x", transformers_version="4.1", use_cache=False
    )
    assert fields_of(hf)["num_layers"] == 4


DELTA_NETS = {
    "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
LAYOUTS = {
    "heads": ({}, {"tp": 3}, "engine.parallel.tp: value 3 does not divide the model's 4 attention heads; use one of 1, 2"),
    "groups": ({"num_attention_heads": 6, "hidden_size": 48}, {"tp": 3}, "2 key-value heads do not divide"),
    "delta heads": (DELTA_NETS, {"tp": 4}, "engine.parallel.tp: value 4 does not divide the model's 2 key heads of linear attention"),
    "delta heads, cp": (DELTA_NETS, {"cp": 4}, "engine.parallel.cp: value 4 does not divide the model's 2 key heads of linear attention"),
    "delta heads, both": (DELTA_NETS, {"tp": 2, "cp": 2}, "cp: value 2 does not divide the model's 1 key heads of linear attention on each of tp 2"),
    "ffn": ({"intermediate_size": 50}, {"tp": 4}, "engine.parallel.tp: value 4 does not divide the model's 50 feed-forward channels"),
    "stages": ({}, {"pp": 8}, "engine.parallel: pp*vpp (8*1 = 8) is more than the model's 4 layers"),
    "chunks": ({}, {"pp": 2, "vpp": 4}, "engine.parallel: pp*vpp (2*4 = 8) is more than the model's 4 layers"),
    "no experts": ({}, {"ep": 2, "dp": 2}, "engine.parallel.ep: value 2 needs a mixture-of-experts model"),
    "experts": ({"model_type": "mixtral", "num_local_experts": 6}, {"ep": 4, "dp": 4}, "engine.parallel.ep: value 4 does not divide"),
    "expert channels": ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 9}, {"tp": 2, "etp": 2, "sp": True},
                        "engine.parallel.etp: value 2 does not divide the model's 9 expert channels"),
    "split experts with biases": ({"model_type": "gpt_oss", "num_local_experts": 4}, {"tp": 2, "etp": 2, "sp": True},
                                  "engine.parallel.etp: value 2 does not work for experts with biases"),
    "no sp": ({"model_type": "mixtral", "num_local_experts": 4}, {"tp": 2}, "engine.parallel.sp: value false does not work for experts with tp 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_that_do_not_fit_the_model_are_refused_by_key(read, name):
    fields, degrees, message = LAYOUTS[name]
    fields, degrees = {"model_type": "llama", **fields}, dict(degrees)
    world = degrees.pop("dp", 1) * math.prod(degrees.get(name, 1) for name in ("tp", "cp", "pp"))
    with pytest.raises(ConfigError) as error:
        transformer_config(read(**fields), ParallelDims(world_size=world, **degrees), dtype=torch.float32)
    assert message in str(error.value)


# -- flags that megatron gets wrong in silence -------------------------------------------------------------------------


def test_two_stages_with_chunks_never_use_batched_sends(read):
    """Both neighbours of a stage are then one rank and batched messages cross; the rows pp2xvpp2 of the parity table train so."""
    for pp, vpp in ((2, 1), (2, 2), (4, 1)):
        config = transformer_config(read(), ParallelDims(world_size=pp, pp=pp, vpp=vpp), dtype=torch.float32)
        assert config.batch_p2p_comm is False and config.overlap_p2p_comm is (vpp > 1)
        assert config.variable_seq_lengths is True
        assert config.virtual_pipeline_model_parallel_size == (vpp if vpp > 1 else None)


def test_fused_kernels_that_need_apex_are_off_and_bf16_is_said(read):
    config = transformer_config(read(), ParallelDims(), dtype=torch.bfloat16)
    assert (
        not config.gradient_accumulation_fusion and not config.masked_softmax_fusion and not config.persist_layer_norm
    )
    assert config.bf16 and config.params_dtype == config.pipeline_dtype == torch.bfloat16
    assert config.calculate_per_token_loss is False
    assert config.finalize_model_grads_func is None  # the engine reduces, once a step (trap 1)


@pytest.mark.parametrize(("aux", "z", "kind"), [(0.0, 0.0, "none"), (0.01, 0.0, "aux_loss"), (0.0, 0.001, "none")])
def test_router_losses_are_what_the_config_says(read, aux, z, kind):
    """Hugging Face's own router_aux_loss_coef is a hint that training here does not take over (trap 9)."""
    hf = read("qwen3_moe", num_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.5)
    config = transformer_config(hf, ParallelDims(), dtype=torch.float32, aux_loss=aux, z_loss=z)
    assert config.moe_router_load_balancing_type == kind and config.moe_aux_loss_coeff == aux
    assert config.moe_z_loss_coeff == (z or None)
