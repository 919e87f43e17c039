"""Saves of one engine in one process: at once and in the background, in turns with `cp` and `torch.save` of the same bytes.

spec: as worker_gpu.mrl_engine has it, with "saves" (of each kind) and "out" (the folder that checkpoints go to).
"""

from __future__ import annotations

import os
import pathlib
import shutil
import statistics
import subprocess
import threading
import time
from typing import Any

import torch
from measure import Meter, read_arguments
from worker_gpu import begin_save, mrl_engine, rows_of

from mrl.batch import make_batch
from mrl.check.measure import forward_backward
from mrl.engine.atomic_checkpoint import step_name

PLAIN_STEPS = 3  # timed before the first save


class Trained:
    """An engine that makes the same step again and again."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.engine, rows = mrl_engine(spec), rows_of(spec)
        self.batch = make_batch(rows, [[1.0] * len(ids) for ids in rows])
        self.out, self.step = pathlib.Path(spec["out"]), 0

    def train(self) -> float:
        """Makes a step. Returns its wall seconds."""
        began = time.perf_counter()
        self.engine.optimizer_zero_grad()
        forward_backward(self.engine, self.batch)
        self.engine.optimizer_step()
        return time.perf_counter() - began

    def root(self) -> pathlib.Path:
        """An empty folder, with nothing of earlier ones left to write."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        os.sync()
        self.step += 1
        return self.out

    def at_once(self) -> dict[str, Any]:
        root, began = self.root(), time.perf_counter()
        self.engine.save_checkpoint(str(root), global_step=self.step)
        seconds = time.perf_counter() - began
        return {"held": seconds, "whole": seconds}

    def in_background(self) -> dict[str, Any]:
        root, began = self.root(), time.perf_counter()
        ended, steps = threading.Event(), []
        whole: list[float] = []

        def then() -> None:
            whole.append(time.perf_counter() - began)
            ended.set()

        saves = begin_save(self.engine, root, self.step, then)
        held = time.perf_counter() - began
        while not ended.is_set():
            steps.append(self.train())
        saves.finish()
        return {"held": held, "whole": whole[0], "steps": steps[:-1] or steps}  # the last one was alone in part

    def copied(self, saved: pathlib.Path) -> dict[str, Any]:
        """A `cp` of a checkpoint that was just read, into the same file system."""
        copy = saved.with_name("copy")
        for file in saved.rglob("*"):
            _ = file.read_bytes() if file.is_file() else b""
        os.sync()
        began = time.perf_counter()
        subprocess.run(["cp", "-r", saved, copy], check=True)
        subprocess.run(["sync", *(file for file in copy.rglob("*") if file.is_file())], check=True)
        seconds = time.perf_counter() - began
        shutil.rmtree(copy)
        return {"held": seconds, "whole": seconds}

    def torch_saved(self, size: int) -> dict[str, Any]:
        """`torch.save` of one tensor with as many bytes, put on disk."""
        root, tensor = self.root(), torch.randn(size // 4)
        began = time.perf_counter()
        torch.save({"everything": tensor}, root / "plain.pt")
        subprocess.run(["sync", root / "plain.pt"], check=True)
        seconds = time.perf_counter() - began
        return {"held": seconds, "whole": seconds}


def main(spec: dict[str, Any], out: str) -> None:
    meter, trained = Meter(), Trained(spec)
    trained.train()
    found: dict[str, list[dict[str, Any]]] = {"at once": [], "background": [], "cp, fsync": [], "torch.save, fsync": []}
    plain, size = [trained.train() for _ in range(PLAIN_STEPS)], 0
    for _ in range(spec["saves"]):
        found["background"].append(trained.in_background())
        found["at once"].append(trained.at_once())
        saved = trained.out / step_name(trained.step)
        size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
        found["cp, fsync"].append(trained.copied(saved))
        found["torch.save, fsync"].append(trained.torch_saved(size))
    shutil.rmtree(trained.out)
    during = [seconds for turn in found["background"] for seconds in turn["steps"]]
    meter.more = {"bytes": size, "step": statistics.median(plain), "step_during": statistics.median(during)}
    meter.more["turns"] = {  # type: ignore[assignment]
        name: {key: [turn[key] for turn in turns] for key in ("held", "whole")} for name, turns in found.items()
    }
    meter.write(out)


if __name__ == "__main__":
    main(*read_arguments())
