"""Block-fp8 and mxfp4 folders read as bf16, against transformers' own functions, whole and slice by slice."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mrl.errors import ModelError
from mrl.weights.quantized import dequantise
from mrl.weights.safetensors_io import SafetensorsReader


def folder(path, tensors, **config):
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def fp8(tmp_path):
    """A matrix of 10 x 7 in blocks of 4 x 3: the last block of each row and column is cut off."""
    numbers = torch.randn(10, 7).to(torch.float8_e4m3fn)
    factors = torch.rand(3, 3) + 0.5
    tensors = {"w.weight": numbers, "w.weight_scale_inv": factors, "norm.weight": torch.ones(3)}
    whole = torch.stack(
        [torch.stack([numbers[i, j].float() * factors[i // 4, j // 3] for j in range(7)]) for i in range(10)]
    )
    return folder(tmp_path, tensors, quantization_config={"weight_block_size": [4, 3]}), whole.bfloat16()


def test_block_fp8(fp8):
    path, whole = fp8
    with SafetensorsReader(path) as stored:
        reader = dequantise(stored)
        assert {name: (i.dtype, i.shape) for name, i in reader.tensors.items()} == {
            "w.weight": ("BF16", (10, 7)),
            "norm.weight": ("F32", (3,)),
        }
        assert torch.equal(reader("w.weight")[()], whole)
        assert torch.equal(reader("norm.weight")[()], torch.ones(3))
        lazy = reader("w.weight")
        for start, stop in ((0, 10), (0, 4), (3, 9), (5, 6), (8, 10)):
            assert torch.equal(lazy[start:stop], whole[start:stop])
        for start, stop in ((0, 7), (2, 7), (3, 6), (1, 2)):
            assert torch.equal(lazy[:, start:stop], whole[:, start:stop])


def test_mxfp4(tmp_path):
    blocks = torch.randint(0, 256, (3, 6, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 134, (3, 6, 2), dtype=torch.uint8)
    path = folder(tmp_path, {"x.proj_blocks": blocks, "x.proj_scales": scales, "x.proj_bias": torch.ones(3, 6)})
    whole = convert_moe_packed_tensors(blocks, scales)
    with SafetensorsReader(path) as stored:
        reader = dequantise(stored)
        assert reader.tensors["x.proj"].shape == (3, 64, 6) == tuple(whole.shape)
        assert set(reader.tensors) == {"x.proj", "x.proj_bias"}
        assert torch.equal(reader("x.proj")[()], whole)
        assert torch.equal(reader("x.proj")[1, 5:40, 2:6], whole[1, 5:40, 2:6])


def test_a_folder_that_is_not_quantised_is_left_alone(tmp_path):
    with SafetensorsReader(folder(tmp_path, {"w": torch.ones(2)})) as stored:
        assert dequantise(stored) is stored


FP8, FACTORS = torch.ones(20, 7).to(torch.float8_e4m3fn), torch.ones(3, 3)
BLOCKS, SCALES = torch.ones(3, 6, 2, 16, dtype=torch.uint8), torch.ones(3, 6, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "shown"),
    [
        ({"w": FP8, "w_scale_inv": FACTORS[:2]}, r"F8_E4M3 \[20, 7\] with F32 \[2, 3\]"),
        ({"w": FP8, "w_scale_inv": FACTORS.to(torch.uint8)}, r"with U8 \[3, 3\]"),
        ({"x_blocks": BLOCKS, "x_scales": SCALES[:, :1].clone()}, r"with U8 \[3, 1, 2\]"),
        ({"x_blocks": BLOCKS[..., :8].clone(), "x_scales": SCALES}, r"U8 \[3, 6, 2, 8\]"),
        ({"x_blocks": BLOCKS.to(torch.int8), "x_scales": SCALES}, "I8"),
    ],
)
def test_factors_that_do_not_fit_are_refused(tmp_path, tensors, shown):
    """Some would spread over the numbers without a word."""
    path = folder(tmp_path, tensors)
    quantization = {"quant_method": "fp8", "weight_block_size": [8, 3]}
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with SafetensorsReader(path) as stored, pytest.raises(ModelError, match=shown) as error:
        dequantise(stored)
    assert "\n" not in str(error.value)
