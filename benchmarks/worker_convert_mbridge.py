"""What `mrl convert import` and `export` do, by mbridge and megatron's dist_checkpointing; seconds as JSON on stdout.

    worker_convert_mbridge.py import HF CHECKPOINT
    worker_convert_mbridge.py export HF CHECKPOINT OUT      HF: for its config.json, index and shapes

mbridge loads into a model and saves from one. Here the model is a bare module with the parameters of a llama under
transformer-engine's names, uninitialised: building a real one is not what is measured. What is written is put on disk at the end.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from mrl.mcore_models import cpu_stand_in
from mrl.weights import family_for, read_hf_config
from mrl.weights.rules import whole_rules


class Bare(nn.Module):
    """Parameters by dotted name, and what mbridge asks a decoder: the number of each layer, from 1."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.ModuleList() if part == "layers" else nn.Module())
                if isinstance(module, nn.ModuleList) and int(part) == len(module):
                    module.append(nn.Module())
                module = module[int(part)] if isinstance(module, nn.ModuleList) else getattr(module, part)
            module.register_parameter(last, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False))
        for number, layer in enumerate(self.decoder.layers, 1):
            layer.layer_number = number


def on_disk(folder: str) -> None:
    for name in os.listdir(folder):
        file = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.fsync(file)
        os.close(file)


def main(command: str, source: str, checkpoint: str, out: str | None = None) -> None:
    begun = time.monotonic()
    cpu_stand_in.prepare()
    from mbridge import AutoBridge
    from megatron.core import dist_checkpointing, parallel_state

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
    config = read_hf_config(source)
    rules = whole_rules(family_for(config), config, spec="te")
    bridge = AutoBridge.from_pretrained(source)
    model = Bare({name: rule.shape() for name, rule in rules.items()})
    sharded = {
        name: dist_checkpointing.ShardedTensor.from_rank_offsets(name, parameter.data)
        for name, parameter in model.named_parameters()
    }
    ready = time.monotonic()
    with torch.no_grad():
        if command == "import":
            bridge.load_weights([model], source)
            half = time.monotonic()
            os.mkdir(checkpoint)
            dist_checkpointing.save(sharded, checkpoint)
        else:
            dist_checkpointing.load(sharded, checkpoint)  # in place
            half = time.monotonic()
            bridge.safetensor_io = bridge._get_safetensor_io(source)
            bridge.save_weights([model], out)
    on_disk(checkpoint if command == "import" else out)
    end = time.monotonic()
    print(json.dumps({"start": ready - begun, "read": half - ready, "write": end - half}))


if __name__ == "__main__":
    main(*sys.argv[1:])
