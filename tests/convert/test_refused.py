"""What cannot be converted is refused with one line, before or without a folder that looks whole.

Files beside the weights are accounted for, too: an import sums them up, an export compares them, and none is passed over.
"""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import random
import shutil
import struct
import zlib

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from mrl import cli
from mrl.convert.exporting import export_hf
from mrl.convert.importing import import_hf
from mrl.engine import atomic_checkpoint
from mrl.engine.torch_dist.reader import TorchDistReader
from mrl.errors import CheckpointError
from tests.convert import hf_folders
from tests.engine.harness import run_case
from tests.tiers import slow_but


def invoke(*arguments: object):
    """`mrl convert ...`, as click's runner tells of it; a fault of ours fails the test with its traceback."""
    done = CliRunner().invoke(cli.main, ["convert", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def run(*arguments: object):
    """(exit code, what is on stderr) of `mrl convert ...`."""
    done = invoke(*arguments)
    return done.exit_code, done.stderr


def config(**fields):
    def edit(folder: pathlib.Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return edit


def weights(change):
    def edit(folder: pathlib.Path) -> None:
        """One file, its tensors changed."""
        held = {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}
        for file in folder.glob("model*"):
            file.unlink()
        change(held)
        save_file(held, folder / "model.safetensors", {"format": "pt"})

    return edit


FLIPS = 24
SOURCES = {  # what the readers of config.json and of safetensors files refuse themselves is in tests/weights
    "lost tensor": (weights(lambda w: w.pop("model.norm.weight")), "1 missing (model.norm.weight)"),
    "two heads": (weights(lambda w: w.update({"score.weight": torch.zeros(1, 32)})), "has two heads"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_import_refuses(source, tmp_path, name):
    edit, words = SOURCES[name]
    edit(source)
    code, said = run("import", source, tmp_path / "out")
    assert code == 2
    assert words in said and said.startswith("mrl: ") and said.count("\n") == 1, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_import_of_flipped_and_cut_headers_is_refused_or_right(hf, tmp_path):
    """Seeded damage to what says where tensors lie. Their bytes have no checksum in safetensors: damage there cannot be seen."""
    refused, source = 0, hf("qwen3_moe", shard="60KB")
    files = sorted(file.name for file in source.glob("model*"))
    rng = random.Random(0)
    for i in range(FLIPS):
        damaged, out = tmp_path / f"hf{i}", tmp_path / f"out{i}"
        shutil.copytree(source, damaged)
        file = damaged / files[i % len(files)]
        data = bytearray(file.read_bytes())
        end = len(data) if file.suffix == ".json" else 8 + struct.unpack("<Q", data[:8])[0]
        at = rng.randrange(end)
        if i % 4:
            data[at] ^= 1 << rng.randrange(8)
        else:
            del data[at:]
        file.write_bytes(data)
        code, said = run("import", damaged, out)
        if code == 2:
            assert said.count("\n") == 1 and not out.exists(), said
            refused += 1
            continue
        assert code == 0, said  # in what nothing follows from, such as total_size of the index
        assert i % 4 or file.suffix == ".json"
        assert run("export", out, tmp_path / f"back{i}")[0] == 0
        assert hf_folders.differences(source, tmp_path / f"back{i}") == []
    assert refused > 0.9 * FLIPS


def resealed(folder: pathlib.Path, name: str, content: bytes) -> None:
    """Another content of a file of an import, whose COMPLETE says that it is so."""
    (folder / name).write_bytes(content)
    marker = json.loads((folder / "COMPLETE").read_text())
    marker["files"][name] = {"size": len(content), "crc32": zlib.crc32(content)}
    (folder / "COMPLETE").write_text(json.dumps(marker))


@pytest.mark.parametrize("where", ["absolute", "relative"])
def test_an_import_of_somebody_elses_writes_nothing_outside(imported, tmp_path, where):
    """Names of files in source.json are another program's word."""
    outside = tmp_path / "elsewhere.safetensors"
    name = str(outside) if where == "absolute" else f"../{outside.name}"
    said_there = json.loads((imported / "source.json").read_text())
    for of in ("files", "metadata"):
        first = next(iter(said_there[of]))
        said_there[of][name] = said_there[of].pop(first)
    resealed(imported, "source.json", json.dumps(said_there).encode())
    code, said = run("export", imported, tmp_path / "out")
    assert code == 2 and said.count("\n") == 1 and "which is no file of it" in said
    assert [path.name for path in tmp_path.iterdir()] == ["mcore"]


def test_metadata_that_lies_is_refused(imported):
    file = imported / "mcore/.metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["decoder.final_layernorm.weight"].properties.dtype = torch.int32
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"says torch.int32"):
        TorchDistReader(imported / "mcore").read("decoder.final_layernorm.weight", [(0, 32)])


class Evil:
    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_metadata_that_is_a_foreign_pickle_runs_no_code(imported, tmp_path):
    with (imported / "mcore/.metadata").open("wb") as out:
        pickle.dump(Evil(tmp_path / "ran"), out)
    with pytest.raises(CheckpointError, match=r"posix\.mkdir, which is no part of the format"):
        TorchDistReader(imported / "mcore")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("seed", range(8))
def test_export_refuses_flipped_and_cut_bytes(imported, tmp_path, seed):
    rng = random.Random(seed)
    files = sorted(p for p in imported.rglob("*") if p.is_file() and p.name != "COMPLETE")
    file = files[seed % len(files)]
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    if rng.random() < 0.5:
        data[at] ^= 1 << rng.randrange(8)
    else:
        del data[at:]
    file.write_bytes(data)
    code, said = run("export", imported, tmp_path / "out")
    assert code == 2 and said.count("\n") == 1, said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("size", "backend"), slow_but([(2, "megatron")], [(1, "fsdp"), (2, "megatron")]))
def test_an_engine_starts_from_no_damaged_import(imported, tmp_path, size, backend):
    """A byte of the weights that is another, or is missing, would be trained on in silence."""
    folders = [str(imported)]
    for i, file in enumerate(["mcore/__0_0.distcp", "mcore/__0_0.distcp", "mcore/.metadata", "engine.pt"] * 2):
        folders.append(str(shutil.copytree(imported, tmp_path / f"damaged{i}")))
        data = bytearray((imported / file).read_bytes())
        at = random.Random(i).randrange(len(data))
        if i % 2:
            data[at] ^= 1
        else:
            del data[at:]
        pathlib.Path(folders[-1], file).write_bytes(data)
    pathlib.Path(folders[-1], "COMPLETE").unlink()
    said = run_case(size, "tests.convert.cases:what_starts_say", folders=folders, backend=backend)
    assert said[0] is None
    for folder, words in zip(folders[1:], said[1:], strict=True):
        assert words is not None and folder in words and "\n" not in words, words


def test_another_model_and_wrong_uses(imported, hf, tmp_path):
    code, said = run("export", imported, tmp_path / "out", "--model", hf("qwen3"))
    assert code == 2 and "is another model: model_type is 'llama' in the checkpoint and 'qwen3' in config.json" in said
    assert "no effect" in run("export", imported, tmp_path / "out", "--role", "actor")[1]
    for place in (tmp_path, hf("llama", shard="30KB"), tmp_path / "nothing"):
        assert "holds no whole checkpoint" in run("export", place, tmp_path / "out")[1]
    (imported / "COMPLETE").rename(tmp_path / "COMPLETE")
    assert "holds no whole checkpoint" in run("export", imported, tmp_path / "out")[1]
    (tmp_path / "COMPLETE").rename(imported / "COMPLETE")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").touch()
    assert "is not an empty folder" in run("import", hf("llama", shard="30KB"), tmp_path / "out")[1]
    assert "is not an empty folder" in run("export", imported, tmp_path / "out")[1]
    assert os.listdir(tmp_path / "out") == ["precious"]


def test_a_name_that_is_longer_than_a_file_system_takes(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said = run("import", source, "x" * 300)
    assert code == 2 and said.count("\n") == 1 and "File name too long" in said and len(said) < 400, said
    assert os.listdir(tmp_path) == ["hf"]


NAMES = sorted(hf_folders.COMPANIONS)
TEMPLATE = "additional_chat_templates/tool.jinja"


@pytest.fixture(scope="module")
def whole_source(hf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "hf"
    shutil.copytree(hf("llama", shard="30KB"), folder)
    hf_folders.add_companions(folder)
    (folder / TEMPLATE).parent.mkdir()
    (folder / TEMPLATE).write_text("{{ tools }}")
    return folder


@pytest.fixture(scope="module")
def made(whole_source, tmp_path_factory):
    out = tmp_path_factory.mktemp("imported") / "mcore"
    import_hf(whole_source, out)
    return out


@pytest.fixture
def whole_import(made, tmp_path):
    shutil.copytree(made, tmp_path / "mcore")
    return tmp_path / "mcore"


def flip(file: pathlib.Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = {"flipped": flip, "deleted": pathlib.Path.unlink}


@pytest.mark.parametrize("how", DAMAGE)
def test_an_export_refuses_what_the_import_did_not_write(whole_import, tmp_path, how):
    """Whatever the file: tokenizer, chat templates, generation config."""
    for name in [*NAMES, TEMPLATE]:
        kept = (whole_import / name).read_bytes()
        DAMAGE[how](whole_import / name)
        code, said = run("export", whole_import, tmp_path / "out")
        assert code == 2 and said.count("\n") == 1 and name in said and "damaged" in said, said
        assert os.listdir(tmp_path) == ["mcore"]
        (whole_import / name).unlink(missing_ok=True)
        (whole_import / name).write_bytes(kept)
    assert run("export", whole_import, tmp_path / "out")[0] == 0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "is a link that leads to no file"), ("version https://git-lfs.x/v1", "Git LFS"),
        ('{"a":', "readable as JSON"),
    ],
)  # fmt: skip
def test_an_import_passes_over_no_broken_file(whole_source, tmp_path, content, why):
    shutil.copytree(whole_source, tmp_path / "hf")
    file = tmp_path / "hf/tokenizer_config.json"
    file.unlink()
    if content is None:
        file.symlink_to("nothing")
    else:
        file.write_text(content)
    code, said = run("import", tmp_path / "hf", tmp_path / "out")
    assert code == 2 and said.count("\n") == 1 and "hf/tokenizer_config.json: " in said and why in said, said
    assert not (tmp_path / "out").exists()


def test_links_are_followed_to_their_files(whole_source, tmp_path):
    """As in the hub's cache, where each file is a link to another folder; what is written holds files."""
    shutil.copytree(whole_source, tmp_path / "real")
    (tmp_path / "hf").mkdir()
    for file in (tmp_path / "real").iterdir():
        (tmp_path / "hf" / file.name).symlink_to(os.path.join("../real", file.name))
    import_hf(tmp_path / "hf", tmp_path / "mcore")
    export_hf(tmp_path / "mcore", tmp_path / "back")
    assert hf_folders.files_of(tmp_path / "back") == hf_folders.files_of(whole_source)
    assert not any(path.is_symlink() for path in (tmp_path / "back").rglob("*"))


def test_every_file_of_an_import_has_its_checksum(made):
    files = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    assert atomic_checkpoint.verify(str(made)).files.keys() == files - {"COMPLETE"}


def test_an_export_of_a_run_that_began_with_an_import(whole_import, tmp_path):
    """Its tokenizer is that of the import, which --model names here, and whose checksums count."""
    other = tmp_path / "other"
    shutil.copytree(whole_import, other)
    flip(other / "tokenizer_config.json")
    code, said = run("export", whole_import, tmp_path / "out", "--model", other)
    assert code == 2 and "the content of tokenizer_config.json has changed" in said, said
