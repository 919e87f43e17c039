"""Hugging Face folders of tiny models, each made once in a session."""

import pytest

from tests.convert import hf_folders


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
