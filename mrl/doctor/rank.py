"""One of the two processes of `mrl doctor --collectives`: joins as a run on one machine does, and sums.

`python -m mrl.doctor.rank cpu|cuda`, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set. Each phase
prints a line of JSON, so the last phase of a process that hangs is known.
"""

from __future__ import annotations

import os
import sys

from mrl.doctor.probe import own_output

LARGE = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""Bytes of the large all-reduce."""


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
