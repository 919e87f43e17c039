"""Environment variables of CUDA and of torch's allocator, set for a run's processes unless the user has set them.

They are read when a process first uses a GPU, so they are set before torch is asked for one.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence

from mrl.config.command import Part
from mrl.parallel import ParallelDims

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name
BLACKWELL = 10  # the first number of its compute capability
LIMIT_S = 30


def variables_to_set(
    parts: Sequence[Part], layouts: Sequence[ParallelDims], environ: Mapping[str, str], *,
    generates: bool, generation: Callable[[], int | None],
) -> dict[str, str]:  # fmt: skip
    """Returns the variables.

    generates: the run samples from models. generation: returns the first number of the GPUs' compute capability. None
    means no GPU, or an unknown one; nothing is set then.

    - One connection: megatron-core queues a collective of tp or cp before the product that overlaps it. Before
      Blackwell the two start in that order only with one connection. FSDP's gathers need several, and so does an
      expert that overlaps an exchange.
    - Expandable segments leave fewer holes if lengths change from step to step. vLLM inside the trainer does not sleep
      with them, and memory is not shared with a server's processes.
    """
    known = generation()
    if known is None:
        return {}
    variables = {}
    megatron = all(part.engine.backend == "megatron" for part in parts)
    beside = any(part.engine.megatron.get("moe_shared_expert_overlap") for part in parts)
    split = any(dims.tp > 1 or dims.cp > 1 for dims in layouts)
    if CONNECTIONS not in environ and megatron and split and not beside and known < BLACKWELL:
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
