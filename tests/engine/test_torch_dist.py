"""Where the parts of a stored tensor are looked for. Reading whole checkpoints: tests/convert."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.engine.torch_dist.data_files import Item
from mrl.engine.torch_dist.metadata import write_metadata
from mrl.engine.torch_dist.reader import Chunk, StoredTensor, TorchDistReader, _overlap

CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(CUTS, CUTS, st.data())
def test_every_part_that_meets_a_region_is_found(rows, columns, data):
    """rows, columns: sizes of the parts of a grid."""
    spans = [list(zip(itertools.accumulate([0, *sizes]), sizes, strict=False)) for sizes in (rows, columns)]
    chunks = tuple(
        Chunk((top, left), (height, width), "file", 0, 0) for (top, height), (left, width) in itertools.product(*spans)
    )
    stored = StoredTensor(None, (sum(rows), sum(columns)), chunks)
    region = [tuple(sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))) for size in stored.shape]
    met = [chunk for chunk in chunks if _overlap(chunk, region) is not None]
    assert set(met) <= set(stored.near(region))


def test_one_expert_of_many_is_found_at_once():
    chunks = tuple(Chunk((expert, 0), (1, 8), "file", 0, 0) for expert in range(256))
    assert StoredTensor(None, (256, 8), chunks).near([(17, 18), (0, 8)]) == (chunks[17],)


def test_a_part_that_begins_within_its_storage(tmp_path):
    """`torch.save` of a view keeps the whole storage, and says where the view begins in it."""
    whole = torch.arange(10.0)
    torch.save(whole[4:7], tmp_path / "data")
    item = Item("w", (0,), (3,), 0, (tmp_path / "data").stat().st_size)
    write_metadata(tmp_path, {"w": (torch.float32, (3,))}, {"data": [item]}, [])
    reader = TorchDistReader(tmp_path)
    assert torch.equal(reader.read("w", [(0, 3)]), whole[4:7]) and torch.equal(reader.read("w", [(1, 2)]), whole[5:6])
    reader.close()
