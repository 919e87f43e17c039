"""Reads model folders in block-fp8 (DeepSeek-V3) or mxfp4 (GPT-OSS) as bf16. Each slice is dequantised as it is read.

    block-fp8   `w` is float8_e4m3, `w_scale_inv` has one fp32 factor for each block of `weight_block_size`
    mxfp4       `w_blocks` [E, out, in / 32, 16] has two 4-bit numbers a byte, the first in the low half, `w_scales`
                [E, out, in / 32] their exponents of 2, offset by 127; what they make is `w` [E, in, out]

OCP Microscaling Formats, version 1.0, section 5.3.3, has the sixteen values of a 4-bit number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.errors import ModelError
from mrl.weights.json_file import read_json
from mrl.weights.pread import LazySlice, Region
from mrl.weights.reader import Slice, WeightReader
from mrl.weights.safetensors_io import TensorInfo

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_FP4_BLOCK = 32


def _read_fp8(numbers: Slice, factors: Slice, block: tuple[int, int], region: Region) -> Tensor:
    """Returns part of a matrix [rows, columns]; block: how many rows and columns have one factor."""
    (top, bottom), (left, right) = region
    (low, high), (first, last) = (
        (start // size, -(-stop // size)) for (start, stop), size in zip(region, block, strict=True)
    )
    of_blocks = factors[low:high, first:last].repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    of_entries = of_blocks[top - low * block[0] :, left - first * block[1] :][: bottom - top, : right - left]
    return (numbers[top:bottom, left:right].float() * of_entries).bfloat16()


def _read_mxfp4(blocks: Slice, scales: Slice, region: Region) -> Tensor:
    """Returns part of stacked matrices [E, in, out], made one expert at a time, as making them takes memory."""
    experts, inputs, outputs = (slice(*span) for span in region)
    made = [dequantised_mxfp4(blocks[e, outputs], scales[e, outputs]) for e in range(experts.start, experts.stop)]
    return torch.stack(made).transpose(1, 2)[:, inputs]


def dequantised_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns [..., B, 16] and [..., B], uint8, as bf16 [..., 32 * B]. Exact: two bits of mantissa, a power of 2."""
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).long()
    values = torch.ldexp(_FP4[pairs], (scales.int() - 127)[..., None, None])
    return values.flatten(-3).bfloat16()


class DequantisedReader:
    """Shows quantised tensors under the names and shapes of a bf16 folder, as a `WeightReader`."""

    def __init__(self, reader: WeightReader) -> None:
        self.path, self._stored = reader.path, reader
        self.tensors: dict[str, TensorInfo] = {}
        tensors = reader.tensors
        self._block = _fp8_block(reader.path) if any(name.endswith("_scale_inv") for name in tensors) else (1, 1)
        for name, info in tensors.items():
            if name.endswith("_blocks") and name.removesuffix("_blocks") + "_scales" in tensors:
                self._check_mxfp4(name, info, tensors[name.removesuffix("_blocks") + "_scales"])
                experts, outputs, blocks, _ = info.shape
                shape = (experts, blocks * _FP4_BLOCK, outputs)
                self.tensors[name.removesuffix("_blocks")] = TensorInfo("BF16", shape, info.file)
            elif name + "_scale_inv" in tensors:
                self._check_fp8(name, info, tensors[name + "_scale_inv"])
                self.tensors[name] = TensorInfo("BF16", info.shape, info.file)
            elif not self._is_scale(name):
                self.tensors[name] = info

    def _is_scale(self, name: str) -> bool:
        tensors = self._stored.tensors
        return (name.endswith("_scale_inv") and name.removesuffix("_scale_inv") in tensors) or (
            name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" in tensors
        )

    def _check_fp8(self, name: str, info: TensorInfo, factors: TensorInfo) -> None:
        wanted = tuple(-(-size // block) for size, block in zip(info.shape, self._block, strict=False))
        known = info.dtype == "F8_E4M3" and factors.dtype in ("F32", "BF16", "F16")
        if not known or len(info.shape) != 2 or factors.shape != wanted:
            raise ModelError(
                self.path,
                why=f"{name} is {info.dtype} {list(info.shape)} with factors {factors.dtype} "
                f"{list(factors.shape)}, not F8_E4M3 with {list(wanted)} for blocks of "
                f"{list(self._block)}",
                fix="get the config.json and the weights of one model",
            )

    def _check_mxfp4(self, name: str, info: TensorInfo, scales: TensorInfo) -> None:
        fits = len(info.shape) == 4 and info.shape[3] * 2 == _FP4_BLOCK and scales.shape == info.shape[:3]
        if not fits or (info.dtype, scales.dtype) != ("U8", "U8"):
            raise ModelError(
                self.path,
                why=f"{name} is {info.dtype} {list(info.shape)} with scales {scales.dtype} "
                f"{list(scales.shape)}, not U8 [experts, out, in / {_FP4_BLOCK}, "
                f"{_FP4_BLOCK // 2}] with U8 of its first three sizes",
                fix="get the weights again",
            )

    def __call__(self, name: str) -> Slice:
        tensors = self._stored.tensors
        if name + "_blocks" in tensors:
            blocks, scales = self._stored(name + "_blocks"), self._stored(name + "_scales")
            return LazySlice(self.tensors[name].shape, lambda region: _read_mxfp4(blocks, scales, region))
        if name + "_scale_inv" in tensors:
            numbers, factors = self._stored(name), self._stored(name + "_scale_inv")
            return LazySlice(tensors[name].shape, lambda region: _read_fp8(numbers, factors, self._block, region))
        return self._stored(name)

    def close(self) -> None:
        self._stored.close()


def _fp8_block(path: Path) -> tuple[int, int]:
    config = read_json(path / "config.json")
    block = (config.get("quantization_config") or {}).get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ModelError(
            path / "config.json",
            why=f"quantization_config.weight_block_size = {block!r} is not two sizes, such as "
            "[128, 128], and the weights have factors for blocks",
            fix="get the model's config.json again",
        )
    return tuple(block)


def check_readable(quantization: Any, where: str = "config.json") -> None:
    """Refuses `quantization_config` of a config.json, found at `where`, unless `dequantise` undoes it."""
    if not quantization:
        return
    method, fmt = quantization.get("quant_method"), quantization.get("fmt", "e4m3")
    if method == "mxfp4" or (method == "fp8" and fmt == "e4m3" and quantization.get("weight_block_size")):
        return
    names = ("bits", "fmt", "format", "quant_algo", "load_in_4bit", "load_in_8bit", "weight_block_size")
    details = ", ".join(f"{name} {quantization[name]!r}" for name in names if quantization.get(name) is not None)
    raise ModelError(
        where,
        why="quantization_config has quant_method "
        f"{method!r}{f' ({details})' if details else ''}, and weights of that kind "
        "cannot be read",
        fix="fp8 of e4m3 with weight_block_size and mxfp4 can, and so can the model that it was made from, in bfloat16",
    )


def dequantise(reader: WeightReader) -> WeightReader:
    """Returns `reader`, or a view of it in bf16 if it holds block-fp8 or mxfp4 tensors."""
    quantised = any(name.endswith(("_scale_inv", "_blocks")) for name in reader.tensors)
    return DequantisedReader(reader) if quantised else reader
