"""Maps between files with stacked experts and the tables, which name one matrix an expert.

A `Stack` describes a stored tensor. It has the rows of each expert's parts in turn (gate 0, up 0, gate 1, ...) or one
part behind the other, as rows or, transposed, as columns; all experts are stacked.

    StackReader    takes the tables' names and reads the stored tensors
    stack_slice    shows a stored tensor as a lazy slice of the tables' tensors
    restack        makes stored tensors of a stream of the tables' tensors

`unstack_experts` chooses the reader of a folder.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from mrl.weights.algebra import Shape
from mrl.weights.pread import LazySlice, Region
from mrl.weights.quantized import dequantise
from mrl.weights.safetensors_io import Slice, TensorInfo, WeightReader
from mrl.weights.table import Family, HFConfig, Stack


@dataclasses.dataclass(frozen=True)
class StackPlace:
    """Is the place of a tensor of the tables: part `part` of `expert` in the stored tensor `stored`."""

    stack: Stack
    stored: str  # by the table's prefix
    expert: int
    part: int


@functools.cache
def _patterns(stacks: tuple[Stack, ...]) -> list[tuple[re.Pattern[str], Stack, int]]:
    def pattern(name: str) -> re.Pattern[str]:
        escaped = re.escape(name).replace(r"\{l\}", r"(?P<l>\d+)").replace(r"\{e\}", r"(?P<e>\d+)")
        return re.compile(escaped)

    return [(pattern(name), stack, part) for stack in stacks for part, name in enumerate(stack.parts)]


def place_of(family: Family, name: str) -> StackPlace | None:
    """Returns the stack of the tensor that the tables call `name`; None if files hold it by itself."""
    for pattern, stack, part in _patterns(family.stacks):
        if match := pattern.fullmatch(name):
            return StackPlace(stack, stack.stored.format(l=match["l"]), int(match["e"]), part)
    return None


def file_name(family: Family, name: str) -> str:
    """Returns the name in files of the tensor that the tables call `name`, alone or stacked with those of other
    experts."""
    place = place_of(family, name)
    return family.in_files(name if place is None else place.stored)


def interleaved_rows(family: Family, stored: str) -> int:
    """Returns how many parts' rows are interleaved in the stored tensor `stored`.

    These are 2 if gate and up alternate, and 1 if one is behind the other or for any tensor that is no stack.
    """
    for stack in family.stacks:
        if re.fullmatch(re.escape(stack.stored).replace(r"\{l\}", r"\d+"), stored):
            return len(stack.parts) if stack.interleaved else 1
    return 1


def stored_shapes(family: Family, shapes: dict[str, Shape]) -> dict[str, Shape]:
    """Returns the tensors of a folder, from those of the tables, in the same order."""
    stored: dict[str, Shape] = {}
    for name, shape in shapes.items():
        place = place_of(family, name)
        file = file_name(family, name)
        if place is None:
            stored[file] = shape
            continue
        rows, *columns = shape
        rows *= len(place.stack.parts)
        experts = max(stored.get(file, (0,))[0], place.expert + 1)
        stored[file] = (experts, *columns, rows) if place.stack.transposed else (experts, rows, *columns)
    return stored


def _part_of(source: Slice, place: StackPlace) -> LazySlice:
    """Returns one part of one expert in the stored tensor `source`, with rows and columns of its own."""
    stack, count = place.stack, len(place.stack.parts)
    _, *sizes = source.shape
    rows, *columns = reversed(sizes) if stack.transposed else sizes
    rows //= count

    def read(region: Region) -> Tensor:
        (first, last), *inside = region
        others = [slice(*bounds) for bounds in inside]
        if stack.interleaved:
            span, of_span = slice(first * count, last * count), slice(place.part, None, count)
        else:
            span, of_span = slice(place.part * rows + first, place.part * rows + last), slice(None)
        if stack.transposed:
            return source[place.expert, *others, span][:, of_span].t()
        return source[place.expert, span, *others][of_span]

    # the rows of a transposed one are columns of the file
    return LazySlice((rows, *columns), read, whole_rows=not stack.transposed)


def unstacking_read(read: Callable[[str], Slice], family: Family) -> Callable[[str], Slice]:
    """Returns `read`, which takes the files' names, for the tables' names too."""

    def read_either(name: str) -> Slice:
        place = place_of(family, name)
        source = read(file_name(family, name))
        return source if place is None else _part_of(source, place)

    return read_either


class StackReader:
    """Reads the stored tensors, and takes the tables' names too, as a `WeightReader`."""

    def __init__(self, reader: WeightReader, family: Family) -> None:
        self.path, self.tensors, self._stored = reader.path, reader.tensors, reader
        self._read = unstacking_read(reader, family)

    def __call__(self, name: str) -> Slice:
        return self._read(name)

    def close(self) -> None:
        self._stored.close()


def stack_slice(
    read: Callable[[str], Any], stack: Stack, names: Mapping[tuple[int, int], str], shape: Shape
) -> LazySlice:
    """Returns the stored tensor of `shape` as a lazy slice: the way back from `unstacking_read`.

    names: what the tables call part `part` of `expert`, by (expert, part). read: gives slices under these names.
    """

    def region(asked: Region) -> Tensor:
        (first, last), *inside = asked
        if stack.transposed:
            inside.reverse()
        sizes = [stop - start for start, stop in inside]
        whole = read(names[0, 0])[0:0].new_empty((last - first, *sizes))
        count, (low, high) = len(stack.parts), inside[0]
        size = shape[-1 if stack.transposed else 1] // count
        for expert in range(first, last):
            for part in range(count):
                if stack.interleaved:
                    rows = slice(-((part - low) // count), -((part - high) // count))
                    places = slice(rows.start * count + part - low, None, count)
                else:
                    rows = slice(max(low - part * size, 0), min(high - part * size, size))
                    places = slice(part * size + rows.start - low, part * size + rows.stop - low)
                if rows.start < rows.stop:
                    tensor = read(names[expert, part])[(rows, *(slice(*span) for span in inside[1:]))]
                    whole[expert - first, places] = tensor
        return whole.transpose(1, 2) if stack.transposed else whole

    return LazySlice(shape, region)


def restack(pairs: Iterable[tuple[str, Tensor]], family: Family, hf_config: HFConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields (stored name, tensor) from (the tables' name, tensor) in any order, a stored tensor with its last part.

    Parts are put into stored tensors as they come, and are not held.
    """
    waiting: dict[str, tuple[Tensor, set[tuple[int, int]]]] = {}
    for name, tensor in pairs:
        place = place_of(family, name)
        if place is None:
            yield family.in_files(name), tensor
        else:
            experts = hf_config["num_experts"]
            if place.stored not in waiting:
                waiting[place.stored] = (_empty(tensor, place.stack, experts), set())
            whole, found = waiting[place.stored]
            _put(tensor, whole, place)
            found.add((place.expert, place.part))
            if len(found) == experts * len(place.stack.parts):
                del waiting[place.stored]
                yield family.in_files(place.stored), whole
            del whole
        del tensor  # before there is memory for the next
    assert not waiting, f"parts are missing of {sorted(waiting)}"


def _empty(part: Tensor, stack: Stack, experts: int) -> Tensor:
    """Returns the stored tensor that `part` is of, with nothing in it."""
    rows, columns = part.shape[0] * len(stack.parts), part.shape[1:]
    return part.new_empty((experts, *columns, rows) if stack.transposed else (experts, rows, *columns))


def _put(part: Tensor, whole: Tensor, place: StackPlace) -> None:
    of_expert = whole[place.expert].t() if place.stack.transposed else whole[place.expert]
    if place.stack.interleaved:
        of_expert[place.part :: len(place.stack.parts)] = part
    else:
        of_expert.narrow(0, place.part * part.shape[0], part.shape[0]).copy_(part)


_STACKED = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")


class UnstackedReader:
    """Shows stacked experts (and their router) under the family's names, as a `WeightReader`; all else as it is.

    transformers 5 holds the experts of a layer as `mlp.experts.gate_up_proj` [experts, 2 * ffn, hidden] and
    `mlp.experts.down_proj` [experts, hidden, ffn]. `save_pretrained` splits them again, unless it is told
    `save_original_format=False`. Export always writes the names of the table.
    """

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
