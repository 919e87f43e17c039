"""Hugging Face folders of tiny models, each made once in a session, and what one of them imports to."""

import shutil

import pytest

from mrl.convert.importing import import_hf
from tests.convert import hf_folders
from tests.weights.test_hub import hub_cache  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def hf(tmp_path_factory):
    """`hf(family, tied=False, dtype=...)`: a Hugging Face folder of several shards, to be left as it is."""
    made = {}

    def get(family="llama", **options):
        key = (family, str(sorted(options.items())))
        if key not in made:
            made[key] = hf_folders.make_hf(tmp_path_factory.mktemp(family) / "hf", family, **options)
        return made[key]

    return get


@pytest.fixture
def source(hf, tmp_path):
    """A copy of a folder, to change at will: `tmp_path / "hf"`."""
    return shutil.copytree(hf("llama", shard="30KB"), tmp_path / "hf")


@pytest.fixture(scope="session")
def imported_once(hf, tmp_path_factory):
    out = tmp_path_factory.mktemp("imported") / "mcore"
    import_hf(hf("llama", shard="30KB"), out)
    return out


@pytest.fixture
def imported(imported_once, tmp_path):
    """A copy of an import of that folder: `tmp_path / "mcore"`."""
    return shutil.copytree(imported_once, tmp_path / "mcore")
