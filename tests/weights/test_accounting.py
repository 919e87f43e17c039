"""Every tensor of a folder has its place, or one message lists what does not."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from mrl.errors import ModelError
from mrl.weights.accounting import account, check_model
from mrl.weights.families import family_for
from mrl.weights.hf_config import read_hf_config
from mrl.weights.safetensors_io import SafetensorsReader, TensorInfo

NORM, HEAD, EMBED = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"


def check(folder, **options) -> list[str]:
    config = read_hf_config(folder)
    with SafetensorsReader(folder) as reader:
        return check_model(reader, family_for(config), config, **options)


@pytest.fixture
def variant(saved, tmp_path):
    """`variant(change, tied=False)`: a copy of the llama folder after `change(weights)`."""

    def make(change, *, tied=False):
        hf = saved("llama", tied=tied)
        shutil.copy(hf.path / "config.json", tmp_path)
        weights = {name: tensor.clone() for name, tensor in hf.weights.items()}
        change(weights)
        save_file(weights, tmp_path / "model.safetensors")
        return tmp_path

    return make


FAULTS = {
    "missing": (lambda w: w.pop(NORM), "1 missing (model.norm.weight)"),
    "missing head": (lambda w: w.pop(HEAD), "1 missing (lm_head.weight), set tie_word_embeddings to true"),
    "unknown": (lambda w: w.update(extra=torch.zeros(1)), "1 left over (extra)"),
    "shape": (lambda w: w.update({NORM: torch.zeros(8)}), f"{NORM} is [8], not [32]"),
    "dtype": (lambda w: w.update({NORM: w[NORM].to(torch.int8)}), f"{NORM} is I8"),
    "a layer more": (lambda w: w.update({"model.layers.4.mlp.up_proj.weight": torch.zeros(48, 32)}), "1 left over"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_message_names_the_tensor(variant, fault):
    change, message = FAULTS[fault]
    folder = variant(change)
    with pytest.raises(ModelError) as error:
        check(folder)
    assert message in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value)


def test_everything_wrong_is_in_one_message():
    found = {"a": TensorInfo("F32", (2,)), "b": TensorInfo("I32", (3,)), "c": TensorInfo("BF16", (1,))}
    with pytest.raises(ModelError) as error:
        account(found, {"a": (3,), "b": (3,), "d": (1,)}, where="here", may_have=())
    for part in ("here:", "1 missing (d)", "1 left over (c)", "a is [2], not [3]", "b is I32"):
        assert part in str(error.value)


def test_rotary_buffers_of_old_files_are_left_unread(variant):
    names = ["model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert check(variant(lambda w: w.update({name: torch.zeros(4) for name in names}))) == []


def test_a_tied_folder_may_hold_an_equal_head_and_no_other(variant):
    """The config ties them: a head that differs would be lost in silence."""
    assert check(variant(lambda w: w.update({HEAD: w[EMBED].clone()}), tied=True)) == []
    with pytest.raises(ModelError, match="lm_head.weight differs from model.embed_tokens.weight though config.json"):
        check(variant(lambda w: w.update({HEAD: w[EMBED] + 1}), tied=True))


def test_an_untied_folder_with_tied_config_says_how(saved, tmp_path):
    shutil.copytree(saved("qwen2").path, tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(ModelError, match="set tie_word_embeddings to false or remove lm_head.weight"):
        check(tmp_path / "m")
