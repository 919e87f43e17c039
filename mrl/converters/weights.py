"""What each reader of weights can do, whatever the files are that it reads: the one type that conversions and engines
know.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from mrl.converters.algebra import Shape
from mrl.converters.safetensors_io import TensorInfo


class Slice(Protocol):
    """A tensor, or one that is read as far as it is indexed: `[a:b]`, `[:, a:b]`, `[i, a:b, c:d]`, and `[()]` for all
    of it.
    """

    @property
    def shape(self) -> Shape: ...

    def __getitem__(self, key: Any) -> Tensor: ...


class WeightReader(Protocol):
    """The weights of a model by name, read from several threads at the moment that they are asked for."""

    @property
    def path(self) -> Path:
        """The folder or file, for messages."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The dtype and shape of each, by name."""

    def __call__(self, name: str) -> Slice:
        """Returns the tensor `name`; UserError where it is not there or its file is damaged."""

    def close(self) -> None:
        """Closes the files; tensors that were read stay valid."""
