"""(a) A plain loop of transformers and torch on packed rows: [rows, 512], `position_ids` that restart at each document.

transformers makes a block-diagonal causal mask from such positions and hands it to `scaled_dot_product_attention`.
"""

from __future__ import annotations

import json
import os
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import Meter, read_arguments
from transformers import AutoModelForCausalLM


def batches(spec: dict, rank: int, world_size: int):
    """(tokens, labels, positions), each [rows of this rank, ROW] int64."""
    for rows in json.loads((pathlib.Path(spec["folder"]) / "packed.json").read_text())[: spec["steps"]]:
        mine = rows[rank::world_size]
        tokens = [[t for ids in row for t in ids[:-1]] for row in mine]
        labels = [[t for ids in row for t in ids[1:]] for row in mine]
        positions = [[p for ids in row for p in range(len(ids) - 1)] for row in mine]
        yield torch.tensor(tokens), torch.tensor(labels), torch.tensor(positions)


def main() -> None:
    spec, out = read_arguments()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("gloo")
    meter = Meter()
    model = AutoModelForCausalLM.from_pretrained(pathlib.Path(spec["folder"]) / "model", dtype=torch.float32)
    model.train()
    ddp = torch.nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec["lr"], betas=(0.9, 0.95), weight_decay=0.0, fused=spec.get("fused") or None
    )
    meter.mark()
    for tokens, labels, positions in batches(spec, rank, world_size):
        logits = ddp(input_ids=tokens, position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        if world_size > 1:
            dist.all_reduce(mean)
            mean /= world_size
        meter.step(float(mean))
        del logits, loss
    meter.write(out)


if __name__ == "__main__":
    main()
