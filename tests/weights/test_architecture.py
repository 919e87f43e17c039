"""A checkpoint's model is told by every field of config.json that its maths depends on; and the tables need no other program."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers import CONFIG_MAPPING

from mrl.errors import CheckpointError
from mrl.weights import family_for
from mrl.weights.families import FAMILIES
from mrl.weights.fields import HINTS
from mrl.weights.hf_config import normalize
from mrl.weights.mcore_weights import architecture, check_architecture


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
