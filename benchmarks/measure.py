"""What every worker measures, and how workers are started. Standard library only: a peer's venv runs it too."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

HERE = pathlib.Path(__file__).resolve().parent
GRACE_S = 60.0  # of a command that was interrupted


class Failed(SystemExit):
    """A subject failed, with what it said. Where nothing catches it the script ends with that.

    A type of its own, as the SystemExit of a signal is no subject's failure: the script has to end.
    """


def said(error: BaseException) -> str:
    """Returns what a row of a report says of a failure: the last line of a subject's output, or an error's first line."""
    text = str(error).strip()
    if isinstance(error, SystemExit):
        line = text.splitlines()[-1] if text else "it said nothing"
    else:
        line = f"{type(error).__name__}: {text}".splitlines()[0]
    return line[:200].replace("|", "/")


def end_on_sigterm() -> None:
    """From now on SIGTERM ends this process by an exception, so that the servers and workers that it started end, too."""

    def end(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would cut that short
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


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

    Raises Failed where one fails or, with limit_s, they take longer. No process is left, whatever it raises.
    """
    spec_path = folder / "spec.json"
    spec_path.write_text(json.dumps(dict(spec)), encoding="utf-8")
    outputs = [folder / f"out.{rank}.json" for rank in range(nproc)]
    place = {"WORLD_SIZE": str(nproc), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    processes: list[subprocess.Popen] = []
    try:
        for rank, out in enumerate(outputs):
            out.unlink(missing_ok=True)
            environment = os.environ | place | quiet | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [python, str(HERE / script), str(spec_path), str(out)]
            with open(folder / f"log.{rank}.txt", "w", encoding="utf-8") as log:
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
                )
        failed = first_failure(processes, limit_s)
    except subprocess.TimeoutExpired:
        raise Failed(f"{script}: longer than {limit_s:g} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed is not None:
        log_text = (folder / f"log.{failed}.txt").read_text(encoding="utf-8", errors="replace")
        raise Failed(f"{script}: rank {failed} ended with {processes[failed].returncode}:\n{log_text}")
    return [json.loads(out.read_text()) for out in outputs]


def first_failure(processes: Sequence[subprocess.Popen], limit_s: float | None) -> int | None:
    """Returns the rank that failed first, for which the others may wait in vain; None where all succeed.

    Raises TimeoutExpired.
    """
    began = time.monotonic()
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):
            return next(rank for rank, code in enumerate(codes) if code)
        if None not in codes:
            return None
        left_s = None if limit_s is None else limit_s - (time.monotonic() - began)
        if left_s is not None and left_s <= 0:
            raise subprocess.TimeoutExpired(processes[0].args, limit_s)
        if len(processes) == 1:
            with contextlib.suppress(subprocess.TimeoutExpired):
                processes[0].wait(left_s)
        else:
            time.sleep(0.05)


def run_command(command: Sequence[str], limit_s: float | None) -> None:
    """Runs a command. Raises Failed where it fails or takes longer than limit_s.

    It is interrupted as by Ctrl-C, so that it ends what it has started, before it is killed.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    try:
        out, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise Failed(f"longer than {limit_s:g} s") from None
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
    if process.returncode:
        raise Failed(errors.strip() or out.strip() or f"{command[0]} ended with {process.returncode}")


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
