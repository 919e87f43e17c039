"""Writing folders that transformers loads, and reading only folders that are whole.

Parts of a stored tensor are those of the tensor, however they are read.
"""

from __future__ import annotations

import itertools
import json
import os
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.errors import ConfigError, ModelError
from mrl.weights.pread import MIN_BYTES, LazySlice, TruncatedFile, read_region
from mrl.weights.safetensors_io import (
    INDEX,
    SINGLE,
    HFWriter,
    SafetensorsReader,
    TensorInfo,
    copy_companions,
    parse_size,
    read_header,
    tensor_infos,
)

TENSORS = {f"layer.{i}.weight": torch.arange(i + 1, i + 13.0).reshape(3, 4) for i in range(5)}
INFOS = tensor_infos({name: tuple(t.shape) for name, t in TENSORS.items()}, torch.float32)


def write(out, tensors=TENSORS, **options) -> None:
    infos = {name: TensorInfo("F32", tuple(t.shape)) for name, t in tensors.items()}
    with HFWriter(out, infos, **options) as writer:
        for name in random.Random(3).sample(list(tensors), len(tensors)):  # any order
            writer.add(name, tensors[name])


@pytest.mark.parametrize("limit", ["5GB", 100, 1])
def test_reads_back_what_was_written(tmp_path, limit):
    write(tmp_path, max_shard_size=limit)
    with SafetensorsReader(tmp_path) as reader:
        assert list(reader.tensors) == list(TENSORS)
        assert all(torch.equal(reader(name)[()], TENSORS[name]) for name in TENSORS)
        assert torch.equal(reader("layer.1.weight")[1:3], TENSORS["layer.1.weight"][1:3])
        assert torch.equal(reader("layer.1.weight")[:, 1:3], TENSORS["layer.1.weight"][:, 1:3])
    names = sorted(file.name for file in tmp_path.iterdir())
    shards = {"5GB": 1, 100: 3, 1: 5}[limit]
    if shards == 1:
        assert names == [SINGLE]
    else:
        assert names == [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)] + [INDEX]
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == 5 * 48
    together = {}
    for file in tmp_path.glob("*.safetensors"):
        together |= load_file(file)  # the reference implementation accepts the files
    assert together.keys() == TENSORS.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_odd_shapes(tmp_path, dtype):
    tensors = {
        "a": torch.randn(3, 5).to(dtype),
        "empty": torch.zeros(0, 4, dtype=dtype),
        "one": torch.ones((), dtype=dtype),
    }
    infos = {k: i for name, t in tensors.items() for k, i in tensor_infos({name: tuple(t.shape)}, dtype).items()}
    with HFWriter(tmp_path, infos) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    back = load_file(tmp_path / SINGLE)
    assert all(torch.equal(back[name], tensors[name]) and back[name].dtype == dtype for name in tensors)


def test_config_follows_the_dtype_written(saved, tmp_path):
    hf = saved("llama")
    infos = tensor_infos({"model.norm.weight": (32,)}, torch.bfloat16)
    with HFWriter(tmp_path, infos, companions=hf.path, config_changes={"num_labels": 1}) as writer:
        writer.add("model.norm.weight", hf.weights["model.norm.weight"])
    before, after = (json.loads((path / "config.json").read_text()) for path in (hf.path, tmp_path))
    assert after == before | {"dtype": "bfloat16", "num_labels": 1}
    assert load_file(tmp_path / SINGLE)["model.norm.weight"].dtype == torch.bfloat16


def test_config_has_the_dtype_of_most_weights(saved, tmp_path):
    """A few tensors are fp32 in a bf16 model, as the router's bias is."""
    hf = saved("deepseek_v3")
    infos = {name: TensorInfo("F32" if "bias" in name else "BF16", tuple(t.shape)) for name, t in hf.weights.items()}
    assert {info.dtype for info in infos.values()} == {"F32", "BF16"}
    with HFWriter(tmp_path, infos, companions=hf.path) as writer:
        for name, tensor in hf.weights.items():
            writer.add(name, tensor)
    before, after = (json.loads((path / "config.json").read_text()) for path in (hf.path, tmp_path))
    assert (before["dtype"], after["dtype"]) == ("float32", "bfloat16")


def test_companions_keep_the_old_spelling_and_leave_the_rest(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "additional_chat_templates").mkdir(parents=True)
    files = ["tokenizer.json", "chat_template.jinja", "generation_config.json", "additional_chat_templates/a.jinja"]
    for name in [*files, "README.md", "model.safetensors", "pytorch_model.bin", "training_args.bin"]:
        (source / name).write_text("{ }")
    (source / "config.json").write_text('{"torch_dtype":"float32"}')
    assert sorted(copy_companions(source, out, dtype=torch.float32)) == sorted([*files, "config.json"])
    assert (out / "config.json").read_text() == '{"torch_dtype":"float32"}'  # true already: as it was
    copy_companions(source, out, dtype=torch.bfloat16)
    assert json.loads((out / "config.json").read_text()) == {"torch_dtype": "bfloat16"}
    copy_companions(out, out)  # onto itself: nothing to do


def test_an_interrupted_write_never_looks_whole(tmp_path):
    writer = HFWriter(tmp_path, INFOS, max_shard_size=100)
    for name in list(TENSORS)[:-1]:
        writer.add(name, TENSORS[name])
        with pytest.raises(ModelError, match="has neither"):
            SafetensorsReader(tmp_path)
    # killed here; the next run starts over and finishes
    write(tmp_path, max_shard_size=100)
    assert not list(tmp_path.glob(".*"))
    with SafetensorsReader(tmp_path) as reader:
        assert reader.tensors.keys() == TENSORS.keys()


def test_an_error_removes_the_parts_and_keeps_the_earlier_export(tmp_path):
    write(tmp_path)
    before = (tmp_path / SINGLE).read_bytes()
    with pytest.raises(RuntimeError), HFWriter(tmp_path, INFOS, max_shard_size=100) as writer:
        writer.add("layer.0.weight", TENSORS["layer.0.weight"])
        raise RuntimeError("the run died")
    assert [file.name for file in tmp_path.iterdir()] == [SINGLE]
    assert (tmp_path / SINGLE).read_bytes() == before


def test_a_new_export_replaces_the_old_one(tmp_path):
    write(tmp_path, max_shard_size=1)
    write(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [SINGLE]


def test_the_writer_wants_each_tensor_once_as_announced(tmp_path):
    writer = HFWriter(tmp_path, INFOS)
    with pytest.raises(AssertionError, match="not announced"):
        writer.add("other", torch.zeros(1))
    with pytest.raises(AssertionError, match=r"layer.0.weight is \(4, 3\), not \(3, 4\)"):
        writer.add("layer.0.weight", torch.zeros(4, 3))
    writer.add("layer.0.weight", torch.zeros(3, 4))
    with pytest.raises(AssertionError, match="written before"):
        writer.add("layer.0.weight", torch.zeros(3, 4))
    with pytest.raises(AssertionError, match="closed before layer.1.weight"):
        writer.close()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(ModelError, match="make room"):
        HFWriter(tmp_path, {"a": TensorInfo("F32", (2**31, 2**31))})
    assert not list(tmp_path.iterdir())


def test_sizes():
    assert (parse_size("5GB"), parse_size("20 mb"), parse_size(7)) == (5 * 10**9, 20 * 10**6, 7)
    assert (parse_size("1GiB"), parse_size("1.5gb"), parse_size("1234")) == (2**30, 1_500_000_000, 1234)


@pytest.mark.parametrize("size", ["5 apples", "GB", "-5GB", "0GB", "5G"])
def test_what_is_no_size(size):
    with pytest.raises(ConfigError, match="max_shard_size: value .* is not a size; write it as 5GB, 500MB, 1GiB"):
        parse_size(size)


def _truncate(folder, name=SINGLE, keep=-10) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:keep])


def _edit_index(folder, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def _header(folder, *entries: bytes) -> None:
    text = b"{" + b",".join(entries) + b"}"
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)


def _entry(name: str) -> bytes:
    return f'"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.encode()


def _pickle_only(folder) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


SHARD_1, SHARD_2 = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
FAULTS = {  # name: (sharded, damage, what the message says)
    "no folder": (False, lambda f: f.joinpath(SINGLE).unlink() or f.rmdir(), "no such folder"),
    "empty folder": (False, lambda f: f.joinpath(SINGLE).unlink(), "has neither model.safetensors nor"),
    "pickle only": (False, _pickle_only, r"only pickle weights \(pytorch_model.bin\)"),
    "truncated data": (False, _truncate, "model.safetensors: truncated or not .*not fully covered"),
    "empty file": (False, lambda f: _truncate(f, keep=0), "truncated, a pointer of Git LFS, or not"),
    "a pointer": (False, lambda f: (f / SINGLE).write_bytes(b"version https://git-lfs"), "a pointer of Git LFS"),
    "header is no JSON": (False, lambda f: _header(f, b"{" * 15), "invalid JSON in header"),
    "overlapping tensors": (False, lambda f: _header(f, _entry("a"), _entry("b")), "invalid offset for tensor"),
    "missing shard": (True, lambda f: (f / SHARD_2).unlink(), f"names {SHARD_2}, not in the folder"),
    "truncated shard": (True, lambda f: _truncate(f, SHARD_2), f"{SHARD_2}: truncated"),
    "missing index": (True, lambda f: (f / INDEX).unlink(), f"has neither .* nor {INDEX}"),
    "index is no JSON": (True, lambda f: (f / INDEX).write_text("{"), "not readable as JSON"),
    "index has no map": (True, lambda f: (f / INDEX).write_text("{}"), "not an index of weights"),
    "index names the wrong shard": (
        True,
        lambda f: _edit_index(f, lambda i: i["weight_map"].update({"layer.0.weight": SHARD_2})),
        r"does not agree with .* about layer.0.weight",
    ),
    "index invents a tensor": (
        True,
        lambda f: _edit_index(f, lambda i: i["weight_map"].update({"ghost": SHARD_1})),
        r"does not agree with .* about ghost",
    ),
    "index leaves the folder": (
        True,
        lambda f: _edit_index(f, lambda i: i["weight_map"].update({"ghost": "../other.safetensors"})),
        "not a file of this folder",
    ),
    "both forms": (True, lambda f: save_file(TENSORS, f / SINGLE), "has both"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_folder_is_refused_by_name(tmp_path, fault):
    sharded, damage, message = FAULTS[fault]
    folder = tmp_path / "model"
    write(folder, max_shard_size=100 if sharded else "5GB")
    damage(folder)
    with pytest.raises(ModelError, match=message) as error:
        SafetensorsReader(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_flipped_header_bytes_never_crash_otherwise(tmp_path):
    """Seeded damage to the header: either a ModelError, or a header whose spans fit the file."""
    write(tmp_path)
    data = (tmp_path / SINGLE).read_bytes()
    rng = random.Random(0)
    for _ in range(200):
        damaged = bytearray(data)
        damaged[rng.randrange(8 + int.from_bytes(data[:8], "little"))] ^= 1 << rng.randrange(8)
        (tmp_path / SINGLE).write_bytes(damaged)
        try:
            read_header(tmp_path / SINGLE)
        except ModelError:
            continue


def test_an_unknown_tensor_name_is_said(tmp_path):
    write(tmp_path)
    with SafetensorsReader(tmp_path) as reader, pytest.raises(ModelError, match="has no tensor nothing"):
        reader("nothing")


ROW = MIN_BYTES  # entries: of 2 and 4 bytes, half a row and less are read by itself
COLUMNS = [(0, ROW), (3, 3 + ROW // 2), (ROW // 2, ROW), (ROW // 4, ROW // 4 + ROW // 2), (5, 6), (7, 7)]


@pytest.fixture
def opened(tmp_path):
    """The file of a tensor behind a few bytes of something else."""

    def of(tensor: torch.Tensor) -> int:
        (tmp_path / "file").write_bytes(b"head" + tensor.view(torch.uint8).numpy().tobytes())
        return os.open(tmp_path / "file", os.O_RDONLY)

    return of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_region_is_that_of_the_tensor(opened, dtype):
    whole = torch.arange(3 * 4 * ROW).view(3, 4, ROW).float().sin().to(dtype)
    file = opened(whole)
    for (i, j), (k, m), (left, right) in itertools.product([(0, 3), (1, 2), (2, 3)], [(0, 4), (1, 3), (3, 4)], COLUMNS):
        part = read_region(file, 4, dtype=dtype, shape=(3, 4, ROW), region=[(i, j), (k, m), (left, right)])
        assert torch.equal(part, whole[i:j, k:m, left:right]), (i, j, k, m, left, right)
    os.close(file)


def test_a_lazy_slice_is_indexed_as_a_tensor_and_a_short_file_is_told(opened):
    whole = torch.arange(4.0 * ROW).view(4, ROW)
    file = opened(whole)
    lazy = LazySlice((4, ROW), lambda region: read_region(file, 4, dtype=whole.dtype, shape=(4, ROW), region=region))
    for key in (2, slice(1, 3), (slice(None), slice(9, 9 + ROW // 2)), (3, slice(1, 5)), ()):
        assert torch.equal(lazy[key], whole[key]), key
    with pytest.raises(TruncatedFile):
        read_region(file, 8, dtype=whole.dtype, shape=(4, ROW), region=[(3, 4), (0, ROW)])
    os.close(file)
