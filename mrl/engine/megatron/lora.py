"""Attaches adapters to a model of the Megatron engine, and describes Hugging Face's A and B as rules of this rank.

`mrl.engine.lora.selection` says which adapters there are and names their tensors. The families' rules say which rows
and columns of each Hugging Face matrix a rank holds. An adapter's B has the rows of its matrix and its A the columns,
so both follow from the matrix' rule. An expert's adapter is a slice of the tensors of all experts of a layer, as peft
keeps them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from megatron.core import parallel_state
from torch import Tensor

from mrl.config.schema import LoraConfig
from mrl.engine.lora.shapes import (
    PREFIX,
    SCORE,
    AdapterShape,
    by_tensor,
    deinterleave,
    initial_a,
    interleave,
    join_experts,
)
from mrl.engine.megatron.weights import Rules, ruled_parameters
from mrl.engine.torch_dist.boxes import Box, PlacedTensor
from mrl.mcore_models import lora
from mrl.mcore_models.build import Model
from mrl.weights.algebra import Span
from mrl.weights.rules import Rule
from mrl.weights.stacks import interleaved_rows, place_of
from mrl.weights.table import Family

Shapes = Mapping[str, AdapterShape]

_SPLITS: Mapping[str, lora.Split] = {"replicated": "whole", "row": "row"}
"""The split of a linear by the kind of its rule; others are split by columns."""
_GROUPED = re.compile(r"\.weight(\d+)$")  # a grouped linear's weight, with the expert's number on its rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterRule(Rule):
    """Describes A or B of one adapter, or of one expert's, as a rank holds it. hf: its name for people."""

    of: AdapterShape
    tensor: str  # "A" or "B"
    spans_of_ranks: tuple[tuple[Span, ...], ...]
    """For each rank of `axis`, its parts of the whole, in order; empty if it has no row of the matrix."""
    interleaved: int = 1  # how many tensors' rows alternate in the file's B, as those of gate and up

    @property
    def file_name(self) -> str:
        """Returns the name of its tensor in peft's file. Other experts may share the tensor."""
        return self.of.a_name if self.tensor == "A" else self.of.b_name

    def spans(self, rank: int) -> list[Span]:
        return list(self.spans_of_ranks[rank])

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        size, spans = list(self.hf_shapes[0]), self.spans_of_ranks[self.rank if rank is None else rank]
        size[spans[0].dim if spans else 0] = sum(span.length for span in spans)
        return tuple(size)

    def assemble(self, read: Callable[[str], Tensor], rank: int) -> Tensor:
        return super().assemble(lambda _: self._from_file(read(self.file_name)), rank)

    def _from_file(self, whole: Tensor) -> Tensor:
        """Returns A [R, I] or B [O, R] from the file's tensor."""
        own = self.of.split(whole, self.tensor)[self.expert or 0]
        return own if self.interleaved == 1 else deinterleave(own, self.interleaved)

    def to_file(self, experts: Sequence[Tensor]) -> Tensor:
        """Returns the file's tensor, from A [R, I] or B [O, R] of each expert in order, or from the only one."""
        if self.expert is None:
            return experts[0] if self.interleaved == 1 else interleave(experts[0], self.interleaved)
        whole = torch.stack(list(experts))
        return join_experts(whole if self.interleaved == 1 else interleave(whole, self.interleaved), self.tensor)


# -- which rules there are ---------------------------------------------------------------------------------------------


def adapters_on(rule: Rule, shapes: Shapes) -> list[tuple[AdapterShape, tuple[int, ...]]]:
    """Returns the adapters of an mcore parameter, each with the Hugging Face matrices of the rule that it is of.

    transformers holds the experts of a layer as `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`, and calls every
    family's router `mlp.gate`.
    """
    module, _, kind = rule.hf[0].rpartition(".")
    if kind != "weight":
        return []
    sources = tuple(range(len(rule.hf)))
    if rule.expert is not None:
        name = f"model.layers.{rule.layer}.mlp.experts.{'down_proj' if rule.kind == 'row' else 'gate_up_proj'}"
        return [(shapes[name], sources)] if name in shapes else []
    if rule.mcore.endswith(".mlp.router.weight"):
        module = f"model.layers.{rule.layer}.mlp.gate"
        return [(shapes[module], sources)] if module in shapes else []
    names = [name.removesuffix(".weight") for name in rule.hf]
    return [(shapes[name], (i,)) for i, name in enumerate(names) if name in shapes]


def rules_of(rule: Rule, shapes: Shapes, family: Family) -> list[AdapterRule]:
    """Returns the rules of A and B of every adapter of the mcore parameter of `rule`, in order: A, B, A, B, ..."""
    rules = []
    for shape, sources in adapters_on(rule, shapes):
        rows = rule.hf_shapes[sources[0]][0]
        divided = [_spans(rule, rank, sources, rows) for rank in range(rule.degree)]
        whole_a, whole_b = (shape.rank, shape.in_features), (shape.out_features, shape.rank)
        split = {"replicated": None, "row": "A"}.get(rule.kind, "B")
        place = place_of(family, rule.hf[0])
        for tensor, size in (("A", whole_a), ("B", whole_b)):
            is_split = tensor == split and rule.degree > 1
            expert = "" if rule.expert is None else f"[{rule.expert}]"
            rules.append(
                AdapterRule(
                    mcore=parameter_name(rule.mcore, shape, tensor),
                    hf=((shape.a_name if tensor == "A" else shape.b_name) + expert,),
                    hf_shapes=(size,),
                    kind="replicated",
                    axis=rule.axis if is_split else None,
                    degree=rule.degree if is_split else 1,
                    rank=rule.rank if is_split else 0,
                    sizes=rule.sizes,
                    expert=rule.expert,
                    layer=rule.layer,
                    of=shape,
                    tensor=tensor,
                    # on one rank, too: a gated delta net's rows are in another order than the file's
                    spans_of_ranks=tuple(divided) if tensor == split else ((Span(0, 0, 0, size[0]),),),
                    interleaved=1 if place is None or tensor == "A" else interleaved_rows(family, place.stored),
                )
            )
    return rules


def parameter_name(mcore: str, shape: AdapterShape, tensor: str) -> str:
    """Returns the name of A or B in a model chunk, as `decoder.layers.0.self_attention.linear_qkv.adapter.A.q_proj`.

    For an expert in a grouped linear it is `....linear_fc1.adapter.3.A.gate_up_proj`.
    """
    grouped = _GROUPED.search(mcore)
    name = lora.NAME if grouped is None else f"{lora.NAME}.{grouped[1]}"
    return f"{mcore.rpartition('.')[0]}.{name}.{tensor}.{shape.name.rpartition('.')[2]}"


def _spans(rule: Rule, rank: int, sources: tuple[int, ...], rows: int) -> tuple[Span, ...]:
    """Returns what `rank` holds of a split A or B: the columns or rows of its part of the matrices, with neighbours
    joined."""
    spans: list[Span] = []
    for span in rule.spans(rank):
        if span.source not in sources:
            continue
        start = span.start + (sources.index(span.source) * rows if span.dim == 0 else 0)
        if spans and spans[-1].start + spans[-1].length == start:
            spans[-1] = dataclasses.replace(spans[-1], length=spans[-1].length + span.length)
        else:
            spans.append(Span(0, span.dim, start, span.length))
    return tuple(spans)


# -- into the model ----------------------------------------------------------------------------------------------------


def attach(
    models: Sequence[Model], rules: Rules, shapes: Shapes, options: LoraConfig,
    family: Family, *, head: str,
) -> list[dict[str, Rule]]:  # fmt: skip
    """Freezes the chunks, attaches this rank's adapters without values, and returns all rules.

    A value head stays trainable.
    """
    _check(rules, shapes)
    everything = []
    for model, of_chunk in zip(models, rules, strict=True):
        model.requires_grad_(False)
        extended: dict[str, Rule] = dict(of_chunk)
        for rule in of_chunk.values():
            found = rules_of(rule, shapes, family)
            if found:
                _attach(model, rule, found, options)
                extended |= {r.mcore: r for r in found if 0 not in r.shape()}
        everything.append(extended)
        if head == "value" and model.post_process:
            model.output_layer.weight.requires_grad_(True)
        lora.needs_gradient(model)
    return everything


def _attach(model: Model, rule: Rule, found: Sequence[AdapterRule], options: LoraConfig) -> None:
    """Attaches the adapter of one module. found: rules of A and B, alternating."""
    module = model.get_submodule(rule.mcore.rpartition(".")[0])
    outputs, inputs = rule.shape()
    grouped = _GROUPED.search(rule.mcore)
    shape = found[0].of
    adapter = lora.Adapter(
        model.config,
        [lora.AdapterBlock(b.of.name.rpartition(".")[2], _blocks(rule, b)) for b in found[1::2]],
        split=_SPLITS.get(rule.kind, "column"),
        expert=rule.expert is not None, inputs=inputs, outputs=outputs, rank=shape.rank, scale=shape.scale,
        dropout=options.dropout,
    )  # fmt: skip
    if grouped is None:
        lora.attach(module, adapter)
    else:
        lora.attach_to_expert(module, int(grouped[1]), adapter)


def _blocks(rule: Rule, b: AdapterRule) -> tuple[tuple[int, int], ...]:
    """Returns (first row, count) of the parameter's rows that are those of B, in B's order."""
    if rule.kind in ("row", "replicated"):
        return ((0, b.of.out_features),)
    sources = [i for i, name in enumerate(rule.hf) if rule.expert is not None or name == f"{b.of.name}.weight"]
    blocks, at = [], 0
    for span in rule.spans(rule.rank):
        if span.source in sources:
            blocks.append((at, span.length))
        at += span.length
    return tuple(blocks)


def _check(rules: Rules, shapes: Shapes) -> None:
    """Asserts that every adapter of this rank's layers has a place in the model."""
    here = [rule for of_chunk in rules for rule in of_chunk.values()]
    layers = {rule.layer for rule in here if rule.layer is not None}
    placed = {shape.name for rule in here for shape, _ in adapters_on(rule, shapes)}
    lost = [name for name in shapes if name not in placed and any(f".layers.{layer}." in name for layer in layers)]
    assert not lost, f"megatron's model has no place for the adapters of {lost}"


def initial_adapters(shapes: Shapes, seed: int) -> Callable[[str], Tensor]:
    """Returns a reader of the initial adapters by the names of peft's files, the same in every layout."""
    by_name = by_tensor(shapes)

    @functools.lru_cache(maxsize=1)  # experts ask for slices of one tensor
    def read(name: str) -> Tensor:
        shape = by_name[name]
        return initial_a(shape, seed) if name == shape.a_name else torch.zeros(shape.b_shape)

    return read


def fill(models: Sequence[Model], rules: Rules, tensors: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    """Sets the trained tensors from an adapter's file. Returns a function that reads them by the names of rules."""

    def read(name: str) -> Tensor:
        return tensors[name if name.startswith(PREFIX) else PREFIX + name]

    with torch.no_grad():
        for _, parameter, rule in ruled_parameters(models, rules):
            if isinstance(rule, AdapterRule) or parameter.requires_grad:
                parameter.copy_(rule.load(read))
    return read


def set_scale(models: Iterable[Model], scale: float) -> None:
    """Sets the scale of all adapters of the models."""
    for model in models:
        for adapter in lora.adapters_of(model):
            adapter.scale = scale


@contextlib.contextmanager
def without_adapters(models: Iterable[Model]) -> Iterator[None]:
    """Disables the models' adapters inside."""
    adapters = [adapter for model in models for adapter in lora.adapters_of(model) if adapter.enabled]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


# -- in files ----------------------------------------------------------------------------------------------------------


def checkpoint_places(models: Sequence[Model], rules: Rules) -> Iterator[PlacedTensor]:
    """Yields the trained tensors and their places in a checkpoint, under their names in peft's file; of experts [E,
    ...]."""
    for _, parameter, rule in ruled_parameters(models, rules):
        if parameter.requires_grad:
            yield PlacedTensor(parameter, _boxes(rule, parameter.detach()), _replica(rule))


def _replica(rule: Rule) -> tuple[int, int, int]:
    """Returns this rank's index among the ranks with the same tensor: all zeros for the one that writes."""
    if rule.expert is not None:
        shard, copy = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_data_parallel_rank()
    else:
        shard = parallel_state.get_tensor_model_parallel_rank()
        copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return (0, shard if rule.axis is None else 0, copy)


def _boxes(rule: Rule, data: Tensor) -> tuple[Box, ...]:
    if not isinstance(rule, AdapterRule):
        return (Box(SCORE, tuple(data.shape), (0, 0), data),)
    spans, whole = rule.spans(rule.rank), rule.hf_shapes[0]
    lead: tuple[int, ...] = ()
    parts: Sequence[Tensor] = data.split([span.length for span in spans], dim=spans[0].dim)
    if rule.expert is not None:
        lead, whole, parts = (rule.expert,), (rule.of.experts, *whole), [part[None] for part in parts]
    offsets = [tuple(span.start if dim == span.dim else 0 for dim in (0, 1)) for span in spans]
    return tuple(Box(rule.file_name, whole, (*lead, *at), p) for at, p in zip(offsets, parts, strict=True))
