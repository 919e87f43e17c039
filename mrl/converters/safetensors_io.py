"""Read a Hugging Face model folder: safetensors, checked against their headers and index before any tensor is used.

Nothing is read but the headers until a slice is asked for. Pickle files are refused: loading one runs its code.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mrl.converters.algebra import Shape
from mrl.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor. dtype: a safetensors name such as "BF16". file: name of the shard."""

    dtype: str
    shape: Shape
    file: str = ""


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file; ModelError when the file is truncated or is not one."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{file}: truncated or not a safetensors file ({size} bytes); get the file again")
        text = stream.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        spans = {name: tuple(entry["data_offsets"]) for name, entry in header.items()}
        infos = {name: TensorInfo(e["dtype"], tuple(e["shape"]), file.name) for name, e in header.items()}
        end = max((high for _, high in spans.values()), default=0)
        for name, (low, high) in spans.items():
            info = infos[name]
            if info.dtype in DTYPES and high - low != math.prod(info.shape) * DTYPES[info.dtype].itemsize:
                raise ValueError(f"{name} has {high - low} bytes for shape {list(info.shape)} of {info.dtype}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file}: not a safetensors header ({error}); get the file again") from None
    if size != 8 + length + end:
        raise ModelError(f"{file}: has {size} bytes, its header promises {8 + length + end}; get the file again")
    return infos


def _read_index(file: Path) -> dict[str, str]:
    """The index's map from tensor to shard."""
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        bad = [str(shard) for shard in weight_map.values() if Path(shard).name != shard]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file}: not a safetensors index ({error!r}); get the file again") from None
    if bad:
        raise ModelError(f"{file}: names {bad[0]!r}, which is not a file of this folder")
    return weight_map


def some(names: list[str], limit: int = 5) -> str:
    """A list for a message: the first few, and how many more."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


class HFReader:
    """The weights of a model folder. `tensors` maps each name to its `TensorInfo`; calling it gives a lazy slice.

    A slice takes `[a:b]` and `[:, a:b]` and reads only that. Raises ModelError, naming the file, for a folder
    that is missing, incomplete, damaged, or holds no safetensors. Use as a context manager to close the files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ModelError(f"{self.path}: no such folder; give a Hugging Face model folder")
        self._open: dict[str, Any] = {}
        single, index = self.path / SINGLE, self.path / INDEX
        if index.is_file():
            self.tensors = self._check_index(_read_index(index), index, single)
        elif single.is_file():
            self.tensors = read_header(single)
        else:
            raise ModelError(self._why_no_weights())

    def _why_no_weights(self) -> str:
        names = sorted(file.name for file in self.path.iterdir())
        shards = [name for name in names if _SHARD.fullmatch(name)]
        if shards:
            return f"{self.path}: has {some(shards)} and no {INDEX}; the folder is incomplete, get the index"
        pickles = sorted(file.name for pattern in _PICKLES for file in self.path.glob(pattern))
        if pickles:
            return (
                f"{self.path}: has only pickle weights ({some(pickles)}), refused because loading them runs their code; "
                f"save the model as safetensors"
            )
        return f"{self.path}: has neither {SINGLE} nor {INDEX}; give a folder with safetensors weights"

    def _check_index(self, weight_map: dict[str, str], index: Path, single: Path) -> dict[str, TensorInfo]:
        shards = sorted(set(weight_map.values()))
        if single.is_file() and single.name not in shards:
            raise ModelError(f"{self.path}: has both {SINGLE} and {INDEX}; remove the one that is out of date")
        lost = [shard for shard in shards if not (self.path / shard).is_file()]
        if lost:
            raise ModelError(f"{self.path}: {INDEX} names {some(lost)}, not in the folder; get the missing files")
        tensors: dict[str, TensorInfo] = {}
        for shard in shards:
            held = read_header(self.path / shard)
            promised = {name for name, file in weight_map.items() if file == shard}
            if held.keys() != promised:
                odd = sorted(held.keys() ^ promised)
                raise ModelError(f"{index}: does not agree with {shard} about {some(odd)}; get both files again")
            tensors |= held
        return tensors

    def __call__(self, name: str) -> Any:
        """A lazy slice of tensor `name`."""
        return self._file(name).get_slice(name)

    def tensor(self, name: str) -> Tensor:
        """The whole tensor, on CPU."""
        return self._file(name).get_tensor(name)

    def _file(self, name: str) -> Any:
        if name not in self.tensors:
            raise ModelError(f"{self.path}: has no tensor {name}")
        file = self.tensors[name].file
        if file not in self._open:
            try:
                self._open[file] = safe_open(str(self.path / file), framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{self.path / file}: not readable ({error}); get the file again") from None
        return self._open[file]

    def close(self) -> None:
        """Let go of the files; tensors already read stay valid."""
        self._open.clear()

    def __enter__(self) -> "HFReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
