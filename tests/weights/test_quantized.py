"""Block-fp8 and mxfp4 folders read as bf16, against transformers' own functions, whole and slice by slice."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
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


@pytest.mark.parametrize(
    ("block", "message"),
    [(None, "weight_block_size = None"), ([8, 3], "not F8_E4M3 with \\[2, 3\\] for blocks of \\[8, 3\\]")],
)
def test_factors_that_do_not_fit_are_refused(fp8, block, message):
    path, _ = fp8
    (path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": block}}))
    with SafetensorsReader(path) as stored, pytest.raises(ModelError, match=message) as error:
        dequantise(stored)
    assert "\n" not in str(error.value)


def test_factors_of_a_dtype_that_is_no_factor_are_refused(fp8):
    path, _ = fp8
    stored = load_file(path / "model.safetensors")
    stored["w.weight_scale_inv"] = stored["w.weight_scale_inv"].to(torch.uint8)
    save_file(stored, path / "model.safetensors")
    with SafetensorsReader(path) as stored, pytest.raises(ModelError, match=r"with factors U8 \[3, 3\], not F8_E4M3"):
        dequantise(stored)


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        ((3, 6, 2, 16), (3, 1, 2), r"with scales U8 \[3, 1, 2\]"),  # they would spread over the rows without a word
        ((3, 6, 2, 16), (3, 6, 1), r"with scales U8 \[3, 6, 1\]"),
        ((3, 6, 2, 8), (3, 6, 2), r"is U8 \[3, 6, 2, 8\]"),
        ((6, 2, 16), (6, 2), r"is U8 \[6, 2, 16\]"),
    ],
)
def test_mxfp4_of_other_shapes_is_refused(tmp_path, blocks, scales, message):
    tensors = {"x_blocks": torch.ones(blocks, dtype=torch.uint8), "x_scales": torch.ones(scales, dtype=torch.uint8)}
    with SafetensorsReader(folder(tmp_path, tensors)) as stored, pytest.raises(ModelError, match=message) as error:
        dequantise(stored)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["x_blocks", "x_scales"])
def test_mxfp4_of_another_dtype_is_refused(tmp_path, name):
    tensors = {
        "x_blocks": torch.ones(3, 6, 2, 16, dtype=torch.uint8),
        "x_scales": torch.ones(3, 6, 2, dtype=torch.uint8),
    }
    tensors[name] = tensors[name].to(torch.int8)
    with SafetensorsReader(folder(tmp_path, tensors)) as stored, pytest.raises(ModelError, match="I8"):
        dequantise(stored)
