"""Merges adapters over their base into one model: those of a checkpoint, or of a folder that peft loads.

A tensor is the base's in the run's dtype, with the adapter added in fp32, as the engines stream it. Buffers keep fp32,
as they do in the engines.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.config.schema import LoraConfig
from mrl.engine.fsdp.names import FileTensor, file_tensors
from mrl.engine.lora import identity
from mrl.engine.lora.folder import adapters, read_adapter
from mrl.engine.lora.shapes import SCORE as SCORE_IN_FILE
from mrl.engine.lora.shapes import AdapterShape, adapter_shapes, first_difference, interleave, join_experts
from mrl.engine.stored_weights import stored_weights
from mrl.engine.torch_dist.reader import TorchDistReader
from mrl.errors import CheckpointError, ModelError
from mrl.weights.accounting import SCORE
from mrl.weights.adapter_folder import CONFIG, MERGE
from mrl.weights.composites import COMPOSITES, CarriedReader
from mrl.weights.mcore_weights import FOLDER, is_imported
from mrl.weights.pread import LazySlice, Region
from mrl.weights.rules import buffer_names, expected_hf_names
from mrl.weights.safetensors_io import DTYPES, NAMES, Slice, TensorInfo
from mrl.weights.stacks import interleaved_rows, unstacking_read
from mrl.weights.table import Family, HFConfig


@dataclasses.dataclass(frozen=True)
class SavedAdapters:
    """Describes the adapters of a checkpoint, as it does itself."""

    lora: LoraConfig
    head: str  # "lm" or "value"
    base: str  # fingerprint of the model that they are over
    path: str  # where that model was


def saved_adapters(description: Mapping[str, Any]) -> SavedAdapters | None:
    """Returns the adapters in an engine's description of a checkpoint; None if it holds a whole model."""
    saved = description.get("adapters")
    if saved is None:
        return None
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in saved["lora"].items()
    }
    return SavedAdapters(LoraConfig(**fields), saved["head"], saved["base"], saved["path"])


def tensors_of(
    folder: Path, shapes: Mapping[str, AdapterShape], family: Family, *, head: str, hidden: int
) -> dict[str, Tensor]:
    """Returns every adapter tensor of a checkpoint, fp32, by its name in peft's file. Raises CheckpointError for
    others."""
    # the Megatron engine has a folder for its tensors, the FSDP engine a prefix for their names
    mcore = folder / FOLDER
    stored, prefix = (TorchDistReader(mcore), "") if mcore.is_dir() else (TorchDistReader(folder), "model.")
    interleaved = {shape.b_name: interleaved_rows(family, name) for name, shape in shapes.items()}
    tensors = {}
    for name, shape in adapter_shapes(shapes, head, hidden).items():
        key = prefix + name
        if key not in stored.tensors:
            raise CheckpointError(
                folder, why=f"has no {name}", fix="it is not of the adapters that its model.lora names"
            )
        sizes = stored.tensors[key].shape
        tensor = stored.read(key, [(0, size) for size in sizes]).float()
        if len(sizes) == 3:  # megatron has one matrix an expert: A [E, R, I], B [E, O, R]
            if name in interleaved:  # and gate above up; the file's rows may be interleaved
                tensor = join_experts(interleave(tensor, interleaved[name]), "B")
            else:
                tensor = join_experts(tensor, "A")
        if tuple(tensor.shape) != tuple(shape):
            raise CheckpointError(folder, why=f"{name} is {list(tensor.shape)}, and model.lora makes it {list(shape)}")
        tensors[name] = tensor.contiguous()
    return tensors


class MergedReader:
    """Reads the weights of `base`, a Hugging Face folder, with adapters added in: a `WeightReader` in `dtype`, buffers
    in fp32. It takes the tables' names, too.

    base: its own weights by name, in the dtype that they have there. adapter: its tensors, fp32. shapes: the layer of
    each.
    """

    def __init__(
        self, base: str, family: Family, hf_config: HFConfig, *, head: str, dtype: torch.dtype,
        shapes: Mapping[str, AdapterShape], adapter: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        self.path, self.head, self.shapes, self.adapter, self._family = Path(base), head, shapes, adapter, family
        self._ends, self._last = contextlib.ExitStack(), threading.local()
        stored = stored_weights(base, family, hf_config, head=head, trained=True)
        self.base: Callable[[str], Any] = self._ends.enter_context(stored)
        self._beside = CarriedReader(base, family)
        self._ends.callback(self._beside.close)
        expected, self._buffers = expected_hf_names(family, hf_config, head=head), buffer_names(family, hf_config)
        self.tensors = {name: TensorInfo("", tuple(shape)) for name, shape in expected.items()}
        self._set_dtype(dtype)
        self._where = dict(_places(shapes, family, head))
        lost = sorted(self._where.keys() - expected.keys())
        if lost:
            raise ModelError(
                base, why=f"has no {lost[0]}, which an adapter is for", fix="give the model that it was trained over"
            )

    def _set_dtype(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.tensors = {
            name: dataclasses.replace(info, dtype=NAMES[torch.float32 if name in self._buffers else dtype])
            for name, info in self.tensors.items()
        } | dict(self._beside.tensors)

    def in_dtype(self, dtype: torch.dtype) -> "MergedReader":
        """Returns the same weights in another dtype. Closing either closes both."""
        other = copy.copy(self)
        other._set_dtype(dtype)
        return other

    def __call__(self, name: str) -> Slice:
        return self._stored(name) if name in self.tensors else unstacking_read(self._stored, self._family)(name)

    def _stored(self, name: str) -> Slice:
        if name in self._beside.tensors:
            return self._beside(name)
        return LazySlice(self.tensors[name].shape, lambda region: self._read(name, region))

    def _read(self, name: str, region: Region) -> Tensor:
        part, dtype = tuple(slice(low, high) for low, high in region), DTYPES[self.tensors[name].dtype]
        if name == SCORE:
            return self.adapter[SCORE_IN_FILE][part].to(dtype)
        weight = self.base(name)[part].to(dtype)
        if name not in self._where:
            return weight
        shape, tensor = self._where[name]
        if shape.experts and tensor.expert is None:  # stacked in the files as in memory
            delta = torch.stack([self._delta(shape, expert)[part[1:]] for expert in range(*region[0])])
        else:
            delta = self._delta(shape, tensor.expert)[tensor.start : tensor.stop][part]
        return (weight.float() + delta).to(dtype)

    def _delta(self, shape: AdapterShape, expert: int | None) -> Tensor:
        """Returns the adapter's part of a weight, or of one expert's. A thread keeps its last: blocks come in order."""
        key = (shape.name, expert)
        if getattr(self._last, "key", None) != key:
            a, b = self.adapter[shape.a_name], self.adapter[shape.b_name]
            self._last.delta = shape.delta(a, b) if expert is None else shape.delta_of_expert(a, b, expert)
            self._last.key = key
        return self._last.delta

    def close(self) -> None:
        self._ends.close()


def _places(
    shapes: Mapping[str, AdapterShape], family: Family, head: str
) -> Iterator[tuple[str, tuple[AdapterShape, FileTensor]]]:
    """Yields (file name, adapter and part of its layer) for every tensor with an adapter."""
    for name, shape in shapes.items():
        size = (shape.out_features, shape.in_features)
        parameter = name if shape.experts else f"{name}.weight"
        for tensor in file_tensors(
            parameter, (shape.experts, *size) if shape.experts else size, family=family, head=head
        ):
            yield tensor.name, (shape, tensor)


def merge_checkpoint_adapters(
    folder: Path,
    saved: SavedAdapters,
    companions: Path,
    family: Family,
    hf_config: HFConfig,
    dtype: torch.dtype,
) -> MergedReader:
    """Returns the checkpoint's adapters over the base in `companions`. Raises CheckpointError if it is another."""
    tables: list[Family | None] = [family]
    if family.model_type in COMPOSITES and not is_imported(companions):
        tables.append(None)  # the FSDP engine has no table of a composite, and hashes the folder's own tensors
    if saved.base not in (identity.fingerprint(str(companions), table, hf_config, saved.head) for table in tables):
        raise CheckpointError(
            companions,
            why=f"its weights are not those of {saved.path}, which the adapters were trained over",
            fix="give the base with --model, as a Hugging Face folder",
        )
    shapes = adapters(str(companions), saved.lora, saved.head)
    tensors = tensors_of(folder, shapes, family, head=saved.head, hidden=hf_config["hidden_size"])
    return MergedReader(
        str(companions), family, hf_config, head=saved.head, dtype=dtype, shapes=shapes, adapter=tensors
    )


def merge_adapter_folder(
    folder: Path, base: str, family: Family, hf_config: HFConfig, dtype: torch.dtype
) -> MergedReader:
    """Returns the adapters of a folder that peft or mrl wrote, over the base in the folder `base`."""
    from mrl.engine.lora.selection import shapes_of_folder  # peft is slow to import

    _, adapter = read_adapter(folder)
    shapes, head = shapes_of_folder(str(folder), base)
    expected = adapter_shapes(shapes, head, hf_config["hidden_size"])
    difference = first_difference(adapter, expected)
    if difference is not None:
        name, there, here, count = difference
        raise ModelError(
            folder,
            why=f"{name} is {there}, and its {CONFIG} over {base} makes it {here} ({count} tensors differ)",
            fix=f"give the base with --model, or {MERGE}",
        )
    adapter = {name: tensor.float() for name, tensor in adapter.items()}
    return MergedReader(base, family, hf_config, head=head, dtype=dtype, shapes=shapes, adapter=adapter)
