"""config.json in both spellings, and what a missing key means.

A checkpoint's model is told by every field of config.json that its maths depends on; and the tables need no other program.

docs/families.md shows a whole family, the file as it is; docs/supported-models.md lists what is refused.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from mrl.errors import CheckpointError, ModelError
from mrl.weights.families import FAMILIES, family_for, fields_of
from mrl.weights.fields import HINTS
from mrl.weights.hf_config import normalize, read_hf_config
from mrl.weights.mcore_weights import architecture, check_architecture
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


def written_by_transformers(model_type: str) -> dict:
    return json.loads(CONFIG_MAPPING[model_type]().to_json_string()) | {"model_type": model_type}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_that_a_family_reads_tells_its_models_apart(model_type):
    config = normalize(written_by_transformers(model_type))
    family = family_for(config)
    saved = architecture(family, config)
    check_architecture(json.loads(json.dumps(saved)), family, config, "here")
    assert family.reads - HINTS - {"rope_parameters"} <= saved.keys()
    for name in saved:
        changed = config | {name: "another"}
        if name == "partial_rotary_factor":
            changed = config | {"rope_parameters": (config["rope_parameters"] or {}) | {name: 0.375}}
        with pytest.raises(CheckpointError, match=f"here: is another model: {name} is "):
            check_architecture(saved, family, changed, "here")
    for name in HINTS:
        check_architecture(saved, family, config | {name: "another"}, "here")


def test_what_an_older_version_saved_is_enough():
    config = normalize(written_by_transformers("llama"))
    family = family_for(config)
    few = {"model_type": "llama", "num_experts": 0, "hidden_size": 4096, "head": "lm", "dtype": "float32"}
    check_architecture(few, family, config, "here")
    with pytest.raises(CheckpointError, match="hidden_size is 5 in the checkpoint and 4096 in config.json"):
        check_architecture(few | {"hidden_size": 5}, family, config, "here")


LIGHT = """
import sys
import mrl.weights
from mrl.parallel import ParallelDims
import torch

hf = {"model_type": "llama", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1, "head_dim": 2,
      "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 0, "tie_word_embeddings": True}
from mrl.weights.rules import expected_hf_names
family = mrl.weights.family_for(hf)
weights = [(name, torch.ones(shape)) for name, shape in expected_hf_names(family, hf).items()]
print(len(list(mrl.weights.hf_to_mcore(weights, family, ParallelDims(world_size=2, tp=2), 1, hf_config=hf))))
heavy = ("transformers", "megatron", "datasets", "huggingface_hub", "torch.distributed.checkpoint", "click")
print([name for name in heavy if name in sys.modules])
"""


def test_the_converters_need_neither_megatron_nor_transformers_nor_a_process_group():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["8", "[]"]


ROOT = Path(__file__).parents[2]


def test_every_field_that_is_held_to_some_values_is_on_the_page():
    page = (ROOT / "docs/supported-models.md").read_text(encoding="utf-8")
    code = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "mrl/weights").rglob("*.py")))
    names = set(re.findall(r'require\(hf(?:\["rope_scaling"\])?, "(\w+)"', code))
    assert len(names) > 12 and [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_the_example_is_the_file():
    page = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    shown = page.split("```python\n")[1].split("```")[0]
    assert shown == (ROOT / "mrl/weights/families/olmoe.py").read_text(encoding="utf-8")
