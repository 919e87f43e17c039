"""Streams weights between Hugging Face names and the shards of ranks, for an inference server's weight loader.

No process group, no megatron, no files: names and tensors in, names and tensors out. A parameter is handed on as soon
as its last part has come. Tensors of other ranks are not kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mrl.errors import ModelError
from mrl.parallel import Coordinates, ParallelDims
from mrl.weights.accounting import num_mtp_layers, shared_tensors
from mrl.weights.rules import Rule, chunk_plans, expected_hf_names, param_map
from mrl.weights.stacks import file_name, restack, unstacking_read
from mrl.weights.table import Family, HFConfig
from mrl.words import shorten_list


def hf_to_mcore(
    weights: Iterable[tuple[str, Tensor]],
    family: Family,
    layout: ParallelDims,
    rank: int,
    *,
    hf_config: HFConfig,
    spec: str = "local",
    head: str = "lm",
    vocab_multiple: int = 1,
) -> Iterator[tuple[int, str, Tensor]]:
    """Yields (model chunk, mcore name, shard) of every parameter of `rank`, from the whole model's (HF name, tensor) in
    any order.

    hf_config: of `read_hf_config`. spec: "local" or "te", the naming of the layer spec. A shard has new memory, the
    dtype and the device of its tensors. Names are those of files, even if these hold experts stacked.

    Skipped are `lm_head.weight` of a tied model, what `Family.carries` names, and the MTP layers that config.json
    announces: the model of a rank has none. Raises ModelError on an unknown name, a repeated one, another shape, and a
    stream that ends too early.
    """
    plans = chunk_plans(hf_config["num_hidden_layers"], layout.pp, layout.vpp)
    coords = layout.coordinates(rank)
    options: dict[str, Any] = {"layout": layout, "spec": spec, "head": head, "vocab_multiple": vocab_multiple}
    users: dict[str, dict[str, list[tuple[int, Rule]]]] = {}  # name in files, name in the tables
    for chunk in range(layout.vpp):
        rules = param_map(family, hf_config, coords=coords, chunk=plans[coords.pp_rank, chunk], **options)
        for rule in rules.values():
            for name in set(rule.hf):
                of_file = users.setdefault(file_name(family, name), {})
                of_file.setdefault(name, []).append((chunk, rule))
    shapes = expected_hf_names(family, hf_config, head=head)
    mtp = num_mtp_layers(hf_config)
    passed_over = expected_hf_names(family, hf_config, head=head, mtp=mtp).keys() - shapes.keys()
    passed_over |= shared_tensors(hf_config, mtp).keys() | {"lm_head.weight"} - shapes.keys()
    waiting: dict[tuple[int, str], dict[int, Tensor]] = {}  # parts of parameters that lack some, by span
    missing = set(shapes)
    for name, tensor in weights:
        if name in passed_over or name.startswith(family.carries):
            continue
        _check(name, tensor, shapes, missing)
        missing.remove(name)
        read = unstacking_read({name: tensor}.__getitem__, family)
        for part, of_part in users.get(name, {}).items():
            source = tensor if part == name else read(part)[:]
            for chunk, rule in of_part:
                spans, parts = rule.spans(rule.rank), waiting.setdefault((chunk, rule.mcore), {})
                parts |= _parts(rule, part, source)
                if len(parts) == len(spans):
                    del waiting[chunk, rule.mcore]
                    whole = [parts[i] for i in range(len(spans))]
                    yield chunk, rule.mcore, whole[0] if len(whole) == 1 else torch.cat(whole, dim=spans[0].dim)
    if missing:
        raise ModelError(
            f"the stream ended with {len(missing)} tensors missing ({shorten_list(sorted(missing))}); "
            "send the whole model"
        )


def mcore_to_hf(
    shards: Iterable[tuple[int, int, str, Tensor]],
    family: Family,
    layout: ParallelDims,
    *,
    hf_config: HFConfig,
    spec: str = "local",
    head: str = "lm",
    vocab_multiple: int = 1,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (HF name, tensor) of the whole model, from (rank, model chunk, mcore name, shard) of the ranks, in any
    order.

    Replicas (of data parallelism, of what every rank holds, of a tied embedding's second copy) may come or not: the
    first one counts. Padding of the vocabulary is left out. No rank's model has MTP layers, so none come.

    Names are those of files, even if these hold experts stacked. Such a tensor comes after all experts of its layer.
    Raises ModelError on a name unknown to the rank, another shape, and a stream that ends too early.
    """
    pairs = _merged(
        shards, family, layout, hf_config, {"spec": spec, "head": head, "vocab_multiple": vocab_multiple}
    )  # fmt: skip
    yield from restack(pairs, family, hf_config)


def _merged(
    shards: Iterable[tuple[int, int, str, Tensor]],
    family: Family,
    layout: ParallelDims,
    hf_config: HFConfig,
    options: dict[str, Any],
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name of the tables, tensor) as `mcore_to_hf` says."""
    plans = chunk_plans(hf_config["num_hidden_layers"], layout.pp, layout.vpp)
    owned: dict[tuple, Rule] = {}  # by pp_rank, chunk, ep_rank of an expert, name; for rank 0 of its axis
    copies = set()  # (pp_rank, chunk, name) of second copies of tied embeddings
    for ((pp_rank, chunk), plan), ep_rank in itertools.product(plans.items(), range(layout.ep)):
        coords = Coordinates(pp_rank=pp_rank, ep_rank=ep_rank)
        rules = param_map(family, hf_config, layout=layout, coords=coords, chunk=plan, **options)
        for name, rule in rules.items():
            if rule.copy:
                copies.add((pp_rank, chunk, name))
            else:
                owned[pp_rank, chunk, None if rule.expert is None else ep_rank, name] = rule
    missing = set(owned)
    waiting: dict[tuple, dict[int, Tensor]] = {}  # shards by rank of the axis, of parameters that lack some
    for rank, chunk, name, shard in shards:
        at = layout.coordinates(rank)
        if (at.pp_rank, chunk, name) in copies:
            continue
        keys = [(at.pp_rank, chunk, ep, name) for ep in (None, at.ep_rank)]
        key = next((key for key in keys if key in owned), None)
        if key is None:
            raise ModelError(
                name, why=f"rank {rank} of {layout.describe()} has no such parameter in its model chunk {chunk}"
            )
        if key not in missing:
            continue
        rule = owned[key]
        place = {"tp": at.tp_rank, "etp": at.etp_rank, None: 0}[rule.axis]
        if tuple(shard.shape) != rule.shape(place):
            raise ModelError(name, why=f"of rank {rank} is {list(shard.shape)}, not {list(rule.shape(place))}")
        parts = waiting.setdefault(key, {})
        parts.setdefault(place, shard)
        if len(parts) == rule.degree:
            missing.remove(key)
            found = waiting.pop(key)
            yield from rule.merge([found[i] for i in range(rule.degree)]).items()
    if missing:
        names = sorted(name for key in missing for name in owned[key].hf)
        raise ModelError(
            f"the stream ended with {len(names)} tensors missing ({shorten_list(names)}); send the shards of all ranks"
        )


def _check(name: str, tensor: Tensor, shapes: dict[str, tuple[int, ...]], missing: set[str]) -> None:
    if name not in shapes:
        raise ModelError(name, why="the model has no such tensor", fix="give the config.json of the model that is sent")
    if name not in missing:
        raise ModelError(name, why="came twice")
    if tuple(tensor.shape) != tuple(shapes[name]):
        raise ModelError(name, why=f"is {list(tensor.shape)}, not {list(shapes[name])} as config.json says")


def _parts(rule: Rule, name: str, tensor: Tensor) -> dict[int, Tensor]:
    """Returns copies of the parts of a tensor that `rule` takes, by the number of their span; zeros with the first."""
    parts = {}
    for number, span in enumerate(rule.spans(rule.rank)):
        if span.source is None and name == rule.hf[0]:
            parts[number] = tensor.new_zeros((span.length, *tensor.shape[1:]))
        elif span.source is not None and name == rule.hf[span.source]:
            parts[number] = tensor.narrow(span.dim, span.start, span.length).clone()
    return parts
