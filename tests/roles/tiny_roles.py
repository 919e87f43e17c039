"""Roles for the tests: configs of tiny models in the layouts that a test names."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from mrl.config.schema import RoleConfig
from tests.engine import tiny
from tests.engine.layouts import PLAIN, available

LAYOUTS = {
    "tp2": ("megatron", {"tp": 2}),
    "pp2": ("megatron", {"pp": 2}),
    "dp": ("megatron", {}),
    "fsdp": ("fsdp", {}),
    "fsdp cp2": ("fsdp", {"cp": 2}),
    "external": (PLAIN, {}),
}
"""Name -> backend and degrees; data parallel is what is left of the processes."""


def roles(
    folder: str, *, critic_folder: str | None = None, options: dict[str, Any] | None = None, **layouts: str
) -> dict[str, RoleConfig]:
    """A config for each role, in the layout of LAYOUTS that is named. options: fields of `tiny.role` for all roles."""
    made = {}
    for name, layout in layouts.items():
        backend, parallel = LAYOUTS[layout]
        fields = dict(options or {})
        if name in ("critic", "reward"):
            fields["head"] = "value"
        if name in ("reference", "reward"):
            fields["optimizer"] = None
        path = critic_folder if critic_folder and fields.get("head") else folder
        made[name] = tiny.role(path, backend=available(backend), parallel=parallel, **fields)
    return made


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder of a model, by family and fields; each is made once."""

    @functools.cache
    def of(family: str = "llama", **fields: Any) -> str:
        return tiny.make_model(str(tmp_path_factory.mktemp(family)), family, **fields)

    return of
