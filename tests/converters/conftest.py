"""One saved model per (model, tied, fields), made when first asked for."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from tests.converters.models import Saved, save


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """`saved(name, tied=False, **fields of its config)`: a `Saved`, to be left unchanged."""
    made = {}

    def get(name: str, *, tied: bool = False, **fields: object) -> Saved:
        key = (name, tied, str(fields))
        if key not in made:
            path = save(tmp_path_factory.mktemp(name) / "hf", name, tied=tied, fields=fields)
            made[key] = Saved(path, load_file(path / "model.safetensors"))
        return made[key]

    return get
