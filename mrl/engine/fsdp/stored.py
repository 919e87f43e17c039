"""A checkpoint of the FSDP engine, shown under the names of Hugging Face files, with no process group."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mrl.engine.fsdp.names import STATE, FileTensor, file_tensors
from mrl.engine.torch_dist.reader import TorchDistReader
from mrl.errors import CheckpointError
from mrl.weights.composites import CarriedReader
from mrl.weights.mcore_weights import check_architecture
from mrl.weights.pread import LazySlice, Region
from mrl.weights.pt_file import load_pt
from mrl.weights.rules import buffer_names, expected_hf_names
from mrl.weights.safetensors_io import DTYPES, NAMES, Slice, TensorInfo, count_groups
from mrl.weights.stacks import unstacking_read
from mrl.weights.table import Family, HFConfig

PREFIX = "model."


class FSDPReader:
    """Reads the fp32 weights of the checkpoint folder `path` as a `WeightReader` in `dtype`.

    Every tensor is accounted for, in both directions; CheckpointError lists the differences. companions: the folder of
    `hf_config`, whose carried tensors are read as they are there. head: "lm" or "value", by its output layer. It takes
    the tables' names, too.
    """

    def __init__(
        self, path: str | Path, family: Family, hf_config: HFConfig, dtype: torch.dtype, companions: str | Path
    ) -> None:
        about = load_pt(Path(path) / STATE)
        check_architecture(about["architecture"], family, hf_config, companions)
        self.path, self._family = Path(path), family
        self._stored = TorchDistReader(path)
        self._buffers = buffer_names(family, hf_config)  # fp32 in every export
        output = self._stored.tensors.get(PREFIX + "lm_head.weight")
        self.head = "value" if output is not None and output.shape[0] == 1 < hf_config["vocab_size"] else "lm"
        expected = expected_hf_names(family, hf_config, head=self.head)
        self.tensors: dict[str, TensorInfo] = {}
        self._where: dict[str, tuple[str, FileTensor]] = {}
        infos: dict[str, TensorInfo] = {}
        for key, tensor in self._stored.tensors.items():
            if key.startswith(PREFIX):
                name = key.removeprefix(PREFIX)
                for part in file_tensors(name, tensor.shape, family=family, head=self.head):
                    kept = torch.float32 if part.name in self._buffers else dtype
                    infos[part.name] = TensorInfo(NAMES[kept], _shape(part, tensor.shape))
                    self._where[part.name] = key, part
        missing = [name for name in expected if name not in infos]
        left = [name for name in infos if name not in expected]
        shapes = [n for n in expected if n in infos and infos[n].shape != tuple(expected[n])]
        parts = count_groups({"missing": missing, "left over": left, "of another shape": shapes})
        if parts:
            raise CheckpointError(
                path,
                why=f"tensors do not fit the model's config.json: {', '.join(parts)}",
                fix="give the config.json of the model that was trained",
            )
        self._carried = CarriedReader(companions, family)
        self.tensors = {name: infos[name] for name in expected} | dict(self._carried.tensors)

    def __call__(self, name: str) -> Slice:
        return self._slice(name) if name in self.tensors else unstacking_read(self._slice, self._family)(name)

    def _slice(self, name: str) -> Slice:
        if name not in self._where:
            return self._carried(name)
        return LazySlice(self.tensors[name].shape, lambda region: self._read(name, region))

    def _read(self, name: str, region: Region) -> Tensor:
        key, part = self._where[name]
        if part.expert is None:
            stored = self._stored.read(key, region)
        else:
            (low, high), *rest = region
            rows = (low + part.start, high + part.start)
            stored = self._stored.read(key, [(part.expert, part.expert + 1), rows, *rest])[0]
        return stored.to(DTYPES[self.tensors[name].dtype])

    def close(self) -> None:
        self._carried.close()


def _shape(part: FileTensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    if part.expert is None:
        return tuple(shape)
    stop = shape[1] if part.stop is None else part.stop
    return (stop - part.start, *shape[2:])
