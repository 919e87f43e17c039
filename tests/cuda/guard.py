"""The shared library of guard.cpp for this torch. Nothing here imports torch: the library is loaded before it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


def build() -> Path:
    """Returns the library; compiles it where that was not done yet, in about 7 s."""
    assert shutil.which("g++"), "tests/cuda needs g++, to compile guard.cpp"
    root = Path(importlib.util.find_spec("torch").origin).parent
    made_of = SOURCE.read_bytes() + f"{importlib.metadata.version('torch')} {root}".encode()
    built = Path(tempfile.gettempdir()) / f"mrl-guard-{os.getuid()}-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if not built.exists():
        part = built.with_suffix(f".{os.getpid()}")
        libraries = ["-lc10", "-ltorch_cpu", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib"]
        command = ["g++", "-O1", "-shared", "-fPIC", "-std=c++20", str(SOURCE), f"-I{root}/include", "-o", str(part)]
        subprocess.run([*command, *libraries], check=True)
        os.replace(part, built)  # two test processes may build it at once
    return built
