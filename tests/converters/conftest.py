"""One saved model per (model, tied), made when first asked for."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from tests.converters.models import Saved, save


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """`saved(name, tied=False)`: a `Saved`, to be left unchanged."""
    made = {}

    def get(name: str, *, tied: bool = False) -> Saved:
        if (name, tied) not in made:
            path = save(tmp_path_factory.mktemp(name) / "hf", name, tied=tied)
            made[name, tied] = Saved(path, load_file(path / "model.safetensors"))
        return made[name, tied]

    return get
