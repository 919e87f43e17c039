"""Asks the functions that choose it what a run on this machine will be made of: `python -m mrl.doctor.choices`.

It runs in a process of its own, as it imports torch and megatron-core, and on a GPU transformer-engine and apex. Its
answer is a line of JSON, which `used.py` reads.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.errors import UserError

MODELS: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text())
"""Kinds of models that kernels tell apart: config.json of one each, with two layers. The last one has any experts."""


def rows() -> list[dict[str, Any]]:
    """Returns layer spec, reason and attention kernels for each kind of model, with cp 1 and 2."""
    return [_row(model, cp) for model in MODELS for cp in (1, 2)]


def _row(model: str, cp: int) -> dict[str, Any]:
    import torch

    from mrl.config.schema import EngineConfig
    from mrl.mcore_models import layer_spec
    from mrl.mcore_models.te_limits import AttentionShape, Gpu
    from mrl.parallel import ParallelDims
    from mrl.weights.families import fields_of
    from mrl.weights.hf_config import normalize

    fields, dims = fields_of(normalize(dict(MODELS[model]))), ParallelDims(world_size=cp, cp=cp)
    try:
        spec = layer_spec.choose(EngineConfig(), fields, dims, dtype=torch.bfloat16)
    except UserError as error:
        return {"model": model, "cp": cp, "error": str(error)}
    attention = AttentionShape.of(fields, dims)
    return {
        "model": model,
        "cp": cp,
        "spec": spec.name,
        "why": spec.why,
        "attention": _te_kernels(attention, Gpu.here()) if spec.name == "te" else _local_kernels(attention),
        "cp_communication": attention.cp_communication if spec.name == "te" and cp > 1 else None,
    }


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


def modules(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the classes of the last layer of a row's model. Needs `cpu_stand_in.prepare()`."""
    import torch

    from mrl.mcore_models.build import transformer_config
    from mrl.mcore_models.modules import modules_of
    from mrl.parallel import ParallelDims
    from mrl.weights.hf_config import normalize

    hf = normalize(dict(MODELS[row["model"]]))
    dims = ParallelDims(world_size=row["cp"], cp=row["cp"])
    config = transformer_config(hf, dims, dtype=torch.bfloat16, layer_spec=row["spec"])
    return dataclasses.asdict(modules_of(config, hf["num_hidden_layers"] - 1))


def main() -> None:
    from mrl.doctor.probe import own_output

    say = own_output()
    try:
        from mrl.mcore_models import cpu_stand_in

        cpu_stand_in.prepare()
        from mrl.engine.megatron import optim

        found = rows()
        for row in found:
            if "spec" in row:
                row["modules"] = modules(row)
        say({"rows": found, "optimizer": optim.implementations()})
    except Exception as error:  # what megatron-core or a package that it looks for raises
        say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
