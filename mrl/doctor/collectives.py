"""`mrl doctor --collectives`: two processes of this machine sum numbers over gloo and, with two GPUs, over NCCL."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.doctor.ask import END_S, json_lines, python_command, python_environment, signal_name
from mrl.doctor.findings import Finding, fault, gib, note, ok

LIMIT_S = 90.0
"""How long the two may take together, imports of torch included."""

POLL_S, GRACE_S = 0.05, 5.0
"""GRACE_S: how long the other one may go on after one failed, to say why."""

PHASES: Mapping[str, str] = {
    "": "it had not imported torch",
    "started": "it was joining the other",
    "joined": "it was in its first all-reduce",
    "summed": "it was in an all-reduce",
    "done": "it was done",
}
"""What a process was at after it had said a phase."""


@dataclasses.dataclass
class _Rank:
    process: subprocess.Popen
    out: pathlib.Path
    err: pathlib.Path

    def said(self) -> list[dict[str, Any]]:
        return list(json_lines(self.out.read_text(errors="replace")))

    def phase(self) -> str:
        return PHASES[([entry["phase"] for entry in self.said()] or [""])[-1]]

    def last_words(self) -> str:
        lines = [line.strip() for line in self.err.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"


def section(gpus: int, *, limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """gpus: those that torch sees."""
    device = "cuda" if gpus >= 2 else "cpu"
    with tempfile.TemporaryDirectory(prefix="mrl_doctor_") as folder:
        port = _free_port()
        ranks = [_start(rank, port, device, pathlib.Path(folder)) for rank in (0, 1)]
        try:
            why = _wait(ranks, limit_s)
        finally:
            for rank in ranks:
                _end(rank.process)
        if why is not None:
            fix = "unset GLOO_SOCKET_IFNAME and NCCL_*, look for a firewall on the loopback interface; NCCL_DEBUG=INFO"
            yield fault("collectives", f"an all-reduce of two processes on this machine {why}", fix)
            return
        said = ranks[0].said()
    for backend in ("gloo", "nccl") if device == "cuda" else ("gloo",):
        yield _timed(backend, {e["bytes"]: e["seconds"] for e in said if e.get("backend") == backend})
    if gpus == 1:
        yield note("collectives.nccl", "NCCL was not tried: it takes two GPUs")


def _timed(backend: str, times: Mapping[int, float]) -> Finding:
    (_, least), (size, most) = sorted(times.items())
    what = f"{backend}: two processes sum one number in {least * 1e3:.2f} ms, {gib(size)} in {most * 1e3:.1f} ms"
    by_size = {str(bytes_): seconds for bytes_, seconds in times.items()}
    return ok(f"collectives.{backend}", f"{what} ({gib(size / most)}/s)", seconds_by_bytes=by_size)


def _start(rank: int, port: int, device: str, folder: pathlib.Path) -> _Rank:
    variables = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    environment = python_environment(variables).items()
    paths = folder / f"{rank}.out", folder / f"{rank}.err"
    with paths[0].open("wb") as out, paths[1].open("wb") as err:
        process = subprocess.Popen(
            python_command("-m", "mrl.doctor.rank", device), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            env={name: value for name, value in environment if not name.startswith("TORCHELASTIC_")},
        )  # fmt: skip
    return _Rank(process, *paths)


def _free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


def _wait(ranks: Sequence[_Rank], limit_s: float) -> str | None:
    """Returns what went wrong, in words; None where both are done."""
    deadline = time.monotonic() + limit_s
    failed_at = deadline
    while True:
        codes = [rank.process.poll() for rank in ranks]
        if all(code == 0 for code in codes):
            return None
        failed = [number for number, code in enumerate(codes) if code]
        if failed:
            failed_at = min(failed_at, time.monotonic())
        if failed and (None not in codes or time.monotonic() > failed_at + GRACE_S):
            number, code = failed[0], codes[failed[0]] or 0
            ended = f"ends by {signal_name(-code)}" if code < 0 else "fails"
            return f"{ended} in rank {number}, when {ranks[number].phase()}: {ranks[number].last_words()}"
        if time.monotonic() > deadline:
            states = "; ".join(f"rank {number}: {rank.phase()}" for number, rank in enumerate(ranks))
            return f"is not done after {limit_s:g} s ({states})"
        time.sleep(POLL_S)


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
