"""`mrl doctor --collectives`: two processes of this machine sum numbers over gloo and, with two GPUs, over NCCL.

`python -m mrl.doctor.collectives cpu|cuda` is one of the two. It has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT set, and joins as a run on one machine does. Each phase prints a line of JSON, so the last phase of a
process that hangs is known.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket
import sys
from collections.abc import Iterator

from mrl.doctor.ask import Answer, json_lines, python
from mrl.doctor.findings import Finding, fault, gib, note, ok
from mrl.doctor.probe import own_output

LIMIT_S = 90.0
"""How long the two may take together, imports of torch included."""

LARGE = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""Bytes of the large all-reduce."""


def section(gpus: int, *, limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """Tries an all-reduce of two processes. gpus: the number that torch sees."""
    device = "cuda" if gpus >= 2 else "cpu"
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = int(server.getsockname()[1])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda rank: _run(rank, port, device, limit_s), (0, 1)))
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


def _run(rank: int, port: int, device: str, limit_s: float) -> Answer:
    variables = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return python("-m", "mrl.doctor.collectives", device, limit_s=limit_s, variables=variables)


def main(device_type: str) -> None:
    say = own_output()
    from mrl.launch.environment import loopback

    os.environ.update({name: value for name, value in loopback().items() if name not in os.environ})
    import torch

    from mrl.engine import collective

    say({"phase": "joining the other"})
    collective.join_processes(device_type)
    devices = {"gloo": torch.device("cpu")}
    if device_type == "cuda":
        devices["nccl"] = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    for backend, device in devices.items():
        say({"phase": f"in an all-reduce over {backend}"})
        seconds = list(collective.time_all_reduce(device, LARGE[device.type]))
        say({"phase": f"after those over {backend}", "backend": backend, "seconds": seconds})
    collective.destroy_process_groups()


if __name__ == "__main__":
    main(sys.argv[1])
