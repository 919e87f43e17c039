"""Python and the packages that a run needs: whether they load, and whether their versions are tested ones.

The next release of such a package may compute something else. The versions are lines of constraints-3.11.txt and
constraints-3.12.txt. A wheel does not have those files; a test compares them.
"""

from __future__ import annotations

import importlib.metadata
import pathlib
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mrl
from mrl.doctor.ask import ImportResult, failure
from mrl.doctor.findings import Finding, fault, note, ok, warning
from mrl.mcore_models.optional import ABSENT

NEEDED_PACKAGES: Mapping[str, Sequence[str]] = {
    "torch": ("torch",),
    "numpy": ("numpy",),
    "transformers": ("transformers",),
    "safetensors": ("safetensors", "safetensors.torch"),
    "tokenizers": ("tokenizers",),
    "packaging": ("packaging.version",),
    "click": ("click",),
    "pyyaml": ("yaml",),
    "jinja2": ("jinja2",),
    "psutil": ("psutil",),
    "filelock": ("filelock",),
    "fsspec": ("fsspec",),
    "huggingface_hub": ("huggingface_hub",),
    "zlib-ng": ("zlib_ng.zlib_ng",),
    "rich": ("rich.progress",),
    "pyarrow": ("pyarrow", "pyarrow.parquet"),
    "datasets": ("datasets",),
    "wandb": ("wandb",),
    "plotly": ("plotly",),
    "matplotlib": ("matplotlib",),
    "peft": ("peft",),
    "megatron-core": ("megatron.core",),
}
"""What setup.py asks for, and the modules that are imported to see whether it loads, the compiled ones among them."""

NEED_TORCH = ("safetensors", "peft", "megatron-core")
"""Those that are not tried where torch does not load."""

OF_A_FEATURE: Mapping[str, str] = {
    "wandb": "log.wandb",
    "plotly": "mrl report",
    "matplotlib": "mrl report",
    "peft": "model.lora",
    "megatron-core": "engine.backend: megatron, the default,",
}
"""What does not work without a package. Without another one no run starts."""

_ON_ALL: Mapping[str, str] = {"torch": "2.13.0", "transformers": "5.23.0", "transformer-engine": "2.20.2"}
_BY_PYTHON: Mapping[str, Mapping[str, str]] = {"3.11": {"megatron-core": "0.16.1"}, "3.12": {"megatron-core": "0.19.2"}}
PYTHONS = tuple(_BY_PYTHON)


def this_python() -> str:
    """Returns "3.11" for Python 3.11.7."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def versions(python: str) -> Mapping[str, str]:
    """Returns package -> version of the tested set for a Python; empty if there is none."""
    return {**_ON_ALL, **_BY_PYTHON[python]} if python in _BY_PYTHON else {}


def section(imported: Mapping[str, ImportResult], broken: Sequence[str] = ()) -> Iterator[Finding]:
    """Yields findings on Python and its packages.

    imported: by the names of NEEDED_PACKAGES; those that need torch are missing where it does not load. broken:
    optional packages that do not load.
    """
    yield _python()
    yield _mrl()
    absent = [name for name, found in imported.items() if found.error == ABSENT]
    if absent:
        costs = "no run starts" if set(absent) - set(OF_A_FEATURE) else _costs(absent)
        constraints = f"constraints-{this_python()}.txt"
        fix = f"pip install -c {constraints} torch, then pip install -c {constraints} -e . (in mrl's folder)"
        yield fault("packages.absent", f"not installed, so {costs}: {', '.join(absent)}", fix, absent=absent)
    loaded = {}  # package -> version
    for name, found in imported.items():
        if found.works:
            loaded[name] = found.version or installed_version(name) or "of an unknown version"
        elif name not in absent:
            yield _broken(name, str(found.error), broken)
    if imported["torch"].works:
        yield _torch(imported["torch"].facts)
    else:
        yield note("packages.without_torch", f"not looked at without torch: {', '.join(NEED_TORCH)}")
    yield from _versions(loaded)


def _python() -> Finding:
    version = platform.python_version()
    what = f"Python {version} ({sys.prefix})"
    data = {"version": version, "executable": sys.executable, "prefix": sys.prefix}
    if this_python() in PYTHONS:
        return ok("python", what, **data)
    tried = " and ".join(PYTHONS)
    fix = "make a venv of one of them if something fails"
    return warning("python", f"{what}: mrl is tested on {tried}", fix, **data)


def _mrl() -> Finding:
    folder = str(pathlib.Path(mrl.__file__).parent)
    what, data = f"mrl {mrl.__version__} ({folder})", {"version": mrl.__version__, "folder": folder}
    if installed_version("mrl") is None:
        return note("mrl", f"{what}, not installed: pip does not know what it needs", **data)
    return ok("mrl", what, **data)


def installed_version(name: str) -> str | None:
    """Returns the version that pip knows; None if it knows none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _costs(names: Sequence[str]) -> str:
    features = dict.fromkeys(OF_A_FEATURE.get(name, "a run") for name in names)
    return f"{' and '.join(features)} does not work"


def _broken(name: str, error: str, broken: Sequence[str]) -> Finding:
    wanted, version = versions(this_python()), installed_version(name)
    pinned = f"'{name}=={wanted[name]}'" if name in wanted else f"-c constraints-{this_python()}.txt {name}"
    fix = f"pip install --force-reinstall {pinned}"
    if broken:  # peft and megatron-core import transformer-engine if they find it, and fail with it
        fix = f"mend or uninstall {', '.join(broken)} first, which may be the cause (see below); else {fix}"
    what = f"{name} {version or ''}".rstrip() + f" {failure(error)}: {_costs([name])}"
    is_needed = name not in OF_A_FEATURE or name == "megatron-core"
    return (fault if is_needed else warning)(f"package.{name}", what, fix, error=error, version=version)


def _torch(found: Mapping[str, Any] | None) -> Finding:
    if found is None:
        fix = "see what `python -c 'import torch; torch.cuda.init()'` says; mend the driver, or reinstall torch"
        return fault("torch.build", "torch loads, and its process ends when it is asked about this machine", fix)
    build = f"CUDA {found['cuda']}" if found["cuda"] else f"ROCm {found['hip']}" if found["hip"] else "the CPU"
    parts = [f"torch {found['version']} is built for {build}"]
    if found["nccl"]:
        parts.append(f"NCCL {'.'.join(map(str, found['nccl']))}")
    if found["cudnn"]:
        parts.append(f"cuDNN {found['cudnn'] // 10_000}.{found['cudnn'] // 100 % 100}.{found['cudnn'] % 100}")
    data = {key: found[key] for key in ("version", "cuda", "hip", "cudnn", "nccl")}
    return ok("torch.build", ", ".join(parts), **data)


def _versions(loaded: Mapping[str, str]) -> Iterator[Finding]:
    """Compares what loads with the versions that are known to work."""
    for name, wanted in versions(this_python()).items():
        version = loaded.get(name)
        if version is not None and not same_series(version, wanted):
            what = f"{name} {version} is untried with this mrl; {wanted} is known to work"
            fix = f"pip install '{name}=={wanted}' if something fails"
            yield warning(f"package.{name}.version", what, fix, version=version)
    if loaded:
        named = ", ".join(f"{name} {version}" for name, version in loaded.items())
        yield ok("packages", f"these load: {named}", **loaded)


def same_series(one: str, other: str) -> bool:
    """Returns whether the first two numbers of two versions are the same."""
    return re.findall(r"\d+", one)[:2] == re.findall(r"\d+", other)[:2]
