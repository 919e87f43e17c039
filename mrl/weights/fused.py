"""Reads model folders with stacked experts under the names that the tables know.

transformers 5 holds the experts of a layer as `mlp.experts.gate_up_proj` [experts, 2 * ffn, hidden] and
`mlp.experts.down_proj` [experts, hidden, ffn]. `save_pretrained` splits them again, unless it is told
`save_original_format=False`. Export always writes the names of the table.
"""

from __future__ import annotations

import re

from torch import Tensor

from mrl.weights.pread import LazySlice, Region
from mrl.weights.quantized import dequantise
from mrl.weights.reader import Slice, WeightReader
from mrl.weights.safetensors_io import TensorInfo
from mrl.weights.stacks import StackReader
from mrl.weights.table import Family

_STACKED = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")


class UnstackedReader:
    """Shows stacked experts (and their router) under the family's names, as a `WeightReader`; all else as it is."""

    def __init__(self, reader: WeightReader, family: Family) -> None:
        self.path, self._stored = reader.path, reader
        self.tensors: dict[str, TensorInfo] = {}
        self._where: dict[str, tuple[str, int, int]] = {}  # stored name, expert, its first row there
        router = next(entry for entry in family.sparse if entry.mcore.endswith("router.weight")).hf[0][0]
        self._routers = {}
        for name, info in reader.tensors.items():
            match = _STACKED.fullmatch(name)
            if match is None or len(info.shape) != 3:
                self.tensors[name] = info
                continue
            layer = int(match[1])
            self._add(family, name, info, layer=layer, kind="row" if match[2] == "down_proj" else "gate_up")
            self._routers[router.format(l=layer)] = f"model.layers.{layer}.mlp.gate.weight"
        for name, stored in self._routers.items():
            if stored in self.tensors:
                self.tensors[name] = self.tensors.pop(stored)

    def _add(self, family: Family, stored: str, info: TensorInfo, *, layer: int, kind: str) -> None:
        entry = next(entry for entry in family.sparse if entry.of_expert and entry.kind == kind)
        experts, all_rows, columns = info.shape
        rows = all_rows // len(entry.hf)
        for expert in range(experts):
            for i, (pattern, _) in enumerate(entry.hf):
                name = pattern.format(l=layer, e=expert)
                self.tensors[name] = TensorInfo(info.dtype, (rows, columns), info.file)
                self._where[name] = (stored, expert, i * rows)

    def __call__(self, name: str) -> Slice:
        if name not in self._where:
            return self._stored(self._routers.get(name, name))
        stored, expert, first = self._where[name]
        source = self._stored(stored)

        def read(region: Region) -> Tensor:
            (start, stop), columns = region
            return source[expert, first + start : first + stop, slice(*columns)]

        return LazySlice(self.tensors[name].shape, read)

    def close(self) -> None:
        self._stored.close()


def unstack_experts(reader: WeightReader, family: Family) -> WeightReader:
    """Returns `reader`, or a view of it under the names of the family's tables.

    A view has no quantisation (mrl.weights.quantized), and one tensor an expert if the files hold experts stacked.
    """
    reader = dequantise(reader)
    if family.stacks or family.prefix != "model.":
        return StackReader(reader, family)
    if family.sparse and any(_STACKED.fullmatch(name) for name in reader.tensors):
        return UnstackedReader(reader, family)
    return reader
