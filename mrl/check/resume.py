"""Whether a run that is resumed is the run that went on: two steps of the trainer, and the second one again from the
checkpoint of the first, in new processes; compared bit by bit.

The trainer's own code does all of it: rows, steps, saving, loading, exporting. What would take long or reach outside is
smaller or off (`Checked.two_steps`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mrl import metrics
from mrl.check.command import Checked, TwoSteps
from mrl.check.verdict import Problem
from mrl.config.command import TrainingCommand
from mrl.config.schema import WandbConfig
from mrl.engine.atomic_checkpoint import step_name
from mrl.engine.torch_dist.reader import METADATA, TorchDistReader
from mrl.errors import UserError
from mrl.launch.local import launch

TOP = 3


def resume_problems(command: TrainingCommand, checked: Checked[Any], config: Any, small: TwoSteps) -> list[Problem]:
    """Returns what differs between a run that went on and one that was resumed.

    Raises UserError or RankFailed where a run fails.
    """
    small.place.mkdir()
    checkpoint = dataclasses.replace(config.checkpoint, every=1, keep=None, resume="auto", remote=None, export_hf=True)
    log = dataclasses.replace(config.log, console="none", wandb=WandbConfig(), tensorboard=False)
    config = checked.two_steps(dataclasses.replace(config, checkpoint=checkpoint, log=log), small)
    whole = dataclasses.replace(config, output_dir=str(small.place / "whole"))
    launch(command.trainer, whole, "", small.processes, quiet=True)
    first = small.place / "whole" / "checkpoints" / step_name(1)
    checkpoint = dataclasses.replace(config.checkpoint, resume=str(first))
    resumed = dataclasses.replace(config, output_dir=str(small.place / "resumed"), checkpoint=checkpoint)
    launch(command.trainer, resumed, "", small.processes, quiet=True)
    return [*_weights(whole, resumed), *_steps(whole, resumed), *_states(whole, resumed)]


# -- bit by bit --------------------------------------------------------------------------------------------------------


def _weights(whole: Any, resumed: Any) -> Iterator[Problem]:
    """Yields what is said of the exported weights that differ. One that is not saved is in no checkpoint: it begins
    anew, lacks the whole first step, and so is further off than what differs by its gradients alone."""
    a, b = (_exported(Path(config.output_dir, "hf")) for config in (whole, resumed))
    differ = [
        name for name in a.keys() | b.keys() if name not in a or name not in b or not _same_bits(a[name], b[name])
    ]
    if differ:
        names = sorted(differ, key=lambda name: (-_rms(a.get(name), b.get(name)), name))
        yield Problem(
            "weights after a resume", f"{len(names)} of {len(a)} tensors differ, most of all {names[0]}", names[0]
        )


def _exported(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    return tensors


def _rms(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None or a.shape != b.shape:
        return torch.inf
    return float((a.double() - b.double()).square().mean().sqrt())


def _steps(whole: Any, resumed: Any) -> Iterator[Problem]:
    """Yields the metrics of the second step that differ, of a trainer that writes metrics."""
    paths = [Path(config.output_dir, "metrics.jsonl") for config in (whole, resumed)]
    if not any(path.exists() for path in paths):
        return
    before, after = (metrics.read(path)[-1] for path in paths)
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        both_nan = was != was and now != now
        if was != now and not both_nan and not name.startswith(("perf/", "rollout/tokens_per_s")):
            yield Problem("step after a resume", f"{name} is {now!r}, not {was!r}")


def _states(whole: Any, resumed: Any) -> Iterator[Problem]:
    """Yields what is said of the tensors that differ in the checkpoints of the second step."""
    saved = [Path(config.output_dir, "checkpoints", step_name(2)) for config in (whole, resumed)]
    folders = sorted({path.parent.relative_to(root) for root in saved for path in root.rglob(METADATA)})
    if not folders:  # of an engine of another package
        raise UserError(
            "--resume", why="finds no checkpoint that it can read", fix="leave it out with this engine.backend"
        )
    differ: list[str] = []
    count = 0
    for folder in folders:
        with contextlib.ExitStack() as stack:
            a, b = (stack.enter_context(contextlib.closing(TorchDistReader(path / folder))) for path in saved)
            role = "".join(f"{part}." for part in folder.parts if part != "mcore")
            count += len(a.tensors)
            differ += [role + name for name in sorted(a.tensors.keys() ^ b.tensors.keys())]
            both = sorted(a.tensors.keys() & b.tensors.keys())
            differ += [role + name for name in both if not _equal(a, b, name)]
    if differ:
        names = sorted(differ, key=lambda name: ("optimizer." in name, name))  # a weight says more than its moments
        more = f" and {len(names) - TOP} more" if len(names) > TOP else ""
        text = f"{len(names)} of {count} tensors are not the same bits: {', '.join(names[:TOP])}{more}"
        yield Problem("state after a resume", text, names[0])


def _equal(a: TorchDistReader, b: TorchDistReader, name: str) -> bool:
    if a.tensors[name].shape != b.tensors[name].shape:
        return False
    region = [(0, n) for n in a.tensors[name].shape]
    return _same_bits(a.read(name, region), b.read(name, region))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    flat: Sequence[Tensor] = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and torch.equal(*flat)
