"""Fills this rank's shards of a model from tensors with Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mrl.engine.megatron.optim import shards
from mrl.engine.stored_weights import Read
from mrl.mcore_models.build import Model
from mrl.parallel import Coordinates, ParallelDims
from mrl.weights.rules import ChunkPlan, Rule, chunk_plans

Rules = Sequence[Mapping[str, Rule]]
"""The rules of each chunk's tensors, by name."""


def ruled_parameters(models: Sequence[Model], rules: Rules) -> Iterator[tuple[str, Parameter, Rule]]:
    """Yields the name and the rule of each parameter."""
    for model, of_chunk in zip(models, rules, strict=True):
        for name, parameter in model.named_parameters():
            yield name, parameter, of_chunk[name]


def load(models: Sequence[Model], rules: Rules, read: Read) -> None:
    """Fills the model chunks from `read` (HF name -> tensor or lazy slice); each rank reads its own entries."""
    for model, of_chunk in zip(models, rules, strict=True):
        parameters = tensors_of(model)
        unknown, unfilled = sorted(set(of_chunk) - set(parameters)), sorted(set(parameters) - set(of_chunk))
        assert not unknown and not unfilled, f"the model has no {unknown}; the table does not fill {unfilled}"
        with torch.no_grad():
            for name, rule in of_chunk.items():
                parameters[name].copy_(rule.load(read))


def tensors_of(model: Model) -> dict[str, Tensor]:
    """Returns the parameters and stored buffers of a chunk, by name."""
    buffers = dict(model.named_buffers())
    stored = model.state_dict(keep_vars=True).keys() & buffers.keys()
    return dict(model.named_parameters()) | {name: buffers[name] for name in sorted(stored)}


def rule_of_parameters(models: Sequence[Model], rules: Rules) -> dict[int, Rule]:
    """Returns the rule of each parameter by its id."""
    return {id(parameter): rule for _, parameter, rule in ruled_parameters(models, rules)}


def load_masters(optimizer: Any, models: Sequence[Model], rules: Rules, read: Read) -> None:
    """Sets fp32 master weights from `read`, but those that are fp32 parameters themselves."""
    rule_of = rule_of_parameters(models, rules)
    for _, parameter, main, span in shards(optimizer):
        if main.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
            whole = rule_of[id(parameter)].load(read)
            main.data.copy_(whole.reshape(-1)[span].view(main.shape))


def plans_here(hf: Mapping[str, Any], dims: ParallelDims, coords: Coordinates, *, mtp: int) -> list[ChunkPlan]:
    plans = chunk_plans(hf["num_hidden_layers"], dims.pp, dims.vpp, mtp)
    return [plans[coords.pp_rank, v] for v in range(dims.vpp)]
