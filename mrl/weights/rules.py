"""Makes the rules of one rank from a family's table: the HF slices of each mcore parameter, and the way back.

It is pure: a rank is a `ParallelDims` and `Coordinates`, its layers are a `ChunkPlan`. The engine owns the process
groups: to export, it gathers the shards of `rule.axis` and calls `merge`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mrl.errors import ConfigError
from mrl.parallel import Coordinates, ParallelDims, stage_layers
from mrl.weights.algebra import KINDS, Shape, Shard, Span, padded_vocab
from mrl.weights.composites import COMPOSITES
from mrl.weights.stacks import stored_shapes
from mrl.weights.table import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    MTP_EMBEDDING,
    TIED_HEAD,
    VALUE_HEAD,
    Entry,
    Family,
    HFConfig,
    sizes_of,
)


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """Holds the parts of the model in one model chunk."""

    layers: tuple[int, ...]  # global numbers, in order
    has_embedding: bool
    has_output: bool  # final norm and head
    mtp: int = 0  # MTP layers


def chunk_plans(num_layers: int, pp: int, vpp: int = 1, mtp: int = 0) -> dict[tuple[int, int], ChunkPlan]:
    """Returns the plan of each (pp_rank, chunk), in pipeline order: virtual stage `v * pp + p` is chunk `v` of rank
    `p`.

    mtp: MTP layers, which are on the last stage.
    """
    stages = stage_layers(num_layers, pp, vpp)
    last = len(stages) - 1
    return {
        (s % pp, s // pp): ChunkPlan(tuple(layers), s == 0, s == last, mtp if s == last else 0)
        for s, layers in enumerate(stages)
    }


@dataclasses.dataclass(frozen=True)
class Rule:
    """Describes one mcore parameter of one rank."""

    mcore: str  # its name in the model chunk
    hf: tuple[str, ...]  # the HF tensors that it is made of
    hf_shapes: tuple[Shape, ...]
    kind: str  # a key of `algebra.KINDS`
    axis: str | None  # the group over which its shards lie, "tp" or "etp"; None: every rank holds the whole
    degree: int  # size of that group; 1 where there is none
    rank: int  # this rank's place in it; 0 where there is none
    sizes: Mapping[str, int] = dataclasses.field(repr=False)
    expert: int | None = None  # global number of its expert
    layer: int | None = None  # global number of its layer
    copy: bool = False  # a second copy of the embedding on the last pipeline stage: loaded, never exported
    buffer: bool = False  # no parameter; fp32 and untrained

    def spans(self, rank: int) -> list[Span]:
        """Returns the spans that make the shard of `rank` of the axis, in order."""
        shard = Shard(self.axis or "tp", rank, self.degree, self.sizes, self.hf[0])
        return KINDS[self.kind](self.hf_shapes, shard)

    def shape(self, rank: int | None = None) -> Shape:
        """Returns the shape of the shard of `rank` (default: this rank's)."""
        spans = self.spans(self.rank if rank is None else rank)
        size = list(self.hf_shapes[0])
        size[spans[0].dim] = sum(span.length for span in spans)
        return tuple(size)

    def load(self, read: Callable[[str], Any]) -> Tensor:
        """Returns this rank's shard, in the dtype of the file. It may alias memory of `read`.

        `read(hf_name)` gives a tensor, or safetensors' lazy slice, of which only this shard's entries are then read. It
        is sliced on its first two dimensions.
        """
        return self.assemble(read, self.rank)

    def assemble(self, read: Callable[[str], Any], rank: int) -> Tensor:
        """Returns the shard of `rank` of the axis, as in `load`."""
        parts = []
        for span in self.spans(rank):
            entries = slice(span.start, span.start + span.length)
            if span.source is None:
                parts.append(read(self.hf[0])[0:1].new_zeros((span.length, *self.hf_shapes[0][1:])))
            else:
                source = read(self.hf[span.source])
                parts.append(source[entries] if span.dim == 0 else source[:, entries])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def merge(self, shards: Iterable[Tensor]) -> dict[str, Tensor]:
        """Returns the HF tensors by name, new memory on their device, from the shards of all ranks of the axis.

        A shard is let go of before the next one is asked for.
        """
        each = iter(shards)
        whole: list[Tensor] = []
        for rank in range(self.degree):
            shard = next(each, None)
            assert shard is not None, f"{self.mcore}: {rank} shards for {self.axis} of {self.degree}"
            assert tuple(shard.shape) == self.shape(rank), (
                f"{self.mcore}: shard {rank} has shape {tuple(shard.shape)}, not {self.shape(rank)}"
            )
            if not whole:
                whole = [shard.new_empty(shape) for shape in self.hf_shapes]
            at = 0
            for span in self.spans(rank):
                if span.source is not None:
                    place = whole[span.source].narrow(span.dim, span.start, span.length)
                    place.copy_(shard.narrow(span.dim, at, span.length))
                at += span.length
            del shard
        assert next(each, None) is None, f"{self.mcore}: more shards than {self.axis} of {self.degree}"
        return dict(zip(self.hf, whole, strict=True))


def _chunk_entries(
    family: Family, config: HFConfig, chunk: ChunkPlan, head: str
) -> Iterator[tuple[Entry, int | None, int | None]]:
    """Yields (entry, local layer, global layer) of a chunk, in model order."""
    if head not in ("lm", "value"):
        raise ValueError(f"head {head!r} is neither 'lm' nor 'value'")
    if chunk.has_embedding:
        yield EMBEDDING, None, None
    for local, layer in enumerate(chunk.layers):
        for entry in family.layer_entries(config, layer):
            yield entry, local, layer
    if chunk.has_output:
        yield FINAL_NORM, None, None
        if head == "value":
            yield VALUE_HEAD, None, None
        elif not config["tie_word_embeddings"]:
            yield LM_HEAD, None, None
        elif not chunk.has_embedding:
            yield TIED_HEAD, None, None
    if chunk.mtp and not chunk.has_embedding:
        yield MTP_EMBEDDING, None, None
    for local in range(chunk.mtp):
        layer = config["num_hidden_layers"] + local
        for entry in family.mtp_entries(config, layer):
            yield entry, local, layer


def param_map(
    family: Family,
    hf_config: HFConfig,
    *,
    layout: ParallelDims,
    coords: Coordinates,
    chunk: ChunkPlan,
    spec: str = "local",
    head: str = "lm",
    vocab_multiple: int = 1,
) -> dict[str, Rule]:
    """Returns the rule of every parameter of a model chunk at `coords`, by mcore name, in model order.

    spec: "local" or "te", the naming of the layer spec. vocab_multiple: as in `padded_vocab`.

    head: "lm", or "value" for a head of one output (`score.weight`), which is never tied.

    Raises ConfigError if the layout does not fit the model's sizes.
    """
    sizes = sizes_of(hf_config, padded_vocab(hf_config["vocab_size"], layout.tp, vocab_multiple))
    sizes |= family.sizes(hf_config)
    if sizes["experts"] % layout.ep:
        raise ConfigError(
            "engine.parallel.ep",
            layout.ep,
            f"does not divide the model's {sizes['experts']} experts",
            f"use a divisor of {sizes['experts']}",
        )
    here = sizes["experts"] // layout.ep
    rules: dict[str, Rule] = {}
    for entry, local, layer in _chunk_entries(family, hf_config, chunk, head):
        for e in range(here) if entry.of_expert else [None]:
            expert = None if e is None else coords.ep_rank * here + e
            rule = _rule(entry, sizes, layout, coords, spec=spec, local=(local, e), layer=layer, expert=expert)
            rule.shape()  # the layout does not fit: say so before anything is built
            rules[rule.mcore] = rule
    return rules


def _rule(
    entry: Entry,
    sizes: Mapping[str, int],
    layout: ParallelDims,
    coords: Coordinates,
    *,
    spec: str,
    local: tuple[int | None, int | None],
    layer: int | None,
    expert: int | None,
) -> Rule:
    """Returns `entry` for one layer and expert; `local` are their numbers in the chunk and on the EP rank."""
    axis: str | None
    axis, degree, rank = "tp", layout.tp, coords.tp_rank
    if entry.of_expert:
        axis, degree, rank = "etp", layout.etp, coords.etp_rank
    if entry.kind == "replicated":
        axis, degree, rank = None, 1, 0
    return Rule(
        mcore=entry.name(spec).format(l=local[0], e=local[1]),
        hf=tuple(name.format(l=layer, e=expert) for name, _ in entry.hf),
        hf_shapes=tuple(tuple(sizes[word] for word in shape) for _, shape in entry.hf),
        kind=entry.kind,
        axis=axis,
        degree=degree,
        rank=rank,
        sizes=sizes,
        expert=expert,
        layer=layer,
        copy=entry is TIED_HEAD or entry is MTP_EMBEDDING,
        buffer=entry.buffer,
    )


@dataclasses.dataclass(frozen=True)
class OwnedRule:
    """Is one step of an export: the ranks at (pp_rank, ep_rank) hold the shards of `rule.mcore` in model chunk `chunk`.

    ep_rank is None except for experts: every EP rank holds it. `rule` is written for rank 0 of its axis.
    """

    pp_rank: int
    chunk: int
    ep_rank: int | None
    rule: Rule


def export_order(
    family: Family,
    hf_config: HFConfig,
    *,
    layout: ParallelDims,
    chunks: Mapping[tuple[int, int], ChunkPlan],
    spec: str = "local",
    head: str = "lm",
    vocab_multiple: int = 1,
) -> Iterator[OwnedRule]:
    """Yields every parameter of the whole model once, in the same order on every rank; tied copies are left out.

    chunks: the plan of each (pp_rank, chunk), as from `chunk_plans`. The experts of all EP ranks are in it.
    """
    for (pp_rank, chunk), plan in chunks.items():
        of_ep = [
            param_map(
                family,
                hf_config,
                layout=layout,
                coords=Coordinates(pp_rank=pp_rank, ep_rank=ep_rank),
                chunk=plan,
                spec=spec,
                head=head,
                vocab_multiple=vocab_multiple,
            )
            for ep_rank in range(layout.ep)
        ]
        for name, rule in of_ep[0].items():
            if rule.copy:
                continue
            for ep_rank in range(layout.ep) if rule.expert is not None else [None]:
                yield OwnedRule(pp_rank, chunk, ep_rank, of_ep[ep_rank or 0][name])


def whole_rules(
    family: Family, hf_config: HFConfig, *, spec: str = "local", head: str = "lm", mtp: int = 0
) -> dict[str, Rule]:
    """Returns the rule of every parameter of the model on a single rank, by mcore name, in model order.

    mtp: how many MTP layers are among them.
    """
    layers = tuple(range(hf_config["num_hidden_layers"]))
    plan = ChunkPlan(layers, has_embedding=True, has_output=True, mtp=mtp)
    return param_map(
        family, hf_config, layout=ParallelDims(), coords=Coordinates(), chunk=plan, spec=spec, head=head
    )  # fmt: skip


def expected_hf_names(family: Family, hf_config: HFConfig, *, head: str = "lm", mtp: int = 0) -> dict[str, Shape]:
    """Returns every tensor of the model's HF folder with its shape, in model order; `lm_head.weight` only when untied.

    mtp: how many MTP layers are among them, without what these hold of other tensors again.
    """
    rules = whole_rules(family, hf_config, head=head, mtp=mtp)
    shapes = {name: shape for rule in rules.values() for name, shape in zip(rule.hf, rule.hf_shapes, strict=True)}
    return stored_shapes(family, shapes)


def buffer_names(family: Family, hf_config: HFConfig, *, mtp: int = 0) -> set[str]:
    """Returns HF names of buffers, which are fp32 in every export. mtp: as in `expected_hf_names`."""
    layers = range(hf_config["num_hidden_layers"] + mtp)
    entries = [(entry, layer) for layer in layers for entry in family.layer_entries(hf_config, layer)]
    return {family.in_files(name.format(l=layer)) for entry, layer in entries if entry.buffer for name, _ in entry.hf}


def value_head_config(hf_config: HFConfig) -> dict[str, Any]:
    """Returns the changes of config.json for a value head in place of the LM head: one label, and nothing is tied.

    Returns nothing for a sequence classifier of one label: its label has a name of its own.
    """
    before = hf_config.get("architectures") or []
    other = "ForConditionalGeneration" if hf_config["model_type"] in COMPOSITES else "ForCausalLM"
    after = [name.replace("ForCausalLM", "ForSequenceClassification") for name in before]
    after = [name.replace(other, "ForSequenceClassification") for name in after]
    if before and before == after and len(hf_config.get("id2label") or ()) == 1:
        return {}
    return {
        "architectures": after,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "tie_word_embeddings": False,
    }
