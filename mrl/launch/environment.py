"""The environment of a run's processes: the launcher that started them, and variables that are set for them.

Variables of CUDA and of torch's allocator are read when a process first uses a GPU, so they are set before torch is
asked for one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence

import psutil

from mrl.config.command import Part
from mrl.errors import ConfigError
from mrl.parallel import ParallelDims


@dataclasses.dataclass(frozen=True)
class JoinedWorld:
    """This process's place among processes that another launcher started."""

    launcher: str
    rank: int
    world_size: int
    variables: Mapping[str, str]  # all that torch.distributed's `env://` needs; the caller puts it into os.environ


def joined_world(environ: Mapping[str, str]) -> JoinedWorld | None:
    """Returns what torchrun (RANK, WORLD_SIZE, ...) or srun (SLURM_*) says about this process; None where neither did.

    An srun or sbatch step of a single task counts as none: there is nothing to join, and processes may be started.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _torchrun(environ)
    name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    if "SLURM_PROCID" not in environ or not environ.get(name):
        return None
    tasks = _number(environ, name)
    return _srun(environ, tasks) if tasks > 1 else None


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].strip().isdecimal():
        why = f"{name} is {environ[name]!r}, not a whole number"
        raise ConfigError("environment", why=why, fix="start through torchrun or srun, or unset it")
    return int(environ[name])


def _torchrun(environ: Mapping[str, str]) -> JoinedWorld:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in environ]
    if missing:
        why = f"of {', '.join(names)}, {', '.join(missing)} is not set"
        raise ConfigError("environment", why=why, fix="start through torchrun, or unset them all")
    variables = {name: environ[name] for name in names}
    variables["LOCAL_RANK"] = environ.get("LOCAL_RANK", environ["RANK"])
    return JoinedWorld("torchrun", _number(environ, "RANK"), _number(environ, "WORLD_SIZE"), variables)


def _srun(environ: Mapping[str, str], tasks: int) -> JoinedWorld:
    rank = _number(environ, "SLURM_PROCID")
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environ[name] for name in names if environ.get(name)), "")
    if not (environ.get("MASTER_ADDR") or nodes):
        why = "SLURM_PROCID is set but SLURM_JOB_NODELIST is not"
        raise ConfigError("environment", why=why, fix="set MASTER_ADDR, or use srun")
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_port(environ)),
    }
    return JoinedWorld("srun", rank, tasks, variables)


def ranks_here(environ: Mapping[str, str]) -> int:
    """Returns the most ranks on a node, as the launcher says: torchrun, or srun with a text like `8(x2),4`."""
    names = ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    text = next((environ[name] for name in names if environ.get(name)), "1")
    return max(int(number) for number in re.findall(r"\d+", re.sub(r"\(x\d+\)", "", text)) or ["1"])


def _port(environ: Mapping[str, str]) -> int:
    """Returns a port that every task of a job step computes alike. Jobs on one node rarely get the same."""
    job, step = int(environ.get("SLURM_JOB_ID", "0")), int(environ.get("SLURM_STEP_ID", "0"))
    return 20000 + (job * 16 + step) % 12000


def first_host(nodes: str) -> str:
    """Returns the first host of a Slurm node list: `gpu[03-07,11],login1` -> `gpu03`."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    assert match is not None, nodes
    prefix, first, suffix = match.groups()
    return prefix + (first or "") + (suffix or "")


def interface_towards(host: str) -> str | None:
    """Returns the network interface to `host`, which may be this machine; None if it is not known.

    For gloo, which would take the one of this machine's host name: often a loopback or an office network.
    """
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of UDP: chooses a route and sends nothing
            ours = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(one.address.partition("%")[0] == ours for one in addresses):
                return name
    return None


def loopback() -> dict[str, str]:
    """Returns variables for gloo on the loopback interface. A host name may resolve to an unreachable address."""
    names = {name for _, name in socket.if_nameindex()}
    return {"GLOO_SOCKET_IFNAME": next(n for n in ("lo", "lo0") if n in names)} if names & {"lo", "lo0"} else {}


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name
BLACKWELL = 10  # the first number of its compute capability
LIMIT_S = 30


def variables_to_set(
    parts: Sequence[Part], layouts: Sequence[ParallelDims], environ: Mapping[str, str], *,
    generates: bool, generation: int | None,
) -> dict[str, str]:  # fmt: skip
    """Returns the variables.

    generates: the run samples from models. generation: the first number of the GPUs' compute capability. None means no
    GPU, or an unknown one; nothing is set then.

    - One connection: megatron-core queues a collective of tp or cp before the product that overlaps it. Before
      Blackwell the two start in that order only with one connection. FSDP's gathers need several, and so does an
      expert that overlaps an exchange.
    - Expandable segments leave fewer holes if lengths change from step to step. vLLM inside the trainer does not sleep
      with them, and memory is not shared with a server's processes.
    """
    if generation is None:
        return {}
    variables = {}
    megatron = all(part.engine.backend == "megatron" for part in parts)
    beside = any(part.engine.megatron.get("moe_shared_expert_overlap") for part in parts)
    split = any(dims.tp > 1 or dims.cp > 1 for dims in layouts)
    if CONNECTIONS not in environ and megatron and split and not beside and generation < BLACKWELL:
        variables[CONNECTIONS] = "1"
    if not generates and not any(name in environ for name in ALLOCATOR):
        variables |= dict.fromkeys(ALLOCATOR, "expandable_segments:True")
    return variables


def generation_of_gpus() -> int | None:
    """Asks nvidia-smi: torch would begin to use a GPU. The lowest where there are several kinds."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        return min(int(line.split(".")[0]) for line in done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
