"""What every worker measures, and how workers are started. Standard library only: a peer's venv runs it too."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

HERE = pathlib.Path(__file__).resolve().parent


def memory_mb() -> float:
    """Peak resident memory of this process. Linux's `VmHWM` counts from exec on: `ru_maxrss` may hold a parent's peak."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 * 1024 if sys.platform == "darwin" else 1024)


class Meter:
    """Wall and CPU seconds of each step of this process (all its threads), and its peak memory. more: other numbers of it."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.losses: list[float] = []
        self.more: dict[str, float] = {}
        self.mark()

    def mark(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def step(self, loss: float | None = None) -> None:
        """A step has ended: it lasted since the last call."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.wall.append(wall - self._wall)
        self.cpu.append(cpu - self._cpu)
        if loss is not None:
            self.losses.append(loss)
        self._wall, self._cpu = wall, cpu

    def result(self) -> dict[str, Any]:
        return {"wall": self.wall, "cpu": self.cpu, "losses": self.losses, "peak_mb": memory_mb(), "more": self.more}

    def write(self, path: str) -> None:
        pathlib.Path(path).write_text(json.dumps(self.result()), encoding="utf-8")


class PhaseMeter(Meter):
    """A Meter that also knows the CPU seconds of each phase of a step. What no phase is entered for is REST."""

    REST = "rest"

    def __init__(self) -> None:
        self.phases: list[dict[str, float]] = []
        self.metrics: list[dict[str, float]] = []
        self._phase = self.REST
        super().__init__()

    def mark(self) -> None:
        super().mark()
        self._since, self._seconds = self._cpu, {}

    def switch(self, phase: str) -> str:
        """From now on this phase runs. Returns the one before."""
        now, before = time.process_time(), self._phase
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._since, self._phase = now, phase
        return before

    def within(self, phase: str, function: Callable[..., T]) -> Callable[..., T]:
        """`function`, whose CPU seconds are the phase's, but those of phases that it enters."""

        def timed(*args: Any, **kwargs: Any) -> T:
            before = self.switch(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch(before)

        return timed

    def step(self, loss: float | None = None) -> None:
        self.switch(self._phase)
        super().step(loss)
        self.phases.append(self._seconds)
        self._since, self._seconds = self._cpu, {}

    def result(self) -> dict[str, Any]:
        return super().result() | {"phases": self.phases, "metrics": self.metrics}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run_worker(
    python: str,
    script: str,
    spec: Mapping[str, Any],
    *,
    nproc: int,
    folder: pathlib.Path,
    limit_s: float | None = None,
) -> list[dict]:
    """Runs `script` in `nproc` fresh processes and returns what each of their meters wrote.

    Raises SystemExit where one fails or, with limit_s, they take longer.
    """
    spec_path = folder / "spec.json"
    spec_path.write_text(json.dumps(dict(spec)), encoding="utf-8")
    outputs = [folder / f"out.{rank}.json" for rank in range(nproc)]
    place = {"WORLD_SIZE": str(nproc), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    processes = []
    for rank, out in enumerate(outputs):
        out.unlink(missing_ok=True)
        environment = os.environ | place | quiet | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        log = open(folder / f"log.{rank}.txt", "w", encoding="utf-8")  # noqa: SIM115 - the child writes to it
        command = [python, str(HERE / script), str(spec_path), str(out)]
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder))
        log.close()
    try:
        codes = [process.wait(limit_s) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
            process.wait()
        raise SystemExit(f"{script}: longer than {limit_s:.0f} s") from None
    if any(codes):
        rank = next(r for r, code in enumerate(codes) if code)
        raise SystemExit(
            f"{script}: rank {rank} ended with {codes[rank]}:\n" + (folder / f"log.{rank}.txt").read_text()
        )
    return [json.loads(out.read_text()) for out in outputs]


def summary(ranks: Sequence[Mapping[str, Any]], *, tokens_per_step: Sequence[int], warmup: int) -> dict[str, Any]:
    """One run of a subject. CPU seconds are per step and rank, from the median step; tokens/CPU s counts all ranks."""
    tokens = statistics.mean(tokens_per_step[warmup:])
    cpu = [_steady(rank["cpu"], tokens_per_step, warmup) for rank in ranks]
    wall = _steady(ranks[0]["wall"], tokens_per_step, warmup)
    return {
        "cpu_s": statistics.mean(cpu), "wall_s": wall, "tokens_per_s": tokens / wall, "tokens_per_cpu_s": tokens / sum(cpu),
        "peak_mb": max(rank["peak_mb"] for rank in ranks), "losses": ranks[0]["losses"],
        **{name: max(rank["more"][name] for rank in ranks) for name in ranks[0]["more"]},
    }  # fmt: skip


def _steady(seconds: Sequence[float], tokens_per_step: Sequence[int], warmup: int) -> float:
    """Seconds of a step of mean size: the median over measured steps of seconds per token, times the mean tokens."""
    pairs = list(zip(seconds, tokens_per_step, strict=True))[warmup:]
    return statistics.median(s / t for s, t in pairs) * statistics.mean(t for _, t in pairs)


def leave_world() -> None:
    """Makes a worker a process of its own: what `run_worker` says of ranks is for those that make a world."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]


def read_arguments() -> tuple[dict[str, Any], str]:
    """A worker's arguments: its spec, and where its meter writes."""
    return json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[2]
