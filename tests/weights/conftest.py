"""One saved model per (model, tied, dtype, fields), made when first asked for."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.weights.models import Saved, save


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """`saved(name, tied=False, dtype=torch.float32, **fields of its config)`: a `Saved`, to be left unchanged."""
    made = {}

    def get(name: str, *, tied: bool = False, dtype: torch.dtype = torch.float32, **fields: object) -> Saved:
        key = (name, tied, dtype, str(fields))
        if key not in made:
            path = save(tmp_path_factory.mktemp(name) / "hf", name, tied=tied, dtype=dtype, fields=fields)
            made[key] = Saved(path, load_file(path / "model.safetensors"))
        return made[key]

    return get
