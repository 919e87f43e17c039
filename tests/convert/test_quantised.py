"""Quantised folders: imported as bf16, in a line that says so; what is exported is a plain model.

Folders of models of text and more: all tensors come back byte for byte, whichever form their experts have.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from mrl.config.schema import LoraConfig
from mrl.convert.exporting import export_hf
from mrl.convert.importing import import_hf
from mrl.convert.sources import open_any
from mrl.convert.verifying import compare
from mrl.engine.lora.folder import adapters, read_adapter
from mrl.errors import ModelError
from tests.convert import hf_folders
from tests.convert.cases import load_folder
from tests.convert.test_refused import invoke
from tests.convert.test_verify import verify
from tests.engine import tiny, tiny_composite
from tests.engine.harness import run_case
from tests.engine.test_quantized import CASES


@pytest.fixture(params=CASES)
def quantised(request, tmp_path):
    """(folder, what its tensors stand for), in bf16 where the folder is not quantised."""
    quantise, fields, method, _ = CASES[request.param]
    folder = hf_folders.make_hf(tmp_path / "hf", request.param, dtype="bfloat16", shard="1GB", **fields)
    torch.manual_seed(0)
    stored, plain = quantise(load_file(folder / "model.safetensors"))
    names = sorted(stored)
    halves = {"1": names[::2], "2": names[1::2]}  # factors and numbers lie in files of their own
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{i}-of-00002.safetensors" for i, held in halves.items() for name in held}
    for i, held in halves.items():
        file = folder / f"model-0000{i}-of-00002.safetensors"
        save_file({name: stored[name].contiguous() for name in held}, file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    return folder, plain


def test_import_and_export(quantised, tmp_path):
    folder, plain = quantised
    done = invoke("import", folder, tmp_path / "mcore", "--verify")
    assert done.exit_code == 0, done.output
    assert "read as bf16" in done.stdout and f"{folder} is quantised" in done.stdout
    export_hf(tmp_path / "mcore", tmp_path / "back")
    written = load_folder(str(tmp_path / "back"))
    assert written.keys() == plain.keys()
    assert [n for n in plain if not torch.equal(written[n], plain[n])] == []
    assert [n for n in plain if written[n].dtype != plain[n].dtype] == []
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "back"))
    del before["quantization_config"]
    assert after == before
    code, found = verify(tmp_path / "mcore", tmp_path / "back")  # transformers on what was written
    assert code == 0 and found["same"] and len(found["logits"]) == 5


def test_a_run_that_starts_from_quantised_weights_exports_plain_ones(quantised, tmp_path):
    folder, plain = quantised
    layouts = {"run": {"dtype": "bfloat16"}}
    run_case(1, "tests.convert.cases:save_checkpoints", hf=str(folder), out=str(tmp_path), layouts=layouts)
    export_hf(tmp_path / "run", tmp_path / "back", model=str(folder))
    written = load_folder(str(tmp_path / "back"))
    assert [n for n in plain if not torch.equal(written[n].float(), plain[n].float())] == []
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


def test_a_router_bias_is_fp32_in_the_export_of_a_run(hf, tmp_path):
    layouts = {"run": {"dtype": "bfloat16"}}
    source = hf("deepseek_v3")
    run_case(1, "tests.convert.cases:save_checkpoints", hf=str(source), out=str(tmp_path), layouts=layouts)
    export_hf(tmp_path / "run", tmp_path / "back", model=str(source))
    written = load_folder(str(tmp_path / "back"))
    exact = {name for name, tensor in written.items() if tensor.dtype == torch.float32}
    assert exact == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "asked", [(slice(0, 4), slice(0, 32), slice(0, 48)), (slice(1, 3), slice(3, 20), slice(5, 18))]
)
def test_stacked_experts_are_sliced_as_files_have_them(hf, tmp_path, asked):
    source = hf("gpt_oss")
    import_hf(source, tmp_path / "mcore")
    held, name = load_folder(str(source)), "model.layers.1.mlp.experts.gate_up_proj"
    with open_any(tmp_path / "mcore") as opened:
        assert torch.equal(opened.reader(name)[asked], held[name][asked])
        biases = opened.reader(name + "_bias")[asked[0], asked[2]]
        assert torch.equal(biases, held[name + "_bias"][asked[0], asked[2]])


def test_adapters_over_it(quantised, tmp_path):
    """What the engines add them to: bf16 weights, of a stack of experts, too."""
    folder, plain = quantised
    experts = ("experts.gate_up_proj", "experts.down_proj")
    lora = LoraConfig(rank=2, target_modules=("o_proj", *experts))
    tiny.make_adapter(str(tmp_path / "adapter"), str(folder), lora)
    shapes, held = adapters(str(folder), lora, "lm"), read_adapter(tmp_path / "adapter")[1]
    with open_any(tmp_path / "adapter") as source:
        assert source.reader.tensors.keys() == plain.keys()
        found = {name: source.reader(name)[()] for name in plain}
    changed = {name for name in plain if not torch.equal(found[name], plain[name])}
    assert changed and all("o_proj" in name or "experts." in name for name in changed)
    for shape in shapes.values():
        name = shape.name if shape.name in plain else f"{shape.name}.weight"
        if name in plain:
            delta = shape.delta(held[shape.a_name], held[shape.b_name])
            assert torch.equal(found[name], (plain[name].float() + delta).to(plain[name].dtype)), name


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
