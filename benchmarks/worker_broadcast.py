"""A broadcast of so many bytes from rank 0 to rank 1, bucket by bucket, by torch.distributed and nothing else."""

from __future__ import annotations

import json
import os
import pathlib
import time

import torch
import torch.distributed as dist
from measure import read_arguments


def main() -> None:
    spec, out = read_arguments()
    device = torch.device(spec["device"], int(os.environ["RANK"]) if spec["device"] == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    data = torch.ones(min(spec["bucket_bytes"], spec["bytes"]), dtype=torch.uint8, device=device)
    token = torch.zeros(1, device=device)
    walls = []
    for _ in range(1 + spec["times"]):
        dist.all_reduce(token)
        began = time.perf_counter()
        for start in range(0, spec["bytes"], len(data)):
            dist.broadcast(data[: spec["bytes"] - start], 0)
        dist.all_reduce(token)  # the other end has all of it
        token.item()
        walls.append(time.perf_counter() - began)
    pathlib.Path(out).write_text(json.dumps({"walls": walls[1:]}), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
