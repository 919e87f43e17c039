"""Environment variables that change what a run does."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence

from mrl.doctor.findings import Finding, Level, ok
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
    """The effect of some values of variables."""

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
    _slow("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "ranks compare every collective first, which is slow"),
    _slow("(TORCH_)?NCCL_ASYNC_ERROR_HANDLING", OFF, "a rank that lost another one waits for the timeout of hours"),
    _slow("NCCL_P2P_DISABLE", "1", "GPUs of a machine exchange through the host"),
    Rule("NCCL_IB_DISABLE", "1", "NCCL goes over TCP between machines"),
    Rule("NCCL_DEBUG", "INFO|TRACE", "every rank prints what NCCL does"),
    Rule("NVTE_FLASH_ATTN(_V2)?", OFF, "transformer-engine leaves flash-attn out, and so does the table above"),
    _slow(
        "NVTE_FUSED_ATTN", OFF, "transformer-engine leaves cuDNN's attention out, and so does the table above",
        "unset it, or set engine.layer_spec=local",
    ),
    Rule(
        "PYTORCH_(CUDA_)?ALLOC_CONF", ".*expandable_segments:True.*",
        "GPU memory grows in segments, with which vLLM inside the trainer does not sleep",
    ),
    Rule("TORCHDYNAMO_DISABLE|TORCH_COMPILE_DISABLE", "1", "torch compiles nothing, nor megatron's fused functions"),
    _slow("NVIDIA_TF32_OVERRIDE", "0|1", "fp32 matrix products have another precision than torch is told"),
    Rule("(HF_HUB|TRANSFORMERS|HF_DATASETS)_OFFLINE", "1|ON|YES|TRUE", "hub ids are read from the cache alone"),
    _slow("PYTHONOPTIMIZE", "[1-9]", "checks of invariants (assert) are left out"),
)  # fmt: skip


def section(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
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


def _rule_of(name: str, value: str) -> Rule | None:
    for rule in RULES:
        if re.fullmatch(rule.names, name) and re.fullmatch(rule.values, value, re.IGNORECASE):
            return rule
    return None
