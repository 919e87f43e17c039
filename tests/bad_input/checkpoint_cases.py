"""Checkpoints that cannot be gone on from. `earlier` is a run of one step that these start from or break."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from tests.bad_input import model_cases
from tests.bad_input.mistakes import Case, Workspace

STEP = "earlier/checkpoints/step_00000001"
RESUME = (f"checkpoint.resume={STEP}",)


def shard(change: Callable[[str], None]) -> Callable[[Workspace], None]:
    """An edit of the largest file of the checkpoint."""

    def edit(workspace: Workspace) -> None:
        files = [path for path in (workspace.root / STEP).rglob("*") if path.is_file()]
        change(str(max(files, key=lambda path: path.stat().st_size)))

    return edit


def damaged_run(workspace: Workspace) -> None:
    """The output directory holds a run whose checkpoints are all damaged."""
    shutil.copytree(workspace.root / "earlier", workspace.root / "run")
    (workspace.root / "run/checkpoints/step_00000001/COMPLETE").write_text("{}")


CASES = [
    Case("no such folder", "checkpoint.resume", ("is no folder", "auto, never"), ("checkpoint.resume=nowhere",)),
    Case("foreign marker", STEP, ("COMPLETE", "use another checkpoint"), RESUME, lambda w: w.write(f"{STEP}/COMPLETE", '{"a": 1}')),
    Case("cut shard", STEP, ("damaged", "bytes"), RESUME, shard(lambda path: os.truncate(path, 100))),
    Case("another model", STEP, ("of another model", "intermediate_size 48 there and 64 here"), (*RESUME, "model.init=random"), model_cases.fields(intermediate_size=64)),
    Case("another engine", STEP, ("saved by the megatron engine",), (*RESUME, "engine.backend=fsdp")),
    Case("all damaged", "checkpoint.resume", ("no whole checkpoint", "damaged or foreign"), ("checkpoint.resume=earlier/checkpoints",), lambda w: w.write(f"{STEP}/COMPLETE", "{}")),
    Case("damaged run", "run/checkpoints/step_00000001", ("put one back",), edit=damaged_run),
    Case("remote that cannot be written", "checkpoint.remote", ("file:///proc/nowhere", "cannot be written"), ("checkpoint.remote=file:///proc/nowhere",)),
    Case("nobody logged in", "log.wandb.mode", ("wandb login", "offline"), ("log.wandb={project: p, mode: online}",)),
    Case("other seed", "seed", ("7",), (*RESUME, "seed=7")),
]  # fmt: skip
