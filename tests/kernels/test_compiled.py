"""Kernels go through Triton's compiler and NVIDIA's assembler."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_kernel_compiles_for_a_gpu():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr[-3000:]
    sources = "".join(file.read_text() for file in (ROOT / "mrl/kernels").glob("*.py"))
    assert found.stdout.split() == sorted(re.findall(r"^def (_\w+_kernel)\(", sources, re.MULTILINE))
