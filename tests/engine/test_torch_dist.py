"""Which boxes a run of entries is, and what is read into them. Whole checkpoints: tests/convert."""

import dataclasses
import itertools
import math
import types
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.engine.torch_dist import boxes
from mrl.engine.torch_dist.boxes import (
    Box,
    PlacedTensor,
    blocks,
    boxes_of_run,
    check,
    fill,
    write,
    write_index,
    write_metadata,
)
from mrl.engine.torch_dist.data_files import Item
from mrl.engine.torch_dist.reader import Chunk, StoredTensor, TorchDistReader, _check_cover, _lie_apart
from mrl.errors import CheckpointError

SHAPES = st.lists(st.integers(1, 5), max_size=4)


def test_a_part_that_begins_within_its_storage(tmp_path):
    """`torch.save` of a view keeps the whole storage, and says where the view begins in it."""
    whole = torch.arange(10.0)
    torch.save(whole[4:7], tmp_path / "data")
    item = Item("w", (0,), (3,), 0, (tmp_path / "data").stat().st_size)
    write_metadata(tmp_path, {"w": (torch.float32, (3,))}, {"data": [item]}, [])
    reader = TorchDistReader(tmp_path)
    assert torch.equal(reader.read("w", [(0, 3)]), whole[4:7]) and torch.equal(reader.read("w", [(1, 2)]), whole[5:6])


@given(SHAPES, st.data())
def test_a_run_of_entries_is_a_few_boxes(sizes, data):
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, math.prod(sizes))] * 2)))
    numbers = torch.arange(math.prod(sizes)).view(sizes)
    found = list(boxes_of_run(tuple(sizes), first, last))
    parts = [numbers[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))] for box in found]
    assert [n for part in parts for n in part.reshape(-1).tolist()] == list(range(first, last))
    assert len(found) <= max(1, 2 * len(sizes) - 1)


@given(st.integers(1, 6), st.integers(1, 4), st.booleans(), st.integers(0, 3), st.data())
def test_shards_of_a_parameter_are_boxes_of_what_it_is_made_of(rows, columns, by_rows, lead, data):
    """A parameter that is two tensors of a checkpoint, split by rows (gate and up) or by columns, in uneven shards."""
    parameter = torch.arange(rows * columns + lead)[lead:].view(rows, columns)  # somewhere in a buffer
    dim = 0 if by_rows else 1
    cut = data.draw(st.integers(0, parameter.shape[dim]))
    halves = parameter.split([cut, parameter.shape[dim] - cut], dim=dim)
    views = [
        Box(key, (9, 9, 9), (3, 1, 2), half[None], padded=key == "b") for key, half in zip("ab", halves, strict=True)
    ]
    placed = PlacedTensor(parameter, tuple(view for view in views if view.data.numel()), (0, 0, 0))
    ends = sorted({0, *data.draw(st.lists(st.integers(0, rows * columns), max_size=3)), rows * columns})
    found = {key: torch.full((1, rows, columns), -1) for key in "ab"}
    for start, end in itertools.pairwise(ends):
        memory = torch.cat([torch.zeros(2, dtype=torch.int64), parameter.reshape(-1)[start:end]])[2:]
        for box in placed.of_entries(slice(start, end), memory, "master."):
            assert box.whole == (9, 9, 9) and box.key.startswith("master.") and box.padded == (box.key[-1] == "b")
            place = tuple(
                slice(a - b, a - b + n) for a, b, n in zip(box.offsets, (3, 1, 2), box.data.shape, strict=True)
            )
            assert (found[box.key[-1]][place] == -1).all()
            found[box.key[-1]][place] = box.data
    for key, half in zip("ab", halves, strict=True):
        assert torch.equal(found[key][0, : half.shape[0], : half.shape[1]], half)


def test_a_box_of_a_copy_is_no_place_of_a_parameter():
    """What is read into one would be lost."""
    parameter = torch.arange(6.0).view(2, 3)
    PlacedTensor(parameter, (Box("a", (2, 3), (0, 0), parameter.t().t()[None]),), (0, 0, 0))
    with pytest.raises(AssertionError, match="copies"):
        PlacedTensor(parameter, (Box("a", (2, 3), (0, 0), parameter.clone()),), (0, 0, 0))


@given(SHAPES, st.integers(1, 40))
def test_blocks_are_small_and_in_order(sizes, block_bytes):
    numbers = torch.arange(math.prod(sizes), dtype=torch.int32).view(sizes)
    with mock.patch.object(boxes, "BLOCK_BYTES", block_bytes):
        found = list(blocks(numbers))
    assert all(part.numel() * 4 <= max(block_bytes, 4) for _, part in found)
    assert [n for _, part in found for n in part.reshape(-1).tolist()] == numbers.reshape(-1).tolist()
    for at, part in found:
        place = tuple(slice(a, a + n) for a, n in zip(at, part.shape, strict=True))
        assert torch.equal(numbers[place], part)


def test_what_ranks_wrote_is_read_in_another_split_with_other_padding(tmp_path, monkeypatch):
    """Two ranks with three rows each, of which the last is padding; then one tensor of eight rows, three of them padding."""
    monkeypatch.setattr(boxes, "BLOCK_BYTES", 16)
    rows = torch.arange(24.0).view(6, 4)
    ranks = [
        write(tmp_path / f"__{r}_0.distcp", [Box("w", (6, 4), (3 * r, 0), rows[3 * r : 3 * r + 3], padded=True)])
        for r in (0, 1)
    ]
    write_index(tmp_path, ranks)
    reader = TorchDistReader(tmp_path)
    whole, few = torch.full((8, 4), -1.0), torch.full((2, 4), -1.0)
    wanted = [Box("w", (8, 4), (0, 0), whole, padded=True), Box("w", (5, 4), (3, 0), few, padded=True)]
    check(reader, wanted)
    fill(reader, wanted)
    assert torch.equal(whole, torch.cat([rows, torch.zeros(2, 4)])) and torch.equal(few, rows[3:5])
    for box, says in (
        (Box("w", (8, 4), (0, 0), whole), r"has w in the shape \[6, 4\], and here it is \[8, 4\]"),
        (Box("w", (6, 5), (0, 0), whole, padded=True), r"here it is \[6, 5\]"),
        (Box("w", (6, 4, 1), (0, 0, 0), whole, padded=True), r"here it is \[6, 4, 1\]"),
        (Box("v", (6, 4), (0, 0), whole), "has no v"),
    ):
        with pytest.raises(CheckpointError, match=says):
            check(reader, [box])


def test_a_checkpoint_that_lacks_entries_is_never_made(tmp_path):
    one = write(tmp_path / "__0_0.distcp", [Box("w", (6, 4), (0, 0), torch.zeros(3, 4))])
    with pytest.raises(CheckpointError, match="w has 24 entries and its parts have 12"):
        write_index(tmp_path, [one])
    for at, says in (
        (0, "w has parts that lie over one another"), (2, "w has parts that lie over one another"),
        (4, "not inside its shape"), (-1, "not inside its shape"),
    ):  # fmt: skip
        other = write(tmp_path / "__1_0.distcp", [Box("w", (6, 4), (at, 0), torch.zeros(3, 4))])
        with pytest.raises(CheckpointError, match=says):
            write_index(tmp_path, [one, other])


def test_parts_that_begin_in_one_row_are_compared_along_it():
    """As those of a layer's experts, in one tensor of a checkpoint of Megatron-LM. By pairs this would take minutes."""
    shape, at = (2, 20_000, 2), itertools.product(range(2), range(20_000))
    chunks = tuple(Chunk((layer, expert, 0), (1, 1, 2), "x", 0, 0) for layer, expert in at)
    _check_cover("w", StoredTensor(torch.float32, shape, chunks))
    moved = dataclasses.replace(chunks[1], offsets=chunks[0].offsets)
    empty = dataclasses.replace(chunks[1], sizes=(1, 0, 2))
    for others, says in (
        ((moved, *chunks[2:]), "lie over one another"),
        ((*chunks[1:], empty), "two parts at one place"),
    ):
        with pytest.raises(ValueError, match=says):
            _check_cover("w", StoredTensor(torch.float32, shape, (chunks[0], *others)))


REGIONS = st.integers(0, 3).flatmap(
    lambda dims: st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), min_size=dims, max_size=dims), max_size=4
    )
)


@given(REGIONS)
def test_regions_lie_apart_if_no_two_meet(found):
    regions = [[(low, low + size) for low, size in region] for region in found]
    apart = [
        any(one[1] <= other[0] or other[1] <= one[0] for one, other in zip(*pair, strict=True))
        for pair in itertools.combinations(regions, 2)
    ]
    assert _lie_apart(regions) == all(apart)


def test_a_part_is_in_a_file_of_the_folder_and_stored_as_it_is(tmp_path):
    place = types.SimpleNamespace(relative_path="../x.distcp", offset=0, length=8)
    stored = types.SimpleNamespace(
        chunks=[types.SimpleNamespace(offsets=(0,), sizes=(2,))], size=(2,),
        properties=types.SimpleNamespace(state=[torch.float32]),
    )  # fmt: skip
    index = types.SimpleNamespace(fqn="w", offset=(0,))
    metadata = types.SimpleNamespace(storage_data=Entries([(index, place)]), state_dict_metadata={"w": stored})
    write_index(tmp_path, [write(tmp_path / "__0_0.distcp", [Box("v", (2,), (0,), torch.zeros(2))])])
    reader = TorchDistReader(tmp_path)
    with pytest.raises(ValueError, match=r"w is said to be in '../x.distcp', which is no file of this folder"):
        reader._take(metadata)
    place.transform_descriptors = ["zstd"]
    with pytest.raises(ValueError, match=r"w is stored with \['zstd'\], which is not supported"):
        reader._take(metadata)


class Entries(list):
    """Pairs of a mapping whose keys need no hash."""

    def items(self):
        return self


@pytest.mark.parametrize("file", [".metadata", "common.pt", "metadata.json"])
def test_a_full_disk_is_an_error_of_the_disk_whatever_is_written(tmp_path, file):
    """torch's writer has a RuntimeError for it, which would be a traceback of a save."""
    one = write(tmp_path / "__0_0.distcp", [Box("w", (3, 4), (0, 0), torch.zeros(3, 4))])
    (tmp_path / file).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_index(tmp_path, [one])


def test_memory_that_was_written_can_go_to_the_host(tmp_path):
    """Offload shrinks its storage, which torch refuses of memory that numpy, and so a file, was given."""
    data = torch.arange(6.0)
    write(tmp_path / "__0_0.distcp", [Box("w", (6,), (0,), data)])
    data.untyped_storage().resize_(0)
