"""The layouts that the contract suite runs in: those of the megatron and fsdp engines, and of an engine that another package
registers: that of tests/engine/external, or the one that `python -m tests.engine.suite` was asked to test.
"""

from __future__ import annotations

import atexit
import functools
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from mrl.config.schema import FSDPConfig, RoleConfig
from tests.engine import tiny

PACKAGE = pathlib.Path(__file__).parent / "external"
PLAIN = "plain"
EXTERNAL = PLAIN

# name -> (world size, backend, degrees); `replicate` is engine.fsdp's
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fsdp": (1, "fsdp", {}),
    "fsdp dp2": (2, "fsdp", {}),
    "fsdp dp4": (4, "fsdp", {}),
    "fsdp hsdp": (4, "fsdp", {"replicate": 2}),
    "fsdp cp2": (2, "fsdp", {"cp": 2}),
    "megatron": (1, "megatron", {}),
    "megatron tp2": (2, "megatron", {"tp": 2}),
    "megatron pp2": (2, "megatron", {"pp": 2}),
    "megatron cp2": (2, "megatron", {"cp": 2}),
    "megatron dp2": (2, "megatron", {}),
    "megatron tp2 pp2": (4, "megatron", {"tp": 2, "pp": 2}),
    "external": (1, EXTERNAL, {}),
    "external dp2": (2, EXTERNAL, {}),
}
# one process of each engine, and each way to split a model or its data
WHOLE = ["fsdp", "megatron", "external"]
SPLIT = ["fsdp dp2", "fsdp cp2", "megatron tp2", "megatron pp2", "external dp2"]
# one of each engine on more than one process: these run in `make test`, all others in CI's slow tier
FEW = ["fsdp dp2", "megatron tp2", "megatron pp2", "external dp2"]
# layouts that need experts, or more layers than the other cases have: qwen3_moe of 4 layers
WIDE_LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "megatron ep2": (2, "megatron", {"ep": 2}),
    "megatron pp2 vpp2": (2, "megatron", {"pp": 2, "vpp": 2}),
    "megatron tp2 etp1": (2, "megatron", {"tp": 2, "etp": 1}),
    "megatron dp2 etp2": (2, "megatron", {"etp": 2}),
    "megatron tp2 ep2 etp2": (4, "megatron", {"tp": 2, "ep": 2, "etp": 2}),
}
# layouts that only some cases run in, on models of 4 layers
MORE_LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fsdp cp2 dp2": (4, "fsdp", {"cp": 2}),
    "megatron tp2 pp2 dp2": (8, "megatron", {"tp": 2, "sp": False, "pp": 2}),
    "megatron tp2 cp2": (4, "megatron", {"tp": 2, "cp": 2}),
}


def choose_external(backend: str, more: dict[str, tuple[int, dict[str, Any]]]) -> None:
    """Puts another engine in the place of ours, before tests are collected. more: its further layouts: processes, degrees."""
    global EXTERNAL
    EXTERNAL = backend
    LAYOUTS["external"], LAYOUTS["external dp2"] = (1, backend, {}), (2, backend, {})
    for name, (world_size, parallel) in more.items():
        LAYOUTS[f"external {name}"] = (world_size, backend, parallel)
        SPLIT.append(f"external {name}")


def world_and_role(layout: str, folder: str, **options: Any) -> tuple[int, RoleConfig]:
    """(processes, role on the model in `folder`) of a layout. options: as of `tiny.role`."""
    world_size, backend, parallel = (LAYOUTS | WIDE_LAYOUTS | MORE_LAYOUTS)[layout]
    if "replicate" in parallel:
        parallel, options = {}, options | {"fsdp": FSDPConfig(**parallel)}
    return world_size, tiny.role(folder, backend=available(backend), parallel=parallel, **options)


def available(backend: str) -> str:
    """`backend`, whose package can be imported from here on, and by worlds of processes (see harness.py)."""
    if backend == PLAIN:
        install()
    return backend


@functools.cache
def install() -> str:
    """Installs tests/engine/external as pip does, into a folder that is gone with this process. Returns the folder."""
    folder = tempfile.mkdtemp(prefix="mrl_plain_")
    atexit.register(shutil.rmtree, folder)
    source = shutil.copytree(PACKAGE, pathlib.Path(folder, "source"))  # setuptools builds inside of it
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    target = str(pathlib.Path(folder, "site"))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", target, str(source)], check=True)
    sys.path.append(target)
    return target
