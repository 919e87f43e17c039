"""Where a model's folder comes from: a path, the hub's cache, the hub."""

from __future__ import annotations

import pathlib

import pytest

from mrl.errors import ModelError
from mrl.weights import hub


def make_cache(root: pathlib.Path, *files: str) -> pathlib.Path:
    """A hub cache that holds `files` of org/tiny."""
    repo = root / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    folder = repo / "snapshots" / "abc"
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty cache, and a hub that may not be asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_is_itself(tmp_path):
    assert hub.model_folder(str(tmp_path)) == str(tmp_path)


def test_a_cached_hub_id_is_its_folder(hub_cache):
    folder = make_cache(hub_cache, "config.json", "tokenizer.json", "model.safetensors")
    assert hub.model_folder("org/tiny") == str(folder)


def test_a_cache_without_weights_is_enough_for_a_model_from_scratch_only(hub_cache, monkeypatch):
    folder, asked = make_cache(hub_cache, "config.json", "tokenizer.json"), []
    assert hub.model_folder("org/tiny", weights=False) == str(folder)

    def snapshot_download(hub_id, download=hub.huggingface_hub.snapshot_download, **options):
        return download(hub_id, **options) if options.get("local_files_only") else asked.append(options) or "downloaded"

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub.huggingface_hub, "get_hf_file_metadata", lambda url, timeout: None)  # the hub is there
    assert hub.model_folder("org/tiny") == "downloaded" and "*.safetensors" in asked[0]["allow_patterns"]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("org/absent", "is no folder here and cannot be read from the hub"),
        ("no such name", "is no folder here and cannot be read from the hub"),
        ("runs/demo/hf", "does not exist; give a"),  # a folder that nothing has made yet is no id, good or bad
        ("./absent", "does not exist; give a"),
    ],
)
def test_a_model_that_cannot_be_had_is_named(hub_cache, path, says):
    with pytest.raises(ModelError, match=rf"^model\.path: value '{path}' {says}"):
        hub.model_folder(path)
