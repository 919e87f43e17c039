"""Optional packages: transformer-engine, apex, flash-attn and DeepEP for GPUs, and vLLM. The cost of each in words, if
it is absent or broken."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from mrl.doctor.ask import ImportResult, failure, is_found, load
from mrl.doctor.findings import Finding, fault, note, ok, warning
from mrl.doctor.packages import installed_version, same_series, this_python, versions
from mrl.mcore_models import optional
from mrl.rollout.vllm_start import untested


@dataclasses.dataclass(frozen=True)
class OptionalPackage:
    """A package that no run needs."""

    name: str  # as people call it
    distribution: str  # as pip calls it
    module: str
    absent: str  # what its absence costs

    @property
    def is_present(self) -> bool:
        """Returns whether Python finds it. To find flash-attn 4 would import the package around it: pip knows of it."""
        if "." in self.module:
            return installed_version(self.distribution) is not None
        return is_found(self.module) and optional.is_package(self.module)

    def load(self) -> ImportResult:
        """Imports what a run uses of it, in another process."""
        return load(self.module, optional.MODULES.get(self.module, (self.module,)))


TE, VLLM = "transformer_engine", "vllm"
NOTHING = "nothing is lost"
PACKAGES: Sequence[OptionalPackage] = (
    OptionalPackage(
        "transformer-engine", "transformer-engine", TE,
        "torch's attention, norms apart from linear layers, experts one by one but for bfloat16 on H100 and B200, "
        "torch's AdamW",
    ),
    OptionalPackage("apex", "apex", "apex", f"{NOTHING} beside transformer-engine"),
    OptionalPackage("flash-attn 2", "flash-attn", "flash_attn", f"{NOTHING} without transformer-engine; see below"),
    OptionalPackage("flash-attn 3", "flash-attn-3", "flash_attn_interface", "its GPUs have cuDNN's kernel"),
    OptionalPackage("flash-attn 4", "flash-attn-4", "flash_attn.cute.interface", "its GPUs have cuDNN's kernel"),
    OptionalPackage("DeepEP", "deep-ep", "deep_ep", f"{NOTHING}, as experts are exchanged by all-to-all"),
    OptionalPackage("vLLM", "vllm", VLLM, "the actor's own engine samples, or servers of rollout.server.urls"),
)  # fmt: skip

INSTALL = (
    "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.20.2,<2.21' (docs/gpu-install.md), "
    "or NVIDIA's image"
)
MEGATRON_PACKAGES = ("flash_attn", "deep_ep")
"""Those that megatron-core imports by itself, a GPU or not, and does without where that is an ImportError alone."""

BROKEN = "reinstall it, built for this torch and CUDA (docs/gpu-install.md), or uninstall it"


def section(imported: Mapping[str, ImportResult], *, gpu: bool) -> Iterator[Finding]:
    """Yields a finding for each package. imported: of those that are present, by module. gpu: whether there is one."""
    for package in PACKAGES:
        name, result = f"package.{package.name.replace(' ', '-').lower()}", imported.get(package.module)
        version = installed_version(package.distribution) or (result.version if result is not None else None)
        have = f"{package.name} {version or ''}".strip()
        is_te = package.module == TE
        if result is None and is_te and gpu:
            yield warning(name, f"{package.name} is not installed: {package.absent}", INSTALL)
        elif result is None:
            yield note(name, f"{package.name} is not installed: {package.absent if gpu or not is_te else NOTHING}")
        elif package.module == "apex" and not optional.is_nvidias_apex():
            what = f"{have} is another package of that name than NVIDIA's: mrl hides it from megatron-core"
            yield warning(name, what, "pip uninstall apex, or rename its folder")
        elif result.error is not None:
            yield _broken(package, name, f"{have} {failure(result.error)}", gpu=gpu)
        else:
            yield _works(package, name, have, version)


def _broken(package: OptionalPackage, name: str, what: str, *, gpu: bool) -> Finding:
    if package.module == VLLM:
        return warning(name, f"{what}: rollout.backend=vllm works with rollout.server.urls alone", BROKEN)
    if package.module in MEGATRON_PACKAGES and not re.search(r"load \((Import|ModuleNotFound)Error", what):
        return fault(name, f"{what}: megatron-core imports it, and fails with it: no run with it starts", BROKEN)
    if not gpu:
        return note(name, f"{what}; {NOTHING} without a GPU")
    if package.module == TE:
        return fault(name, f"{what}: a run stops with engine.layer_spec auto or te", BROKEN)
    return warning(name, f"{what}: what imports it, as transformer-engine and megatron-core do, may fail", BROKEN)


def _works(package: OptionalPackage, name: str, have: str, version: str | None) -> Finding:
    line = None
    if package.module == VLLM:
        line = untested(version or "")
    elif package.module == TE and version is not None:
        wanted = versions(this_python()).get(package.distribution, version)
        line = None if same_series(version, wanted) else f"mrl is tested with {wanted}"
    if line is not None:
        return note(name, f"{have} loads; {line}", version=version)
    return ok(name, f"{have} loads", version=version)
