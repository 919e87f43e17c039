"""config.json in both spellings, and what a missing key means."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from mrl.errors import ModelError
from mrl.weights.families import FAMILIES, family_for, fields_of
from mrl.weights.hf_config import normalize, read_hf_config
from mrl.weights.rules import expected_hf_names
from tests.engine import tiny
from tests.weights.models import MODELS, MOE

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


def write(folder, config) -> None:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))


@pytest.mark.parametrize("model", MODELS)
def test_says_what_transformers_says(saved, model):
    path = saved(model).path
    config, theirs = read_hf_config(path), AutoConfig.from_pretrained(path)
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "num_key_value_heads", "tie_word_embeddings"):
        assert config[key] == getattr(theirs, key)
    assert config["head_dim"] == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert config["num_experts"] == (0 if model not in MOE else 8 if model.startswith("deepseek") else 4)
    assert config["dtype"] == "float32"
    assert (config["rope_scaling"] is None) == (model != "gpt_oss")
    assert config["rope_theta"] == theirs.rope_parameters["rope_theta"]


def test_old_and_new_spelling_mean_the_same():
    sizes = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    old = normalize(sizes | {"rope_theta": 5e5, "rope_scaling": LLAMA3, "torch_dtype": "bfloat16"})
    new = normalize(sizes | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "dtype": "bfloat16", "head_dim": None})
    for config in (old, new):
        assert config["rope_theta"] == 5e5
        assert config["rope_scaling"] == LLAMA3
        assert config["dtype"] == "bfloat16"
        assert config["head_dim"] == 16
        assert config["num_key_value_heads"] == 4
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}  # older still: "type"
    assert normalize(sizes | {"rope_scaling": yarn})["rope_scaling"]["rope_type"] == "yarn"


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_experts_in_either_spelling(key, model_type):
    assert normalize({"model_type": model_type, key: 12})["num_experts"] == 12


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_a_missing_key_means_transformers_default(model_type):
    config, theirs = normalize({"model_type": model_type}), AutoConfig.for_model(model_type)
    assert config["tie_word_embeddings"] == theirs.tie_word_embeddings
    assert config["hidden_size"] == theirs.hidden_size
    assert config["dtype"] is None
    assert config["rope_theta"] == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "not readable as JSON"),
        ("[]", "holds a JSON list"),
        ('{"x": ' + "[" * 30_000 + "]" * 30_000 + "}", "it nests too deep"),
        ("{}", "model_type None is not a name"),
        ('{"model_type": "llama", "hidden_size": "big"}', "transformers refuses it: .*hidden_size"),
        ('{"model_type": "llama", "rope_theta": 0}', "rope_theta 0.* is not above 1"),
        ('{"model_type": "llama", "rope_theta": "10000"}', "rope_theta '10000' is not above 1"),
        (
            '{"model_type": "llama", "num_hidden_layers": 1000000000}',
            "num_hidden_layers 1000000000 is no whole number from 1 to 10000",
        ),
        (
            '{"model_type": "qwen3_5", "text_config": {"vocab_size": -1}}',
            "vocab_size -1 is no whole number from 1 to 2147483648",
        ),
        ('{"model_type": "llama", "rms_norm_eps": NaN}', "rms_norm_eps nan is no number above 0"),
        ('{"model_type": "qwen3_moe", "decoder_sparse_step": 0}', "decoder_sparse_step 0 is no whole number from 1"),
        (
            '{"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": "8"}}',
            "factor '8' is no number above 0",
        ),
        ('{"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 3}', "3 does not divide num_att"),
        ('{"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 9}', "9 is not 1 to 4"),
        (json.dumps({"model_type": "llama", "rope_scaling": LLAMA3 | {"low_freq_factor": 5}}), "5 is not below high"),
    ],
)
def test_a_config_that_cannot_be_read_is_one_line(tmp_path, text, message):
    if text is not None:
        write(tmp_path, text)
    with pytest.raises(ModelError, match=message) as error:
        read_hf_config(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_family_lists_the_known_ones(tmp_path):
    write(tmp_path, {"model_type": "gpt2"})
    with pytest.raises(ModelError, match="'gpt2' is not supported; supported are .*llama, mistral"):
        family_for(read_hf_config(tmp_path))


NAMES = {model_type: name for name, (model_type, _) in reversed(tiny.FAMILIES.items())} | {"llama": "llama3"}
PUBLISHED = {
    "meta-llama/Llama-3.2-1B": ("llama", {"rope_parameters": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    "lmsys/vicuna-7b-v1.5-16k": ("llama", {"max_sequence_length": 16384, "pad_token_id": 0}),
    "unsloth/Llama-3.2-1B": ("llama", {"unsloth_fixed": True, "unsloth_version": "2024.9"}),
    "mistralai/Mistral-Nemo-Base-2407": ("mistral", {"max_position_embeddings": 1024000, "sliding_window": None}),
    "Qwen/Qwen2.5-Math-1.5B": ("qwen2", {"use_mrope": False, "use_sliding_window": False, "sliding_window": 4096}),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (
        "qwen3_moe", {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True, "max_window_layers": 28},
    ),
    "mistralai/Mixtral-8x7B-v0.1": ("mixtral", {"router_jitter_noise": 0.0, "head_dim": None}),
    "moonshotai/Kimi-K2-Instruct as deepseek_v3": (
        "deepseek_v3", {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0, "rope_parameters": {
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn",
        }},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_published_files_say_is_accepted(name):
    """Fields and values of config.json files on the hub, in the tiny model of their family."""
    model_type, changes = PUBLISHED[name]
    whole = json.loads(tiny.config_of(NAMES[model_type]).to_json_string())
    for field, value in changes.items():
        whole[field] = whole[field] | value if isinstance(value, dict) else value
    config = normalize(whole)
    fields_of(config)
    assert expected_hf_names(FAMILIES[model_type], config)
