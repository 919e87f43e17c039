"""Folders of models of text and more: all tensors come back byte for byte, whichever form their experts have."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from mrl.convert.exporting import export_hf
from mrl.convert.importing import import_hf
from mrl.convert.sources import open_any
from mrl.convert.verifying import compare
from mrl.errors import ModelError
from tests.convert import hf_folders
from tests.engine import tiny_composite

MTP = {"mtp.fc.weight": (32, 64), "mtp.norm.weight": (32,), "mtp.layers.0.mlp.experts.0.up_proj.weight": (16, 32)}


def make(
    folder: pathlib.Path, kind: str, *, tied: bool = False, dtype: torch.dtype = torch.float32, stacked: bool = True,
    again: bool = False, **fields: Any,
) -> pathlib.Path:  # fmt: skip
    """A folder as they are published: in two files, MTP layers among its tensors, and announced in config.json.

    again: a tied head is stored, too.
    """
    tiny_composite.make_composite(str(folder), kind, tied=tied, mtp_num_hidden_layers=1, **fields)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    if stacked:
        tensors = {
            name: t.clone() for name, t in model.state_dict().items() if again or not (tied and "lm_head" in name)
        }
    (folder / "model.safetensors").unlink()
    generator = torch.Generator().manual_seed(1)
    tensors |= {name: torch.randn(shape, generator=generator) for name, shape in MTP.items()}
    names, weight_map = sorted(tensors), {}
    for i in range(2):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({name: tensors[name].to(dtype) for name in names[i::2]}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names[i::2], file)
    about = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(about))
    (folder / "preprocessor_config.json").write_text("{ }\n")
    return folder


@pytest.mark.parametrize(
    ("kind", "tied", "dtype", "stacked"),
    [
        ("qwen3_5", False, torch.float32, True), ("qwen3_5", True, torch.bfloat16, True),
        ("qwen3_5_moe", False, torch.bfloat16, True), ("qwen3_5_moe", True, torch.float32, False),
    ],
)  # fmt: skip
def test_the_files_come_back_byte_for_byte(tmp_path, kind, tied, dtype, stacked):
    source = make(tmp_path / "hf", kind, tied=tied, dtype=dtype, stacked=stacked)
    import_hf(source, tmp_path / "mcore", file_bytes=10_000)
    export_hf(tmp_path / "mcore", tmp_path / "back")
    before, after = hf_folders.files_of(source), hf_folders.files_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == []
    with open_any(source) as a, open_any(tmp_path / "mcore") as b:
        found = compare(a, b)
        assert found.same and found.tensors == len(a.reader.tensors) and found.no_logits is None, found
    _, loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not loaded["missing_keys"]


STRAYS = [
    ("model.language_model.layers.2.mlp.up_proj.weight", torch.float32, "1 left over"),
    ("vision_model.stray", torch.float32, "1 left over"),
    ("model.norm.weight", torch.float32, "1 left over"),  # which is model.language_model.norm.weight, too
    ("mtp.fc.weight", torch.complex64, "cannot be carried over .*mtp.fc.weight is C64"),
    ("model.visual.patch.weight_packed", torch.int32, "quantised in a way .*patch.weight_packed"),
    (
        "model.language_model.layers.0.mlp.up_proj.weight_packed",
        torch.int32,
        "weight_packed.*quantised in a way .*weight_packed",
    ),
]


@pytest.mark.parametrize(("name", "dtype", "why"), STRAYS)
def test_what_is_of_no_part_is_refused(name, dtype, why, tmp_path):
    folder = pathlib.Path(tiny_composite.make_composite(str(tmp_path / "in"), "qwen3_5"))
    tensors = load_file(folder / "model.safetensors") | {name: torch.zeros(3, dtype=dtype)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=why):
        import_hf(folder, tmp_path / "mcore")
