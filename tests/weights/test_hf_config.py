"""config.json in both spellings, and what a missing key means."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from mrl.errors import ModelError
from mrl.weights.families import FAMILIES, family_for
from mrl.weights.hf_config import normalize, read_hf_config
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
        ("{}", "model_type None is not a name"),
        ('{"model_type": "llama", "hidden_size": "big"}', "hidden_size = 'big' is not a whole number"),
        ('{"model_type": "llama", "pad_token_id": "big"}', "transformers refuses it"),
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
