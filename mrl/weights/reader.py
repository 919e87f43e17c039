"""Defines what each reader of weights can do, whatever files it reads: the one type that conversions and engines
know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from mrl.weights.algebra import Shape
from mrl.weights.safetensors_io import TensorInfo


class Slice(Protocol):
    """Is a tensor, or one that is read as far as it is indexed: `[a:b]`, `[:, a:b]`, `[i, a:b, c:d]`, and `[()]` for
    all."""

    @property
    def shape(self) -> Shape: ...

    def __getitem__(self, key: Any) -> Tensor: ...


class WeightReader(Protocol):
    """Gives the weights of a model by name, read on demand and from several threads."""

    @property
    def path(self) -> Path:
        """Returns the folder or file, for messages."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Returns the dtype and shape of each, by name."""

    def __call__(self, name: str) -> Slice:
        """Returns the tensor `name`; UserError if it is not there or its file is damaged."""

    def close(self) -> None:
        """Closes the files; tensors that were read stay valid."""
