"""`mrl doctor --collectives`: two processes of this machine sum numbers over gloo and, with two GPUs, over NCCL."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import socket
from collections.abc import Iterator

from mrl.doctor.ask import Answer, json_lines, python
from mrl.doctor.findings import Finding, fault, gib, note, ok

LIMIT_S = 90.0
"""How long the two may take together, imports of torch included."""


def section(gpus: int, *, limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """Tries an all-reduce of two processes. gpus: the number that torch sees."""
    device = "cuda" if gpus >= 2 else "cpu"
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = int(server.getsockname()[1])
    run = functools.partial(_run, port=port, device=device, limit_s=limit_s)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(run, (0, 1)))
    failed = [rank for rank, answer in enumerate(answers) if answer.code != 0]
    if failed:
        rank = min(failed, key=lambda rank: answers[rank].code is None)  # one that hangs may wait for the other
        phases = [entry["phase"] for entry in json_lines(answers[rank].out)]
        reached = phases[-1] if phases else "before torch was imported"
        what = "an all-reduce of two processes on this machine fails"
        fix = "unset GLOO_SOCKET_IFNAME and NCCL_*, look for a firewall on the loopback interface; NCCL_DEBUG=INFO"
        yield fault("collectives", f"{what}: rank {rank} ({reached}) {answers[rank].ended}", fix)
        return
    for entry in json_lines(answers[0].out):
        if "seconds" in entry:
            backend, ((_, least), (size, most)) = entry["backend"], entry["seconds"]
            what = (
                f"{backend}: two processes sum one number in {least * 1e3:.2f} ms, {gib(size)} in {most * 1e3:.1f} ms"
            )
            by_size = {str(bytes_): seconds for bytes_, seconds in entry["seconds"]}
            yield ok(f"collectives.{backend}", f"{what} ({gib(size / most)}/s)", seconds_by_bytes=by_size)
    if gpus == 1:
        yield note("collectives.nccl", "NCCL was not tried: it takes two GPUs")


def _run(rank: int, *, port: int, device: str, limit_s: float) -> Answer:
    variables = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return python("-m", "mrl.doctor.rank", device, limit_s=limit_s, variables=variables)
