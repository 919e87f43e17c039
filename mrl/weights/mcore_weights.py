"""Shows the model part of an mcore distributed checkpoint under Hugging Face names: the tables, read the other way.

In a distributed checkpoint every tensor is whole, as on a single rank, whatever layout wrote it. `param_map` of a
single rank maps its rows to those of HF tensors. Keys are mcore's names, except for experts. All experts of a layer are
one tensor [experts, ...] at `mlp.experts.experts.linear_fcN.weight`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mrl.errors import CheckpointError
from mrl.weights.accounting import account, num_mtp_layers
from mrl.weights.algebra import Shape
from mrl.weights.fields import HINTS, rotary_percent
from mrl.weights.pread import LazySlice, Region
from mrl.weights.pt_file import load_pt
from mrl.weights.rules import Rule, whole_rules
from mrl.weights.safetensors_io import DTYPES, NAMES, Slice, TensorInfo, WeightReader
from mrl.weights.stacks import file_name, place_of, stack_slice
from mrl.weights.stacks import stored_shapes as files_shapes
from mrl.weights.table import Family, HFConfig, Stack

FOLDER = "mcore"
MARKER = "COMPLETE"
DESCRIPTION = "engine.pt"
_COMMON_FIELDS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts", "tie_word_embeddings",
)  # fmt: skip
_REDUNDANT = (
    "rope_parameters"  # by rope_theta, rope_scaling and partial_rotary_factor, and with other keys in each transformers
)
_LOCAL_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.\d+\.")
_TE_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc\d\.(?:weight|bias))\d+$")
_NOT_WEIGHTS = re.compile(r"^optimizer\.|\._extra_state(/|$)|^common_state(/|$)")


def stored_key(rule: Rule) -> str:
    """Returns the key of a rule's parameter in a distributed checkpoint. An expert shares it with the other experts."""
    if rule.expert is None:
        return rule.mcore
    name = _TE_EXPERT.sub(r".mlp.experts.experts.\1", rule.mcore)
    return _LOCAL_EXPERT.sub(".mlp.experts.experts.", name)


def stored_shapes(rules: Iterable[Rule]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of the checkpoint by key, experts stacked, in model order."""
    shapes: dict[str, tuple[int, ...]] = {}
    experts: dict[str, int] = {}
    for rule in rules:
        key = stored_key(rule)
        shapes[key] = rule.shape()
        if rule.expert is not None:
            experts[key] = experts.get(key, 0) + 1
    return {key: (experts[key], *shape) if key in experts else shape for key, shape in shapes.items()}


def stored_dtypes(rules: Iterable[Rule], family: Family, tensors: Mapping[str, TensorInfo]) -> dict[str, torch.dtype]:
    """Returns the dtype of every tensor of the checkpoint by key. It holds each of the tensor's sources exactly.

    tensors: of a model, by the names of its files.
    """
    dtypes: dict[str, torch.dtype] = {}
    for rule in rules:
        key = stored_key(rule)
        for name in rule.hf:
            dtype = DTYPES[tensors[file_name(family, name)].dtype]
            dtypes[key] = torch.promote_types(dtype, dtypes.get(key, dtype))
    return dtypes


BLOCK_ENTRIES = 2**19
"""Entries of a block. It stays in the processor's cache while it is read, summed and written."""


def row_blocks(rule: Rule, read: Callable[[str], Any]) -> Iterator[Tensor]:
    """Yields the whole mcore parameter of a single rank's rule, as blocks of rows of about `BLOCK_ENTRIES`, in order.

    The rows are those of `rule.load(read)`, without holding them at once.
    """
    assert rule.degree == 1, f"{rule.mcore}: rule of one of {rule.degree} shards"
    for span in rule.spans(0):
        assert span.source is not None, f"{rule.mcore}: padding on a single rank"
        shape = rule.hf_shapes[span.source]
        whole_rows = span.dim == 0 or (span.start, span.length) == (0, shape[span.dim])
        assert whole_rows, f"{rule.mcore}: not made of whole rows"
        first, count = (span.start, span.length) if span.dim == 0 else (0, shape[0])
        yield from blocks_of_rows(read(rule.hf[span.source]), shape, first, first + count)


def blocks_of_rows(source: Any, shape: Shape, first: int, last: int) -> Iterator[Tensor]:
    """Yields rows `first` to `last` of a tensor or lazy slice of `shape`, as blocks of about `BLOCK_ENTRIES`."""
    step = max(BLOCK_ENTRIES // max(math.prod(shape[1:]), 1), 1)
    if isinstance(source, LazySlice) and not source.whole_rows:
        step = max(last - first, 1)
    for start in range(first, last, step):
        yield source[start : min(start + step, last)]


@dataclasses.dataclass(frozen=True)
class _EntryRange:
    """Maps `length` entries from `start` of dimension `dim` of an HF tensor to those from `at` of the mcore tensor."""

    dim: int
    start: int
    length: int
    at: int


class StoredTensors(Protocol):
    """Reads the tensors of a distributed checkpoint by region (`mrl.engine.torch_dist.reader.TorchDistReader`)."""

    path: Path
    tensors: Mapping[str, Any]  # by key in the checkpoint; each has a `dtype` and a `shape`

    def read(self, key: str, region: Region) -> Tensor: ...


class McoreReader:
    """Reads the weights of the distributed checkpoint `stored`, as a `WeightReader`, in the dtype that they have there.

    `tensors` has the names of files. If files hold experts stacked, a reader takes the names of the tables too. Every
    tensor of the model is accounted for, in both directions; ModelError lists those missing, left over or of
    another shape.

    beside: tensors that are not in the checkpoint, and belong to its model (`CarriedReader`). spec, head: as the
    checkpoint was saved. mtp: how many MTP layers it holds.
    """

    def __init__(
        self, stored: StoredTensors, family: Family, hf_config: HFConfig, beside: WeightReader, *,
        spec: str = "local", head: str = "lm",
    ) -> None:  # fmt: skip
        self.path, self._stored, self._beside = stored.path, stored, beside
        self.mtp = num_mtp_layers(hf_config) if any(key.startswith("mtp.") for key in stored.tensors) else 0
        self.rules = whole_rules(family, hf_config, spec=spec, head=head, mtp=self.mtp)
        _account(stored, self.rules)
        self._where: dict[str, tuple[Rule, list[_EntryRange]]] = {}
        self._stacks: dict[str, tuple[Stack, dict[tuple[int, int], str]]] = {}
        self._of_file: dict[str, str] = {}
        shapes: dict[str, Shape] = {}
        dtypes: dict[str, str] = {}
        for rule in self.rules.values():
            places: list[list[_EntryRange]] = [[] for _ in rule.hf]
            at = 0
            for span in rule.spans(0):
                if span.source is not None:
                    places[span.source].append(_EntryRange(span.dim, span.start, span.length, at))
                at += span.length
            dtype = NAMES[stored.tensors[stored_key(rule)].dtype]
            for name, shape, of_name in zip(rule.hf, rule.hf_shapes, places, strict=True):
                shapes[name] = tuple(shape)
                self._where[name] = rule, sorted(of_name, key=lambda place: place.start)
                place = place_of(family, name)
                file = file_name(family, name)
                dtypes[file] = dtype
                if place is None:
                    self._of_file[file] = name
                else:
                    _, parts = self._stacks.setdefault(file, (place.stack, {}))
                    parts[place.expert, place.part] = name
        self._shapes = shapes
        self.tensors = {n: TensorInfo(dtypes[n], tuple(s)) for n, s in files_shapes(family, shapes).items()}
        self._carried = beside.tensors.keys() - self.tensors.keys()  # others have trained
        self.tensors |= {name: beside.tensors[name] for name in self._carried}

    def __call__(self, name: str) -> Slice:
        if name in self._carried:
            return self._beside(name)
        if name in self._stacks:
            return stack_slice(self, *self._stacks[name], self.tensors[name].shape)
        name = self._of_file.get(name, name)
        return LazySlice(self._shapes[name], lambda region: self._read(name, region))

    def _read(self, name: str, region: Region) -> Tensor:
        rule, places = self._where[name]
        key = stored_key(rule)
        lead = [] if rule.expert is None else [(rule.expert, rule.expert + 1)]
        parts = []
        for place in places:
            low, high = region[place.dim]
            low, high = max(low, place.start), min(high, place.start + place.length)
            if low < high:
                shift = place.at - place.start
                part = [*region[: place.dim], (low + shift, high + shift), *region[place.dim + 1 :]]
                tensor = self._stored.read(key, [*lead, *part])
                parts.append(tensor[0] if lead else tensor)
        if not parts:
            return torch.empty([stop - start for start, stop in region], dtype=self._stored.tensors[key].dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=places[0].dim)

    def close(self) -> None:
        self._beside.close()


def _account(stored: StoredTensors, rules: dict[str, Rule]) -> None:
    """Compares the tensors of the checkpoint with those of the model. Rows may be more than those of a vocabulary."""
    expected = stored_shapes(rules.values())
    padded = {stored_key(rule) for rule in rules.values() if rule.kind == "vocab"}
    found = {}
    for key, tensor in stored.tensors.items():
        shape = tuple(tensor.shape)
        if key in padded:
            shape = (min(shape[0], expected[key][0]), *shape[1:])
        found[key] = TensorInfo(NAMES.get(tensor.dtype, str(tensor.dtype)), shape)
    others = {key for key in found if _NOT_WEIGHTS.search(key)}
    account(found, expected, where=str(stored.path), may_have=others)


def is_imported(path: str | Path) -> bool:
    """Returns whether `path` is a whole folder of `mrl convert import`. A model may start from one."""
    folder = Path(path)
    return all((folder / name).exists() for name in (MARKER, FOLDER, "config.json"))


def read_description(path: str | Path) -> dict:
    """Returns `engine.pt` of a checkpoint of the Megatron engine: layout, architecture, counts."""
    return load_pt(Path(path) / DESCRIPTION, fields=("architecture",))


def architecture(family: Family, hf_config: HFConfig) -> dict[str, Any]:
    """Returns the fields of config.json that decide a model's maths, for `engine.pt`. The family reads them."""
    more = family.reads - HINTS - {_REDUNDANT, *_COMMON_FIELDS}
    fields = {name: hf_config.get(name) for name in (*_COMMON_FIELDS, *sorted(more))}
    return fields | {"partial_rotary_factor": rotary_percent(hf_config)}


def check_architecture(saved: Mapping[str, Any], family: Family, hf_config: HFConfig, where: str | Path) -> None:
    """Refuses another config.json, found at `where`, than the checkpoint's.

    saved: from `architecture`, perhaps by an older mrl, which saved fewer fields. Others than the family reads do not
    count.
    """
    own = architecture(family, hf_config)
    fields = {name: value for name, value in saved.items() if name in own}  # FSDP saves all fields of a composite
    differ = differing_fields(fields, own, "in the checkpoint", "in config.json")
    if differ:
        raise CheckpointError(
            where, why=f"is another model: {'; '.join(differ)}", fix="give the model that was trained"
        )


def differing_fields(a: Mapping[str, Any], b: Mapping[str, Any], in_a: str, in_b: str) -> list[str]:
    """Returns a line for each field that `a` and `b` have differently; between two families, for the family alone."""
    names = ["model_type"] if a["model_type"] != b["model_type"] else [name for name in a if a[name] != b.get(name)]
    return [f"{name} is {a[name]!r} {in_a} and {b.get(name)!r} {in_b}" for name in names]
