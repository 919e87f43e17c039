"""Slurm and containers: what of them is here, and what this process is inside of."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

from mrl.doctor.ask import program
from mrl.doctor.findings import Finding, count, note, ok, warning

LIMIT_S = 15.0
"""A controller that is down keeps Slurm's commands waiting for minutes."""

JOB_VARIABLES: Mapping[str, str] = {
    "SLURM_JOB_NODELIST": "on",
    "SLURM_NTASKS": "tasks",
    "SLURM_CPUS_ON_NODE": "processors here",
    "SLURM_GPUS_ON_NODE": "GPUs here",
    "SLURM_MEM_PER_NODE": "MiB of memory a node",
}

ENGINES: Mapping[str, Sequence[str]] = {
    "docker": ("version", "--format", "{{.Server.Version}}"),
    "podman": ("--version",),
    "enroot": ("version",),
    "apptainer": ("--version",),
    "singularity": ("--version",),
}
"""Container engines, and how each says its version; docker's is that of its daemon."""


def slurm(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    if (job := environment.get("SLURM_JOB_ID")) is not None:
        parts = [f"{words} {environment[name]}" for name, words in JOB_VARIABLES.items() if environment.get(name)]
        yield note("slurm.job", f"inside of Slurm's job {job}: {', '.join(parts)}", job=job)
    version = program("sbatch", "--version", limit_s=LIMIT_S)
    if version is None:
        yield note("slurm", "no Slurm here (no sbatch on the PATH); `mrl slurm render` writes job scripts all the same")
        return
    words = version.out.strip() if version.ok else f"Slurm (sbatch --version {version.said})"
    nodes = program("sinfo", "--noheader", "--format=%P|%a|%D|%l|%G", limit_s=LIMIT_S)
    if nodes is None or not nodes.ok:
        why = "no sinfo on the PATH" if nodes is None else f"sinfo {nodes.said}"
        fix = "see `scontrol ping`: its controller (slurmctld) is down or not reached, or munge does not run here"
        yield warning("slurm", f"{words} is here and does not answer ({why}): no job is submitted or followed", fix)
        return
    yield _partitions(words, nodes.out)
    yield _submitting(environment)
    shown = program("srun", "--help", limit_s=LIMIT_S)
    if shown is not None and "--container-image" in shown.out:
        yield ok("slurm.pyxis", "srun runs containers (pyxis), as `mrl slurm` does with --template container")


def _partitions(words: str, text: str) -> Finding:
    fields = ("name", "state", "nodes", "time", "gres")
    lines = [line.split("|") for line in text.splitlines() if line.count("|") == len(fields) - 1]
    found = [dict(zip(fields, line, strict=True)) for line in lines]
    shown = []
    for one in found:
        gres = "" if one["gres"] in ("(null)", "") else f" with {one['gres']}"
        down = "" if one["state"] == "up" else f", {one['state']}"
        shown.append(f"{one['name']} ({count(int(one['nodes']), 'node')}{gres}{down})")
    return ok("slurm", f"{words}; partitions: {', '.join(shown) or 'none'}", partitions=found)


def _submitting(environment: Mapping[str, str]) -> Finding:
    """Asks whether a job would be taken; none is submitted. SBATCH_* are left out, as `mrl slurm` does."""
    plain = {name: value for name, value in environment.items() if not name.startswith("SBATCH_")}
    tried = program("sbatch", "--test-only", "--wrap=true", limit_s=LIMIT_S, environment=plain)
    assert tried is not None
    if tried.ok:
        return ok("slurm.sbatch", "sbatch would take a job of yours (--test-only)")
    fix = "give what it asks for (account, partition, time) in the profile of `mrl slurm`, or ask its administrators"
    return warning("slurm.sbatch", f"sbatch would not take a job with defaults alone: it {tried.said}", fix)


def containers(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    inside = container(environment)
    if inside is not None:
        yield note(
            "container.inside", f"inside of a container ({inside}): devices and limits are those that it was given"
        )
    here, silent = [], []
    for name, arguments in ENGINES.items():
        answer = program(name, *arguments, limit_s=LIMIT_S)
        if answer is None:
            continue
        version = re.search(r"\d+\.\d+[\w.+-]*", answer.out)
        if answer.ok and version is not None:
            here.append(f"{name} {version[0]}")
        else:
            silent.append(f"{name} {answer.said}")
    if here:
        yield ok("container.engines", f"container engines: {', '.join(here)}", engines=here)
    if silent:
        yield note("container.silent", f"container engines that do not answer: {'; '.join(silent)}")
    if not here and not silent:
        yield note("container.engines", f"no container engine ({', '.join(ENGINES)})")


def container(environment: Mapping[str, str], root: str = "/") -> str | None:
    """Returns what kind of container this process is in; None where nothing says so."""
    variables = {
        "APPTAINER_CONTAINER": "apptainer",
        "SINGULARITY_CONTAINER": "singularity",
        "ENROOT_ROOTFS": "enroot",
        "KUBERNETES_SERVICE_HOST": "Kubernetes",
    }
    for variable, name in variables.items():
        if environment.get(variable):
            return name
    for file, name in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if pathlib.Path(root, file).exists():
            return name
    return environment.get("container") or None  # systemd's own word for it
