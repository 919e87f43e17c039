"""Environment variables that change what a run does."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.doctor.findings import Finding, Level, fault, note, ok
from mrl.errors import shortened

PREFIXES = (
    "CUBLAS_", "CUDA_", "FSSPEC_", "GLOO_", "HF_", "HUGGING", "KMP_", "LD_LIBRARY_PATH", "LD_PRELOAD", "MKL_", "NCCL_",
    "NVIDIA_", "NVTE_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "SBATCH_", "TMPDIR", "TOKENIZERS_", "TORCH",
    "TRANSFORMERS_", "TRITON_", "UCX_", "VLLM_", "WANDB_", "XDG_CACHE_HOME",
)  # fmt: skip
"""What names of variables that change a run begin with."""

HARMLESS = ("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONIOENCODING", "PYTHONUNBUFFERED", "PYTHONUTF8")

SECRET = re.compile(r"TOKEN(?!IZER)|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is known of a variable."""

    names: str  # a regular expression of the whole name
    values: str  # and of the whole value, whatever its case
    does: str
    level: Level = "note"
    fix: str = ""


def _slow(names: str, values: str, does: str, fix: str = "unset it") -> Rule:
    return Rule(names, values, does, "warning", fix)


SET, OFF = ".+", "0"
RULES: Sequence[Rule] = (
    _slow("CUDA_LAUNCH_BLOCKING", "1", "every kernel is waited for: for debugging, several times slower"),
    _slow("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "the driver allocates every tensor: very slow"),
    _slow("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "ranks compare every collective first, which is slow"),
    _slow("(TORCH_)?NCCL_BLOCKING_WAIT", "1", "the host waits in every collective"),
    _slow("(TORCH_)?NCCL_ASYNC_ERROR_HANDLING", OFF, "a rank that lost another one waits for the timeout of hours"),
    _slow("NCCL_P2P_DISABLE", "1", "GPUs of a machine exchange through the host"),
    _slow("NCCL_SHM_DISABLE", "1", "GPUs of a machine without peer access exchange over the network"),
    Rule("NCCL_IB_DISABLE", "1", "NCCL goes over TCP between machines"),
    Rule("NCCL_NET_GDR_LEVEL", "LOC|0", "network cards do not read the memory of GPUs"),
    Rule("NCCL_DEBUG", "INFO|TRACE", "every rank prints what NCCL does"),
    Rule("NCCL_(ALGO|PROTO)", SET, "NCCL does not choose the fastest way itself"),
    Rule("NVTE_FLASH_ATTN(_V2)?", OFF, "transformer-engine leaves flash-attn out, and so does the table above"),
    _slow(
        "NVTE_FUSED_ATTN", OFF, "transformer-engine leaves cuDNN's attention out, and so does the table above",
        "unset it, or set engine.layer_spec=local",
    ),
    Rule("NVTE_UNFUSED_ATTN", OFF, "transformer-engine leaves its unfused attention out, and so does the table above"),
    Rule("NVTE_ALLOW_NONDETERMINISTIC_ALGO", OFF, "transformer-engine takes deterministic kernels, which are slower"),
    Rule(
        "PYTORCH_(CUDA_)?ALLOC_CONF", ".*expandable_segments:True.*",
        "GPU memory grows in segments, with which vLLM inside the trainer does not sleep",
    ),
    Rule("TORCHDYNAMO_DISABLE|TORCH_COMPILE_DISABLE", "1", "torch compiles nothing, nor megatron's fused functions"),
    Rule("CUBLAS_WORKSPACE_CONFIG", SET, "matrix products are deterministic, some of them slower"),
    _slow("NVIDIA_TF32_OVERRIDE", "0|1", "fp32 matrix products have another precision than torch is told"),
    Rule("(HF_HUB|TRANSFORMERS|HF_DATASETS)_OFFLINE", "1|ON|YES|TRUE", "hub ids are read from the cache alone"),
    Rule("TRANSFORMERS_CACHE", SET, "transformers 5 does not read it: HF_HOME says where models are kept"),
    Rule("HF_ENDPOINT", SET, "hub ids are read from there"),
    Rule("WANDB_MODE", "offline|disabled|dryrun", "log.wandb does not upload"),
    _slow("PYTHONHOME", SET, "Python takes its own library from there, which of another Python breaks it"),
    _slow("PYTHONOPTIMIZE", "[1-9]", "checks of invariants (assert) are left out"),
    Rule("PYTHONMALLOC|PYTHONDEVMODE|PYTHONTRACEMALLOC", SET, "Python checks or counts memory, which is slow"),
)  # fmt: skip


def section(
    environment: Mapping[str, str] = os.environ, joined: Mapping[str, Any] | None = None
) -> Iterator[Finding]:  # fmt: skip
    """joined: what `joined_world` makes of the variables of launchers, from choices.py."""
    yield from _launcher(joined)
    plain = []
    for name in sorted(environment):
        if not name.startswith(PREFIXES) or name in HARMLESS:
            continue
        value = "(not shown)" if SECRET.search(name) else shortened(environment[name], 80)
        rule = _rule_of(name, environment[name])
        if rule is None:
            plain.append(f"{name}={value}")
        else:
            yield Finding(f"variable.{name}", rule.level, f"{name}={value}: {rule.does}", rule.fix)
    if plain:
        yield ok("variables", f"also set: {', '.join(plain)}")
    yield from _libraries(environment.get("LD_LIBRARY_PATH", ""))


def _rule_of(name: str, value: str) -> Rule | None:
    for rule in RULES:
        if re.fullmatch(rule.names, name) and re.fullmatch(rule.values, value, re.IGNORECASE):
            return rule
    return None


def _launcher(joined: Mapping[str, Any] | None) -> Iterator[Finding]:
    if joined is None:
        return
    if "error" in joined:
        fix = "unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start through torchrun or srun"
        yield fault("variable.launcher", str(joined["error"]), fix)
        return
    of = f"rank {joined['rank']} of {joined['world']}"
    what = f"variables of {joined['launcher']} are set: a run that is started here is {of}, and waits for the others"
    yield note("variable.launcher", what, **joined)


OF_TORCH = ("libcudart.so", "libcudnn.so", "libnccl.so", "libcublas.so", "libtorch.so", "libstdc++.so")


def _libraries(path: str) -> Iterator[Finding]:
    """torch brings libraries of CUDA; those in LD_LIBRARY_PATH are found before them."""
    found = []
    for folder in filter(None, path.split(":")):
        with contextlib.suppress(OSError):
            found += [f"{folder}/{name}" for name in sorted(os.listdir(folder)) if name.startswith(OF_TORCH)]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        what = (
            f"LD_LIBRARY_PATH has libraries that torch brings too, and is looked in first: {', '.join(found[:3])}{more}"
        )
        yield note("variable.libraries", what, found=found)
