"""Quantised folders: imported as bf16, in a line that says so; what is exported is a plain model."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.config.schema import LoraConfig
from mrl.convert.exporting import export_hf
from mrl.convert.importing import import_hf
from mrl.convert.sources import open_any
from mrl.engine.lora.folder import adapters, read_adapter
from tests.convert import hf_folders
from tests.convert.cases import load_folder
from tests.convert.test_refused import invoke
from tests.convert.test_verify import verify
from tests.engine import tiny
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
