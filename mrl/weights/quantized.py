"""Reads model folders in block-fp8 (DeepSeek-V3) or mxfp4 (GPT-OSS) as bf16. Each slice is dequantised as it is read.

    block-fp8   `w` is float8_e4m3, `w_scale_inv` has one fp32 factor for each block of `weight_block_size`
    mxfp4       `w_blocks` [E, out, in / 32, 16] has two 4-bit numbers a byte, the first in the low half, `w_scales`
                [E, out, in / 32] their exponents of 2, offset by 127; what they make is `w` [E, in, out]

OCP Microscaling Formats, version 1.0, section 5.3.3, has the sixteen values of a 4-bit number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrl.errors import ModelError
from mrl.weights.json_file import read_json, shorten_value
from mrl.weights.pread import LazySlice, Region
from mrl.weights.safetensors_io import Slice, TensorInfo, WeightReader

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
        self._block = (1, 1)
        if any(name.endswith("_scale_inv") for name in tensors):
            config = read_json(reader.path / "config.json")
            self._block = tuple(config["quantization_config"]["weight_block_size"])
        for name, info in tensors.items():
            if name.endswith("_blocks") and name.removesuffix("_blocks") + "_scales" in tensors:
                name = name.removesuffix("_blocks")
                scales = tensors[name + "_scales"]
                halves = _FP4_BLOCK // 2
                fits = info.dtype == scales.dtype == "U8" and len(info.shape) == 4
                self._check(name, info, scales, fits and info.shape == (*scales.shape, halves))
                experts, outputs, blocks = scales.shape
                self.tensors[name] = TensorInfo("BF16", (experts, blocks * _FP4_BLOCK, outputs), info.file)
            elif name + "_scale_inv" in tensors:
                factors = tensors[name + "_scale_inv"]
                in_blocks = tuple(-(-size // block) for size, block in zip(info.shape, self._block, strict=False))
                known = info.dtype == "F8_E4M3" and factors.dtype in ("F32", "BF16", "F16")
                self._check(name, info, factors, known and len(info.shape) == 2 and factors.shape == in_blocks)
                self.tensors[name] = TensorInfo("BF16", info.shape, info.file)
            elif not self._is_scale(name):
                self.tensors[name] = info

    def _is_scale(self, name: str) -> bool:
        tensors = self._stored.tensors
        return (name.endswith("_scale_inv") and name.removesuffix("_scale_inv") in tensors) or (
            name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" in tensors
        )

    def _check(self, name: str, numbers: TensorInfo, factors: TensorInfo, fits: bool) -> None:
        """Refuses numbers whose factors do not fit: some would spread over them without a word."""
        if not fits:
            shown = f"{numbers.dtype} {list(numbers.shape)} with {factors.dtype} {list(factors.shape)}"
            why = f"{name} is {shown}, which is neither block-fp8 in blocks of {list(self._block)} nor mxfp4"
            raise ModelError(self.path, why=why, fix="get the config.json and the weights of one model")

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


def check_readable(quantization: Any, where: str = "config.json") -> None:
    """Refuses `quantization_config` of a config.json, found at `where`, unless `dequantise` undoes it."""
    if not quantization:
        return
    method, fmt = quantization.get("quant_method"), quantization.get("fmt", "e4m3")
    if method == "mxfp4" or (method == "fp8" and fmt == "e4m3" and quantization.get("weight_block_size")):
        return
    raise ModelError(
        where,
        why=f"quantization_config {shorten_value(quantization, 200)} is of a kind that cannot be read",
        fix="fp8 of e4m3 with weight_block_size and mxfp4 can, and so can the model that it was made from, in bfloat16",
    )


def dequantise(reader: WeightReader) -> WeightReader:
    """Returns `reader`, or a view of it in bf16 if it holds block-fp8 or mxfp4 tensors."""
    quantised = any(name.endswith(("_scale_inv", "_blocks")) for name in reader.tensors)
    return DequantisedReader(reader) if quantised else reader
