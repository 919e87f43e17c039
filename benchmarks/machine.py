"""What a report says about where it was made: processor, versions, and the venv of the peer."""

from __future__ import annotations

import importlib.metadata
import pathlib
import platform
import subprocess
import sys
import venv

TORCH, TRL = "2.13.0", "1.16.0"


def peer_python(folder: pathlib.Path, *, make: bool) -> str:
    """The interpreter of TRL's venv. torch comes first and alone, so that the build suits the machine."""
    python = folder / "bin" / "python"
    if not python.exists():
        if not make:
            raise SystemExit(f"--trl-venv: {folder} holds no venv; add --make-trl-venv")
        venv.create(folder, with_pip=True)
        for package in (f"torch=={TORCH}", f"trl=={TRL}"):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", package], check=True)
    return str(python)


def machine() -> str:
    """Processor, cores, memory and system in a line."""
    text = pathlib.Path("/proc/cpuinfo").read_text() if pathlib.Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    model = next((v.strip() for k, v in fields.items() if k.strip() == "model name"), platform.processor())
    import psutil

    memory = psutil.virtual_memory().total / 2**30
    return f"{model}, {psutil.cpu_count()} cores seen, {memory:.0f} GB, {platform.system()}; one thread a process"


def versions(python: str, packages: list[str], who: str) -> str:
    if python == sys.executable:
        found = [importlib.metadata.version(name) for name in packages]
        number = platform.python_version()
    else:
        code = "import importlib.metadata as m, platform, sys; print(platform.python_version(), *map(m.version, sys.argv[1:]))"
        number, *found = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True).stdout.split()  # fmt: skip
    listed = ", ".join(f"{name} {version}" for name, version in zip(packages, found, strict=True))
    return f"- {who}: Python {number}, {listed}"
