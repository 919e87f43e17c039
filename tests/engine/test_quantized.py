"""Quantised folders through the engine: weights are those of the folder dequantised, and the export is a plain model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mrl.config.schema import RoleConfig
from mrl.engine.registry import build_engine
from tests.engine import tiny
from tests.engine.harness import run_case

BLOCK = [8, 16]


def weights_and_export(config: RoleConfig, expected: dict[str, torch.Tensor], out: str) -> None:
    engine = build_engine(config)
    engine.init_model()
    held = dict(engine.hf_weights())
    engine.export_hf(out)
    if engine.is_main:
        assert held.keys() == expected.keys()
        assert all(torch.equal(held[name], tensor.float()) for name, tensor in expected.items())


def quantise_fp8(tensors):
    """(stored, what it stands for): every projection in blocks, as DeepSeek-V3 is published."""
    stored, plain = {}, dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        rows, columns = (-(-size // block) for size, block in zip(tensor.shape, BLOCK, strict=True))
        factors = torch.rand(rows, columns) + 0.5
        stored[name], stored[name + "_scale_inv"] = tensor.to(torch.float8_e4m3fn), factors
        spread = factors.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[
            : tensor.shape[0], : tensor.shape[1]
        ]
        plain[name] = (stored[name].float() * spread).bfloat16()
    return stored, plain


def quantise_mxfp4(tensors):
    """(stored, what it stands for): random numbers in place of the experts, as GPT-OSS is published."""
    stored, plain = {}, dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
        stored[name + "_blocks"], stored[name + "_scales"] = blocks, scales
        plain[name] = convert_moe_packed_tensors(blocks, scales)
    return stored, plain


CASES = {
    "deepseek_v3": (quantise_fp8, {}, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCK}, {"tp": 2}),
    "gpt_oss": (quantise_mxfp4, {"intermediate_size": 32}, {"quant_method": "mxfp4"}, {"tp": 2, "etp": 1}),
}


@pytest.mark.parametrize("family", CASES)
def test_a_quantised_folder_is_read_and_exported_as_a_plain_one(tmp_path, family):
    quantise, fields, method, parallel = CASES[family]
    folder, out = Path(tiny.make_model(str(tmp_path / "hf"), family, **fields)), tmp_path / "out"
    stored, plain = quantise(load_file(folder / "model.safetensors"))
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    role = tiny.role(str(folder), backend="megatron", parallel=parallel, optimizer=None)
    run_case(2, "tests.engine.test_quantized:weights_and_export", config=role, expected=plain, out=str(out))
    assert json.loads((out / "config.json").read_text()) == config
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    assert torch.equal(
        loaded["model.layers.1.self_attn.o_proj.weight"], plain["model.layers.1.self_attn.o_proj.weight"].float()
    )
