"""Python and the packages that a run needs: whether they load, and whether their versions go together."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

import mrl
from mrl.doctor import known
from mrl.doctor.findings import Finding, fault, note, ok, warning
from mrl.doctor.imports import ImportResult, Step, hint, is_found
from mrl.doctor.probe import FACTS

MEGATRON = known.Package(
    known.MEGATRON, ("megatron.core",), "engine.backend: megatron does not work, which is the default"
)

MANY = 3
"""Packages that are not installed: of more, what each costs is not said."""

UNKNOWN = "of an unknown version"


def steps() -> list[Step]:
    """Returns what is imported for this section, and where torch is asked about the machine."""
    made = []
    for package in known.NEEDED_PACKAGES:
        made.append(Step(package.name, package.modules, "torch" if package.needs_torch else None))
        if package.name == "torch":
            made.append(Step(FACTS, needs="torch"))
    return made


def section(
    imported: Mapping[str, ImportResult], megatron: ImportResult, broken: Sequence[str] = ()
) -> Iterator[Finding]:
    """Yields findings on Python and its packages.

    megatron: the import of megatron-core, with the mock of GPUs. broken: optional packages that do not load.
    """
    yield _python()
    yield _mrl()
    have, wanted = installed(), known.versions(known.this_python())
    imported = {**imported, known.MEGATRON: megatron}
    for package in (*known.NEEDED_PACKAGES, MEGATRON):  # without torch some are not tried
        if imported[package.name].blocked_by is not None and _is_nowhere(package, have):
            imported[package.name] = ImportResult(error=f"No module named '{package.modules[0]}'")
    errors = {package.name: imported[package.name].error for package in (*known.NEEDED_PACKAGES, MEGATRON)}
    absent = [name for name, error in errors.items() if error is not None and _is_absent(name, error, have)]
    if len(absent) > MANY:
        yield _nothing_installed(absent)
    loaded: dict[str, str] = {}  # package -> version
    for package in (*known.NEEDED_PACKAGES, MEGATRON):
        name, error = package.name, errors[package.name]
        found = imported[name]
        if error is not None and not (name in absent and len(absent) > MANY):
            yield _broken(package, error, have, wanted, broken)
        if error is None and found.blocked_by is None:
            yield from _misplaced(package, found, have)
            loaded[name] = have.get(name) or found.version or UNKNOWN
        if found.blocked_by not in (None, "torch"):
            version = have.get(name, UNKNOWN)  # pip does not know a clone on PYTHONPATH
            what = f"{name} {version} was not looked at, as {found.blocked_by} cannot be told"
            yield note(f"package.{name}", what, version=version)
        if name == "torch" and found.works:
            yield from _torch(imported[FACTS])
    without_torch = [name for name, found in imported.items() if found.blocked_by == "torch" and name != FACTS]
    if without_torch:
        yield note("packages.without_torch", f"not looked at, as torch does not load: {', '.join(without_torch)}")
    yield from _versions(loaded, wanted)


def _python() -> Finding:
    version = platform.python_version()
    where = "a venv" if sys.prefix != sys.base_prefix else "conda's" if os.environ.get("CONDA_PREFIX") else "no venv"
    what = f"Python {version} ({where}: {sys.prefix})"
    data = {"version": version, "executable": sys.executable, "prefix": sys.prefix}
    if known.this_python() in known.PYTHONS:
        return ok("python", what, **data)
    tried = " and ".join(known.PYTHONS)
    return warning(
        "python", f"{what}: mrl is tested on {tried}", "make a venv of one of them if something fails", **data
    )


def _mrl() -> Finding:
    folder = str(pathlib.Path(mrl.__file__).parent)
    what, data = f"mrl {mrl.__version__} ({folder})", {"version": mrl.__version__, "folder": folder}
    try:
        version = importlib.metadata.version("mrl")
    except importlib.metadata.PackageNotFoundError:
        return note("mrl", f"{what}, not installed: pip does not know what it needs", **data)
    if version != mrl.__version__:
        fix = f"pip install -e {pathlib.Path(folder).parent}, or take that folder out of PYTHONPATH"
        return warning("mrl", f"{what} runs, and {version} is installed", fix, **data)
    return ok("mrl", what, **data)


def canonical(name: str) -> str:
    """Returns a package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Returns package -> version, of the first on the import path, by canonical names and by those in `known`."""
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        name, version = one.metadata["Name"], one.metadata["Version"]
        if name and version:  # of an installation that broke off they are missing
            found.setdefault(canonical(name), version)
    ours = {
        package.name: found[canonical(package.name)]
        for package in known.NEEDED_PACKAGES
        if canonical(package.name) in found
    }
    return found | ours


def _is_absent(name: str, error: str, have: Mapping[str, str]) -> bool:
    return name not in have and "No module named" in error


def _is_nowhere(package: known.Package, have: Mapping[str, str]) -> bool:
    """Returns whether neither pip nor Python knows of it; nothing is imported for it."""
    return package.name not in have and not is_found(package.modules[0].partition(".")[0])


def _nothing_installed(absent: Sequence[str]) -> Finding:
    constraints = f"-c constraints-{known.this_python()}.txt"
    fix = (
        f"pip install {constraints} torch, then pip install {constraints} -e . (in mrl's folder), or `make venv` there"
    )
    what = f"{len(absent)} packages are not installed, and no run starts: {', '.join(absent)}"
    return fault("packages.absent", what, fix, absent=list(absent))


def _broken(
    package: known.Package, error: str, have: Mapping[str, str], wanted: Mapping[str, str], broken: Sequence[str]
) -> Finding:
    name, version = package.name, have.get(package.name)
    pinned = f"'{name}=={wanted[name]}'" if name in wanted else f"-c constraints-{known.this_python()}.txt {name}"
    if _is_absent(name, error, have):
        what, fix = f"{name} is not installed: {package.without}", f"pip install {pinned}"
    else:
        what = f"{name} {version or ''}".rstrip() + f" does not load ({error}){hint(error)}: {package.without}"
        fix = f"pip install --force-reinstall {pinned}"
        if broken:  # peft and megatron-core import transformer-engine if they find it, and fail with it
            fix = f"mend or uninstall {', '.join(broken)} first, which may be the cause (see below); else {fix}"
    say = fault if package.always else warning
    return say(f"package.{name}", what, fix, error=error, version=version)


def _misplaced(package: known.Package, found: ImportResult, have: Mapping[str, str]) -> Iterator[Finding]:
    """Says so if a package is imported from another place than it was installed in."""
    at, version = f"package.{package.name}.place", have.get(package.name)
    if not found.is_package:
        what = f"{package.name} is a folder of that name without code: {package.without}"
        yield fault(at, what, f"pip install {package.name}, and rename that folder", file=found.file)
        return
    whole = "." not in package.modules[0]  # a module of a package may have a version of its own
    if whole and found.version and version and _public(found.version) != _public(version):
        what = f"{package.name} is {found.version} at {found.file}, and pip has installed {version}"
        yield warning(at, what, f"pip uninstall {package.name}, look at PYTHONPATH, install it anew", file=found.file)


def _torch(facts: ImportResult) -> Iterator[Finding]:
    if not facts.works:
        what = f"torch loads, and cannot be asked about this machine ({facts.error})"
        fix = "see what `python -c 'import torch; torch.cuda.init()'` says; mend the driver, or reinstall torch"
        yield fault("torch.build", what, fix)
        return
    found = facts.facts
    build = f"CUDA {found['cuda']}" if found["cuda"] else f"ROCm {found['hip']}" if found["hip"] else "the CPU"
    parts = [f"torch {found['version']} is built for {build}"]
    if found["nccl"]:
        parts.append(f"NCCL {'.'.join(map(str, found['nccl']))}")
    if found["cudnn"]:
        parts.append(f"cuDNN {found['cudnn'] // 10_000}.{found['cudnn'] // 100 % 100}.{found['cudnn'] % 100}")
    data = {key: found[key] for key in ("version", "cuda", "hip", "cudnn", "nccl")}
    yield ok("torch.build", ", ".join(parts), **data)


def _versions(loaded: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[Finding]:
    """Compares what loads with the versions that are known to work."""
    for name, version in loaded.items():
        if name in wanted and version != UNKNOWN and _series(version) != _series(wanted[name]):
            what = f"{name} {version} is untried with this mrl; {wanted[name]} is known to work"
            fix = f"pip install '{name}=={wanted[name]}' if something fails"
            yield warning(f"package.{name}.version", what, fix, version=version)
    if loaded:
        named = ", ".join(f"{name} {version}" for name, version in loaded.items())
        yield ok("packages", f"these load: {named}", **loaded)


def _public(version: str) -> str:
    """Returns a version without its build: 2.13.0 of 2.13.0+cpu."""
    return version.partition("+")[0]


def _series(version: str) -> list[str]:
    return re.findall(r"\d+", version)[:2]
