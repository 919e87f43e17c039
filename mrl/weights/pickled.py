"""Reads the weights of folders with pickle files alone, if the user allows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from mrl.errors import CheckpointError, ModelError
from mrl.weights.pt_file import load_pt
from mrl.weights.safetensors_io import NAMES, TensorInfo, read_index, shorten_list

PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


class PickleReader:
    """Reads the weights of a folder with `pytorch_model.bin` files, as a `WeightReader`.

    torch's `weights_only` builds tensors and runs nothing else. Files are mapped, so unused parts are not read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        index, single = self.path / PICKLE_INDEX, self.path / PICKLE
        weight_map = None
        if index.is_file():
            weight_map = read_index(index)
        elif not single.is_file():
            raise ModelError(
                self.path, why=f"has neither {PICKLE} nor {PICKLE_INDEX}", fix="give a folder with weights"
            )
        files = [PICKLE] if weight_map is None else sorted(set(weight_map.values()))
        lost = [name for name in files if not (self.path / name).is_file()]
        if lost:
            raise ModelError(
                self.path,
                why=f"{PICKLE_INDEX} names {shorten_list(lost)}, not in the folder",
                fix="get the missing files",
            )
        self.tensors: dict[str, TensorInfo] = {}
        self._weights: dict[str, Tensor] = {}
        for name in files:
            self._take(name, self._load(name), weight_map)

    def _load(self, name: str) -> dict[str, Any]:
        try:
            return load_pt(self.path / name, mmap=True)
        except CheckpointError as error:
            raise ModelError(self.path / name, why=error.why, fix="save it as safetensors") from None

    def _take(self, name: str, content: Any, weight_map: dict[str, str] | None) -> None:
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise ModelError(
                self.path / name, why="holds more than tensors by name", fix="save the model as safetensors"
            )
        promised = content.keys() if weight_map is None else {n for n, file in weight_map.items() if file == name}
        if content.keys() != promised:
            odd = sorted(content.keys() ^ promised)
            raise ModelError(
                self.path / PICKLE_INDEX,
                why=f"does not agree with {name} about {shorten_list(odd)}",
                fix="get both files again",
            )
        for key, tensor in content.items():
            if tensor.dtype not in NAMES:
                raise ModelError(
                    self.path / name, why=f"{key} is {tensor.dtype}, which cannot be read", fix="save it as bfloat16"
                )
            self._weights[key] = tensor
            self.tensors[key] = TensorInfo(NAMES[tensor.dtype], tuple(tensor.shape), name)

    def __call__(self, name: str) -> Tensor:
        if name not in self._weights:
            raise ModelError(self.path, why=f"has no tensor {name}")
        return self._weights[name]

    def close(self) -> None:
        self._weights.clear()
