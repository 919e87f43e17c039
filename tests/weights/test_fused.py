"""Folders with stacked experts (`save_original_format=False`) are the same model under the table's names."""

from __future__ import annotations

import pytest
import torch

from mrl.errors import ModelError
from mrl.weights.accounting import check_model
from mrl.weights.families import family_for
from mrl.weights.hf_config import read_hf_config
from mrl.weights.safetensors_io import SafetensorsReader
from mrl.weights.stacks import unstack_experts
from tests.weights.models import LAYOUTS, save
from tests.weights.test_round_trip import export_all, load_all


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_stacked_experts_load_like_split_ones(saved, tmp_path, model):
    folder = save(tmp_path / "stacked", model, tied=False, save_original_format=False)
    config, layout = read_hf_config(folder), LAYOUTS["tp2xep2_etp2"]
    family, split = family_for(config), saved(model).weights
    with SafetensorsReader(folder) as stored:
        assert "model.layers.0.mlp.experts.gate_up_proj" in stored.tensors
        reader = unstack_experts(stored, family)
        assert check_model(reader, family, config) == []
        assert all(torch.equal(reader(name)[()], split[name]) for name in split)
        shards, _ = load_all(reader, family, config, layout)
        with pytest.raises(ModelError, match="missing"):
            check_model(reader, family, config | {"num_experts": 5})
    out = export_all(shards, family, config, layout)
    assert out.keys() == split.keys()
    assert all(torch.equal(out[name], split[name]) for name in split)


def test_split_experts_need_no_view(saved):
    hf = saved("mixtral")
    with SafetensorsReader(hf.path) as reader:
        assert unstack_experts(reader, family_for(read_hf_config(hf.path))) is reader
