"""What is completed without transformers is what transformers makes of it, whatever fields are there and in either spelling."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from mrl.converters.families import FAMILIES
from mrl.converters.hf_config import normalize
from mrl.converters.mcore_weights import architecture
from mrl.converters.plain_config import _FAMILIES, completed
from mrl.errors import ModelError

NUMBERS = {"vocab_size", "tie_word_embeddings", "dtype", "rope_theta", "rope_scaling", "quantization_config"}
NOTES = {"torch_dtype", "partial_rotary_factor", "transformers_version"}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPES = [
    {"rope_theta": 5e5}, {"rope_theta": 1000000}, {"rope_theta": 5e5, "rope_scaling": None}, {},
    {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}}, {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 1e4, "rope_scaling": LLAMA3 | {"type": "llama3"}}, {"rope_theta": "many"}, {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}}, {"rope_parameters": LLAMA3 | {"rope_type": "llama3"}},
    {"rope_parameters": {"rope_theta": 2e4}}, {"rope_theta": 7e4, "rope_parameters": {"rope_type": "default"}},
    {"rope_theta": 3e4, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_theta": 3e4, "original_max_position_embeddings": 77, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
]  # fmt: skip
VALUES = {
    "num_key_value_heads": [None, 4, 2], "head_dim": [None, 8, 12], "sliding_window": [None, 16, 0], "layer_types": [None],
    "use_sliding_window": [True, False], "max_window_layers": [0, 2, 28], "attention_bias": [True, None],
    "hidden_size": [32, 33, "32"], "tie_word_embeddings": [True, None], "rms_norm_eps": [1e-5, 1], "attention_dropout": [0, 0.1],
    "hidden_act": ["gelu"], "torch_dtype": ["bfloat16", "float16", "odd"], "dtype": ["float32"], "logit_softcap": [30.0],
    "quantization_config": [None, {"quant_method": "fp8", "weight_block_size": [128, 128]}], "mlp_bias": [True],
    "num_attention_heads": [4, 0],
}  # fmt: skip


def settled(raw: dict, quick: bool) -> dict | str:
    logging.disable(logging.WARNING)
    try:
        found = normalize(json.loads(json.dumps(raw)), quick=quick)
    except ModelError as error:
        return str(error)
    finally:
        logging.disable(logging.NOTSET)
    family = FAMILIES[raw["model_type"]]
    names = family.reads | NUMBERS | {name for name in raw if name not in NOTES}
    return architecture(family, found) | {name: found.get(name) for name in names}


@pytest.mark.parametrize("model_type", _FAMILIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_as_transformers(model_type, data):
    whole = json.loads(CONFIG_MAPPING[model_type]().to_json_string())
    raw = whole | {"hidden_size": 32, "num_attention_heads": 8, "num_hidden_layers": 4, "layer_types": None}
    for name in ("rope_parameters", *data.draw(st.sets(st.sampled_from(sorted(whole)), max_size=4))):
        if name != "model_type":
            raw.pop(name, None)
    for name in data.draw(st.sets(st.sampled_from(sorted(VALUES)), max_size=3)):
        raw[name] = data.draw(st.sampled_from(VALUES[name]))
    raw |= data.draw(st.sampled_from(ROPES))
    assert settled(raw, quick=True) == settled(raw, quick=False)


PUBLISHED = {
    "llama 3.1": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "vocab_size": 128256,
    },
    "qwen 2.5": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 896,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_need_no_transformers(name):
    raw = PUBLISHED[name]
    assert completed(raw) is not None
    assert settled(raw, quick=True) == settled(raw, quick=False)
