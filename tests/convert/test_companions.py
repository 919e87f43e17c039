"""Files beside the weights are accounted for, too: an import sums them up, an export compares them, and none is passed over."""

from __future__ import annotations

import os
import pathlib
import shutil

import pytest

from mrl.convert.exporting import export_hf
from mrl.convert.importing import import_hf
from mrl.engine import atomic_checkpoint
from tests.convert import hf_folders
from tests.convert.test_refused import run

NAMES = sorted(hf_folders.COMPANIONS)
TEMPLATE = "additional_chat_templates/tool.jinja"


@pytest.fixture(scope="module")
def source(hf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "hf"
    shutil.copytree(hf("llama", shard="30KB"), folder)
    hf_folders.add_companions(folder)
    (folder / TEMPLATE).parent.mkdir()
    (folder / TEMPLATE).write_text("{{ tools }}")
    return folder


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("imported") / "mcore"
    import_hf(source, out)
    return out


@pytest.fixture
def imported(made, tmp_path):
    shutil.copytree(made, tmp_path / "mcore")
    return tmp_path / "mcore"


def flip(file: pathlib.Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def unlink(file: pathlib.Path) -> None:
    file.unlink()


DAMAGE = {"flipped": flip, "deleted": unlink}


@pytest.mark.parametrize("how", DAMAGE)
def test_an_export_refuses_what_the_import_did_not_write(imported, tmp_path, how):
    """Whatever the file: tokenizer, chat templates, generation config."""
    for name in [*NAMES, TEMPLATE]:
        kept = (imported / name).read_bytes()
        DAMAGE[how](imported / name)
        code, said = run("export", imported, tmp_path / "out")
        assert code == 2 and said.count("\n") == 1 and name in said and "damaged" in said, said
        assert os.listdir(tmp_path) == ["mcore"]
        (imported / name).unlink(missing_ok=True)
        (imported / name).write_bytes(kept)
    assert run("export", imported, tmp_path / "out")[0] == 0


def test_an_import_passes_over_no_dead_link(source, tmp_path):
    shutil.copytree(source, tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").unlink()
    (tmp_path / "hf/tokenizer.json").symlink_to("nothing")
    code, said = run("import", tmp_path / "hf", tmp_path / "out")
    assert code == 2 and said.count("\n") == 1 and "hf/tokenizer.json: is a link that leads to no file" in said, said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "why"), [("version https://git-lfs.x/v1", "Git LFS"), ('{"a":', "readable as JSON")]
)
def test_an_import_passes_over_no_broken_file(source, tmp_path, content, why):
    shutil.copytree(source, tmp_path / "hf")
    (tmp_path / "hf/tokenizer_config.json").write_text(content)
    code, said = run("import", tmp_path / "hf", tmp_path / "out")
    assert code == 2 and said.count("\n") == 1 and "hf/tokenizer_config.json: " in said and why in said, said


def test_links_are_followed_to_their_files(source, tmp_path):
    """As in the hub's cache, where each file is a link to another folder; what is written holds files."""
    shutil.copytree(source, tmp_path / "real")
    (tmp_path / "hf").mkdir()
    for file in (tmp_path / "real").iterdir():
        (tmp_path / "hf" / file.name).symlink_to(os.path.join("../real", file.name))
    import_hf(tmp_path / "hf", tmp_path / "mcore")
    export_hf(tmp_path / "mcore", tmp_path / "back")
    assert hf_folders.files_of(tmp_path / "back") == hf_folders.files_of(source)
    assert not any(path.is_symlink() for path in (tmp_path / "back").rglob("*"))


def test_every_file_of_an_import_has_its_checksum(made):
    files = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    assert atomic_checkpoint.verify(str(made)).files.keys() == files - {"COMPLETE"}


def test_an_export_of_a_run_that_began_with_an_import(imported, tmp_path):
    """Its tokenizer is that of the import, which --model names here, and whose checksums count."""
    other = tmp_path / "other"
    shutil.copytree(imported, other)
    flip(other / "tokenizer_config.json")
    code, said = run("export", imported, tmp_path / "out", "--model", other)
    assert code == 2 and "the content of tokenizer_config.json has changed" in said, said
