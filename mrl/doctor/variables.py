"""Environment variables that change what a run does."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from mrl.doctor.findings import Finding, ok
from mrl.errors import shortened

PREFIXES = tuple("""
    CUBLAS_ CUDA_ FSSPEC_ GLOO_ HF_ HUGGING KMP_ LD_LIBRARY_PATH LD_PRELOAD MKL_ NCCL_ NVIDIA_ NVTE_ OMP_ OPENBLAS_
    PYTHON PYTORCH_ SBATCH_ TMPDIR TOKENIZERS_ TORCH TRANSFORMERS_ TRITON_ UCX_ VLLM_ WANDB_ XDG_CACHE_HOME
""".split())  # fmt: skip  # noqa: SIM905
"""Beginnings of the names of variables that change a run."""

HARMLESS = ("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONIOENCODING", "PYTHONUNBUFFERED", "PYTHONUTF8")

SECRET = re.compile(r"TOKEN(?!IZER)|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def section(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    found = []
    for name, value in sorted(environment.items()):
        if name.startswith(PREFIXES) and name not in HARMLESS:
            found.append(f"{name}={'(not shown)' if SECRET.search(name) else shortened(value, 80)}")
    if found:
        yield ok("variables", f"set here: {', '.join(found)}")
