"""Asks the functions that choose it what a run on this machine will be made of: `python -m mrl.doctor.choices`.

It runs in a process of its own, as it imports torch and megatron-core, and on a GPU transformer-engine and apex. Each
answer is a line of JSON, so that what was known before the process ended is not lost; `used.py` reads them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mrl.errors import UserError

MODELS: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text())
"""Kinds of models that kernels tell apart: config.json of one each, with two layers. The last one has any experts."""

CPS = (1, 2)
"""Degrees of context parallelism: one, and any other."""


def answers() -> Iterator[Mapping[str, Any]]:
    """Yields what is known, the cheap parts first."""
    from mrl.ops.devices import device_type

    yield {"device": device_type()}
    found = rows()
    yield {"rows": found}
    from mrl.mcore_models import cpu_stand_in

    yield {"megatron": "begun"}
    cpu_stand_in.prepare()
    yield {"megatron": "loads"}
    yield {"modules": modules(found)}
    from mrl.engine.megatron import optim

    yield {"optimizer": optim.implementations()}


def rows() -> list[dict[str, Any]]:
    """Returns layer spec, reason and attention kernels for each kind of model and of context parallelism."""
    import torch

    from mrl.config.schema import EngineConfig
    from mrl.mcore_models import layer_spec
    from mrl.mcore_models.te_limits import AttentionShape, Gpu
    from mrl.parallel import ParallelDims
    from mrl.weights.families import fields_of
    from mrl.weights.hf_config import normalize

    found = []
    for model, hf in MODELS.items():
        fields = fields_of(normalize(dict(hf)))
        for cp in CPS:
            dims, row = ParallelDims(world_size=cp, cp=cp), {"model": model, "cp": cp}
            found.append(row)
            try:
                spec = layer_spec.choose(EngineConfig(), fields, dims, dtype=torch.bfloat16)
            except UserError as error:
                row |= {"error": str(error)}
                continue
            attention = AttentionShape.of(fields, dims)
            kernels = _te_kernels(attention, Gpu.here()) if spec.name == "te" else _local_kernels(attention)
            ways = attention.cp_communication if spec.name == "te" and cp > 1 else None
            row |= {"spec": spec.name, "why": spec.why, "attention": kernels, "cp_communication": ways}
    return found


def _te_kernels(attention: Any, gpu: Any) -> list[str]:
    """Returns the kernel that transformer-engine takes of the usable ones."""
    import torch

    from mrl.mcore_models.te_limits import kernels

    return [] if gpu.capability is None else list(kernels(attention, gpu, torch.bfloat16)[:1])


def _local_kernels(attention: Any) -> list[str]:
    """Returns the kernels of layers without a window, and with one."""
    import torch

    from mrl.ops import causal, devices

    def heads(count: int, queries: int, size: int) -> torch.Tensor:
        return torch.empty((1, count, queries, size), dtype=torch.bfloat16, device=devices.device())

    keys, found = 64, []
    for window in (None, 16) if attention.windowed else (None,):
        query = heads(attention.heads, keys // attention.cp, attention.query_size)
        value = heads(attention.groups, keys, attention.value_size)
        found.append(
            causal.attention_kind(query, keys, value, window=window, sinks=attention.sinks, dropout=attention.dropout)
        )  # fmt: skip
    return list(dict.fromkeys(found))


def modules(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | None]:
    """Returns for each row the classes of the model's last layer; None if the row is refused."""
    import torch

    from mrl.mcore_models.build import transformer_config
    from mrl.mcore_models.modules import modules_of
    from mrl.parallel import ParallelDims
    from mrl.weights.hf_config import normalize

    made: list[Mapping[str, Any] | None] = []
    for row in found:
        if "spec" not in row:
            made.append(None)
            continue
        hf = normalize(dict(MODELS[row["model"]]))
        dims = ParallelDims(world_size=row["cp"], cp=row["cp"])
        config = transformer_config(hf, dims, dtype=torch.bfloat16, layer_spec=row["spec"])
        made.append(dataclasses.asdict(modules_of(config, hf["num_hidden_layers"] - 1)))
    return made


def main() -> None:
    from mrl.doctor.probe import own_output

    say = own_output()
    try:
        for answer in answers():
            say(answer)
    except Exception as error:  # what megatron-core or a package that it looks for raises
        say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
