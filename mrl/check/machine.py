"""Finds the limits of this machine: processes, memory, and the size of a batch that takes some seconds."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import psutil
import torch

from mrl.check.cut import LAYERS, WIDTH, ModelCut, cut_config
from mrl.check.folder import Head, count_parameters
from mrl.check.layouts import Layout
from mrl.errors import ConfigError, UserError

MAX_PROCESSES = 8
"""Processes at a time on a machine without GPUs, by default of --nproc."""
SEQUENCES, SHORTEST, LONGEST = 8, 32, 512
"""Sequences of the checked batch, and tokens of one, at least and at most, by default of --tokens."""
FLOPS = {"cpu": 2e11, "cuda": 1e14}
"""Work of one step on one process, which tokens are chosen by: some seconds."""
BYTES_PER_PARAMETER = 24
"""Memory for each copy of the model: weights, gradients, AdamW's state and the copies that are compared, in fp32."""
DISK_BYTES_PER_PARAMETER = 12
"""Space in the temporary folder: the reference's start, gradients and weights."""
BYTES_PER_PROCESS = 700e6
MEMORY_SHARE = 0.7
"""The part of the free memory that a check may take."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Holds the device and the processes for layouts."""

    device: Literal["cpu", "cuda"]
    processes: int  # at a time, at most
    note: str | None = None


def machine(wanted: str, asked: int | None) -> Machine:
    """Returns the device and processes for an engine. wanted: its engine.device. asked: --nproc."""
    gpus = 0 if wanted == "cpu" else torch.cuda.device_count()
    if wanted == "cuda" and not gpus:
        raise ConfigError("engine.device", "cuda", "needs a GPU, and torch sees none", "use auto or cpu")
    note = None
    if gpus == 1 and wanted == "auto" and asked != 1:
        note = "the CPU, as one GPU holds no layout of several processes (engine.device=cuda for that GPU alone)"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the processes that are started
        gpus = 0
    if not gpus:
        return Machine("cpu", asked or MAX_PROCESSES, note)
    if asked is not None and asked > gpus:
        raise UserError("--nproc", asked, f"is above the {gpus} GPUs of this machine", f"give at most {gpus}")
    return Machine("cuda", asked or gpus)


def free_bytes(on: Machine) -> float:
    """Returns the memory of the host, or of one GPU times those that are used."""
    if on.device == "cpu":
        return psutil.virtual_memory().available - BYTES_PER_PROCESS * on.processes
    return on.processes * min(torch.cuda.mem_get_info(i)[0] for i in range(on.processes))


def choose_cut(raw: Mapping[str, Any], head: Head, layouts: Sequence[Layout] | None, on: Machine) -> ModelCut:
    """Returns the smallest cut of the model that fits here. layouts: None if they are not chosen yet.

    First all layers but a few go, then the width. A quantised model is always cut, because transformers computes
    differently with its own weights.
    """
    layers = max([LAYERS, *(layout.parallel.pp * layout.parallel.vpp for layout in layouts or ())])
    copies = max([layout.dims.dp * layout.dims.cp for layout in layouts], default=1) if layouts else 2
    disk = shutil.disk_usage(tempfile.gettempdir()).free * copies / DISK_BYTES_PER_PARAMETER * BYTES_PER_PARAMETER
    room = MEMORY_SHARE * min(free_bytes(on), disk)
    choices = [ModelCut(), ModelCut(layers=layers), ModelCut(layers=layers, width=WIDTH)]
    for cut in choices[bool(raw.get("quantization_config")) :]:
        if BYTES_PER_PARAMETER * copies * count_parameters(cut_config(raw, cut), head) <= room:
            return cut
    return choices[-1]


def size_of_batch(
    parameters: int, layouts: Sequence[Layout], *, tokens: int | None, most: int, even: bool, on: Machine
) -> tuple[int, int]:
    """Returns (sequences, tokens of one at most).

    tokens: --tokens. most: sequences of the global batch.

    even: each replica of each layout gets equally many. Router losses are the same in all layouts only then.
    """
    replicas = math.lcm(*(layout.dims.dp * (layout.parallel.pp if even else 1) for layout in layouts))
    sequences = max(SEQUENCES, 2 * max(layout.dims.dp for layout in layouts))
    sequences = -(-sequences // replicas) * replicas if even else min(sequences, most)
    if tokens is not None:
        return sequences, max(2, tokens // sequences)
    affordable = FLOPS[on.device] / (6 * max(parameters, 1)) / sequences
    return sequences, int(min(max(affordable, SHORTEST), LONGEST))
