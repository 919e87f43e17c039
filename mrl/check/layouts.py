"""Chooses the layouts of a check: words such as `tp2+sp` or `pp2xvpp2`, or a config's own layout, made smaller.

The machine has limits: processes, memory, and the size of a batch that takes some seconds.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import psutil
import torch

from mrl.check.folder import LAYERS, WIDTH, Head, ModelCut, count_parameters, cut_config
from mrl.config.checks import parallel_dims, smallest_world
from mrl.config.schema import ParallelConfig
from mrl.errors import ConfigError, UserError, quoted
from mrl.parallel import ParallelDims

AXES = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")
_WORD = re.compile(rf"({'|'.join(sorted(AXES, key=len, reverse=True))})(\d{{1,4}})(\+sp)?x?")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Holds degrees of parallelism on a number of processes."""

    parallel: ParallelConfig
    processes: int

    @property
    def dims(self) -> ParallelDims:
        return parallel_dims(self.parallel, self.processes)

    def __str__(self) -> str:
        """Returns a word for `parse_layouts`, with the experts' degree if ep alone would give another one."""
        dims = self.dims
        text = dims.describe()
        return text.replace(f"ep{dims.ep}", f"ep{dims.ep}xetp{dims.etp}") if dims.ep > 1 < dims.etp == dims.tp else text


ONE = Layout(ParallelConfig(sp=False), 1)


def parse_layouts(words: str, own: ParallelConfig) -> list[Layout]:
    """Returns the layouts of a list such as "tp2,pp2xvpp2".

    own: of the config; it decides if tp comes with sequence parallelism when the word does not.
    """
    layouts = [_named(word.strip(), own) for word in words.split(",")]
    return list(dict.fromkeys(layouts))


def _named(word: str, own: ParallelConfig) -> Layout:
    degrees: dict[str, int] = {}
    sp: bool | str = own.sp
    at = 0
    while at < len(word) and (match := _WORD.match(word, at)):
        name, degree, with_sp = match.groups()
        if name in degrees or int(degree) < 1 or (with_sp and name != "tp"):
            break
        degrees[name], at = int(degree), match.end()
        sp = True if with_sp else sp
    if not word or at < len(word) or word.endswith("x"):
        fix = f"write degrees of {', '.join(AXES)}, as in tp2, pp2xvpp2, tp2+sp or ep2xdp4; or auto"
        raise UserError("--layouts", quoted(word), "is no layout", fix)
    return _layout(degrees, sp)


def _layout(degrees: dict[str, int], sp: bool | str) -> Layout:
    """Returns the layout of some degrees, on the fewest processes that have them."""
    of_model = {name: degree for name, degree in degrees.items() if name != "dp"}
    parallel = ParallelConfig(**of_model, sp=bool(sp) and of_model.get("tp", 1) > 1)
    smallest = smallest_world(parallel)
    processes = parallel.tp * parallel.cp * parallel.pp * degrees["dp"] if "dp" in degrees else smallest
    layout = Layout(parallel, processes)
    try:
        layout.dims  # noqa: B018 - for what it refuses
    except ConfigError as error:
        raise UserError("--layouts", why=error.why, fix=error.fix) from None
    return layout


def layouts_of_config(own: ParallelConfig, *, most: int, fits: Callable[[Layout], bool]) -> list[Layout]:
    """Returns one process, each axis of a config's own layout alone, data parallelism, and what fits of them together.

    A degree comes down to its smallest divisor that `fits` the model. most: processes at a time.
    """
    axes = _reduced(own, fits)
    alone = [axes[name] for name in axes]
    layouts = [ONE, *(_layout(degrees, own.sp) for degrees in alone), _layout({"dp": 2}, own.sp)]
    layouts.append(_together(alone, own, most=most, fits=fits))
    return list(dict.fromkeys(layout for layout in layouts if layout.processes <= most and fits(layout)))


def _reduced(own: ParallelConfig, fits: Callable[[Layout], bool]) -> dict[str, dict[str, int]]:
    """Returns axis -> its smallest degrees, for each axis in use by a config."""
    layouts: dict[str, dict[str, int]] = {}
    for name in ("tp", "cp", "pp", "ep"):
        for degree in _divisors(getattr(own, name)):
            degrees = {name: degree}
            if name == "pp" and own.vpp > 1:
                degrees["vpp"] = 2
            if name == "tp" and own.etp in (1, own.tp):
                degrees["etp"] = 1 if own.etp == 1 else degree
            if fits(_layout(degrees, own.sp)):
                layouts[name] = degrees
                break
    if own.etp is not None and own.etp not in (1, own.tp):
        degree = _divisors(own.etp)[0]
        if fits(_layout({"etp": degree}, own.sp)):
            layouts["etp"] = {"etp": degree}
    return layouts


def _together(
    alone: Sequence[dict[str, int]], own: ParallelConfig, *, most: int, fits: Callable[[Layout], bool]
) -> Layout:
    """Returns the largest combination of the axes, and dp, that fits; of equally many the first."""
    for count in range(len(alone), 0, -1):
        for chosen in itertools.combinations(alone, count):
            degrees = {name: degree for degrees in chosen for name, degree in degrees.items()}
            smallest = _layout(degrees, own.sp)
            replicated = smallest if smallest.dims.dp > 1 else _layout({**degrees, "dp": 2}, own.sp)
            for layout in (replicated, smallest):
                if layout.processes <= most and fits(layout):
                    return layout
    return ONE


def _divisors(degree: int) -> list[int]:
    """Returns the divisors of a degree above 1, the smallest first."""
    return [n for n in range(2, degree + 1) if degree % n == 0]


# -- the machine's limits ----------------------------------------------------------------------------------------------

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
