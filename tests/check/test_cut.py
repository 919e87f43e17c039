"""Cuts of config.json: the same family, fewer layers, a smaller width, with the heads and the kinds of layers it had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mrl.check import folder as folders
from mrl.check.folder import ModelCut, cut_config, parse_cut, without_dropout
from mrl.errors import ModelError, UserError
from mrl.weights.families import FAMILIES, fields_of
from mrl.weights.hf_config import normalize, read_hf_config
from tests.engine import tiny

WIDE = {"layers": 10, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}


def raw_of(family: str, **fields) -> dict:
    return tiny.config_of(family, **WIDE | fields).to_dict()


def test_words():
    assert parse_cut("auto") is None and parse_cut("none") == ModelCut() and not ModelCut()
    assert (
        parse_cut("layers=4,width=256") == ModelCut(layers=4, width=256)
        and str(parse_cut("experts=8, layers=2")) == "layers 2, experts 8"
    )
    for text in ("", "layers", "layers=0", "layers=2,layers=3", "depth=2", "layers=-1", "width=1.5"):
        with pytest.raises(UserError, match="--cut: value .* is no cut; write layers=N"):
            parse_cut(text)


@pytest.mark.parametrize("family", [*tiny.FAMILIES])
def test_every_family_can_be_cut(family):
    """The cut is a model that the family takes, with as many heads as before."""
    more = {"first_k_dense_replace": 3} if family in ("deepseek_v3", "glm4_moe") else {}
    if family == "deepseek_v3":  # whose latent attention has as many key heads as query heads
        more["num_key_value_heads"] = 8
    before = raw_of(family, **more)
    after = normalize(cut_config(before, ModelCut(layers=4, width=64)))
    assert (after["num_hidden_layers"], after["hidden_size"]) == (4, 64)
    assert fields_of(dict(after))["num_layers"] == 4
    for name in ("num_attention_heads", "num_key_value_heads", "vocab_size", "num_experts"):
        assert after[name] == normalize(before)[name]
    small, large = (folders.count_parameters(raw, "lm") for raw in (after, before))
    assert small < large / 8
    if FAMILIES[after["model_type"]].sparse:
        kinds = {FAMILIES[after["model_type"]].is_sparse(after, layer) for layer in range(4)}
        assert True in kinds and (not more or False in kinds)  # layers of both kinds are left


def test_kinds_of_layers_that_begin_further_down_are_kept():
    types = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 4
    after = cut_config(raw_of("gpt_oss", layer_types=types), ModelCut(layers=3))
    assert after["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    after = cut_config(
        raw_of("qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=6), ModelCut(layers=4)
    )
    assert after["max_window_layers"] == 2


def test_experts():
    after = cut_config(raw_of("deepseek_v3", n_routed_experts=256, n_group=8, topk_group=4), ModelCut(experts=16))
    assert (after["n_routed_experts"], after["n_group"], after["topk_group"], after["num_experts_per_tok"]) == (
        16,
        8,
        4,
        4,
    )
    with pytest.raises(UserError, match="--cut: asks for fewer experts, and the model has none"):
        cut_config(raw_of("llama"), ModelCut(experts=2))


def test_what_is_not_known_is_refused():
    with pytest.raises(
        ModelError, match="has no num_hidden_layers, so that mrl check does not know how to cut a 'gpt2'"
    ):
        cut_config({"model_type": "gpt2", "n_layer": 3}, ModelCut(layers=2))
    assert cut_config({"model_type": "gpt2"}, ModelCut()) == {"model_type": "gpt2"}


def test_dropout_is_off_everywhere():
    raw = {"attention_dropout": 0.1, "resid_pdrop": 0.1, "text_config": {"hidden_dropout": 0.2}, "dropout_ids": [1]}
    assert without_dropout(raw) == {
        "attention_dropout": 0.0,
        "resid_pdrop": 0.0,
        "text_config": {"hidden_dropout": 0.0},
        "dropout_ids": [1],
    }


# -- the folder --------------------------------------------------------------------------------------------------------


def test_the_whole_model_is_linked(tmp_path):
    source = tiny.make_model(str(tmp_path / "source"), "llama", attention_dropout=0.1)
    made = folders.make_folder(source, str(tmp_path / "out"), cut=ModelCut(), head="lm", init="pretrained", seed=0)
    assert made.init == "pretrained" and made.words.endswith("its own weights")
    assert Path(made.path, "model.safetensors").is_symlink()
    assert read_hf_config(made.path)["attention_dropout"] == 0.0
    assert made.parameters == sum(t.numel() for t in load_file(Path(source, "model.safetensors")).values())


def test_a_cut_has_random_weights_with_norms_that_are_not_one(tmp_path):
    source = tiny.make_model(str(tmp_path / "source"), "qwen2", layers=4)
    made = folders.make_folder(
        source, str(tmp_path / "out"), cut=ModelCut(layers=2), head="lm", init="pretrained", seed=3
    )
    weights = load_file(Path(made.path, "model.safetensors"))
    assert (
        made.words.startswith("cut to layers 2: qwen2") and sum(t.numel() for t in weights.values()) == made.parameters
    )
    assert not any("layers.2." in name for name in weights)
    assert weights["model.norm.weight"].std() > 0.05 and weights["model.layers.0.self_attn.q_proj.bias"].std() > 0.05


def test_a_value_head_that_a_folder_lacks_is_random(tmp_path):
    """With the zeros that a run starts from nothing below the head would have a gradient."""
    source = tiny.make_model(str(tmp_path / "source"), "llama")
    made = folders.make_folder(source, str(tmp_path / "out"), cut=ModelCut(), head="value", init="pretrained", seed=0)
    from mrl.check import reference

    model = reference.load(made.path, "value")
    assert model.score.weight.shape == (1, 32) and model.score.weight.abs().min() > 0
    assert torch.equal(model.model.norm.weight, load_file(Path(source, "model.safetensors"))["model.norm.weight"])


def test_a_quantised_model_is_cut(tmp_path):
    source = Path(tiny.make_model(str(tmp_path / "source"), "llama"))
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="is quantised.*give --cut layers=4"):
        folders.make_folder(str(source), str(tmp_path / "a"), cut=ModelCut(), head="lm", init="pretrained", seed=0)
    made = folders.make_folder(
        str(source), str(tmp_path / "b"), cut=ModelCut(layers=2), head="lm", init="pretrained", seed=0
    )
    assert "quantization_config" not in json.loads(Path(made.path, "config.json").read_text())
