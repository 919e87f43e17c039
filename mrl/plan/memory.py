"""Bytes that every rank holds in each phase of a step. Activations of a part on backend fsdp are not planned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from mrl.algorithms.distill import TEACHER, DistillLoss
from mrl.config.command import Phase, Phases
from mrl.config.schema import EngineConfig, RoleConfig
from mrl.engine.fsdp import precision
from mrl.engine.fsdp.shapes import shapes_of
from mrl.engine.logprobs import VocabShard
from mrl.engine.megatron import meta
from mrl.engine.megatron.chunk_run import DistillIds
from mrl.engine.megatron.meta import Buffer, ChunkFigures, RankFigures
from mrl.engine.peak_bytes import PeakBytes
from mrl.engine.sampling import SamplingParams, SamplingRows, choose_among
from mrl.errors import ConfigError, quoted
from mrl.kernels import operators
from mrl.mcore_models import userbuffers
from mrl.mcore_models.layer_spec import DTYPES
from mrl.parallel import ParallelDims
from mrl.plan import schedule
from mrl.plan.gpus import GPU
from mrl.weights.families import family_for
from mrl.weights.hf_config import read_hf_config, vocab_size_of
from mrl.weights.rules import expected_hf_names

KnownChunks = dict[tuple, ChunkFigures]
"""What chunks of models took, by what they consist of; layouts share it."""


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """How a role's mini-batch is divided on each rank, where all sequences are as long as they may be."""

    lengths: tuple[int, ...]  # of the sequences of one
    count: int  # in a mini-batch

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def micro_batches(config: RoleConfig, dims: ParallelDims, sequences: int, longest: int) -> MicroBatches:
    """Returns the micro-batches of a rank whose layout shares `sequences` of `longest` tokens."""
    limit = config.engine.micro_batch
    places = userbuffers.places_of(config.engine, dims)
    if places is not None:
        each = max(1, places // dims.places_of(longest))
    else:
        each = limit.size if limit.size is not None else max(1, (limit.token_limit or longest) // longest)
    mine = max(1, math.ceil(sequences / dims.dp))
    multiple = dims.pp if dims.vpp > 1 else 1
    count = math.ceil(math.ceil(mine / each) / multiple) * multiple
    return MicroBatches((longest,) * min(each, mine), count)


@dataclasses.dataclass(frozen=True)
class RolePlan:
    """A role's model on its layout: the figures of one rank of each pipeline stage."""

    role: str
    model: str  # its path, as the config has it
    config: RoleConfig
    dims: ParallelDims
    trains: tuple[RankFigures, ...]  # of each stage, with gradients and optimizer; empty where the role never trains
    forward: tuple[RankFigures, ...]  # of each stage in forward passes without gradients
    spec: str = "local"  # of the layers that are planned on backend megatron: local, or te
    sampling: tuple[RankFigures, ...] = ()  # of each stage where it samples itself: its layers on as many prompt tokens
    gathered: int = 0  # bytes of weights that backend fsdp keeps gathered over a mini-batch
    graph_pool: int = 0  # bytes that graphs of training keep, whatever runs
    first_rank: int = 0  # of the run's ranks, the first that has the role
    kernels: bool = False  # whether mrl's own choose tokens

    @property
    def stages(self) -> tuple[RankFigures, ...]:
        return self.trains or self.forward


def plan_role(
    role: str, model: str, config: RoleConfig, dims: ParallelDims, phases: Phases, longest: int, gpu: GPU,
    known: KnownChunks,
) -> RolePlan:  # fmt: skip
    """Builds and runs the role's model, once for each stage that differs from those before it. On backend fsdp it is
    built alone: what its passes take is not known. known: what chunks took so far, in any layout."""
    if config.engine.backend == "fsdp":
        forward = (sharded_figures(dataclasses.replace(config, optimizer=None), dims),)
        stages = (sharded_figures(config, dims),) if config.optimizer is not None else ()
        gathered = _bytes_over_a_mini_batch(config, dims, gpu.memory)
        return RolePlan(role, model, config, dims, stages, forward, gathered=gathered)
    spec = meta.layer_spec_on_gpus(config, dims, gpu.capability)
    given, config = config, _as_experts_multiply(config, spec, gpu.capability)
    frozen = dataclasses.replace(config, optimizer=None)
    trained: tuple[RankFigures, ...] = ()
    only_forward: tuple[RankFigures, ...] = ()
    sampling: tuple[RankFigures, ...] = ()
    for phase in phases.phases:
        if phase.role != role:
            continue
        lengths = micro_batches(config, dims, phase.sequences // phase.steps, longest).lengths
        if phase.kind == "train":
            trained = _stages(
                config, dims, lengths, spec, known, entropy=phases.entropy if config.head == "lm" else "none",
                ids=_ids(phase, config), kernels=gpu.kernels,
            )  # fmt: skip
        elif phase.kind == "forward":
            if not only_forward or phase.distill is not None:  # the pass that takes more
                ids = _ids(phase, config)
                only_forward = _stages(frozen, dims, lengths, spec, known, ids=ids, kernels=gpu.kernels)
        elif phase.prefill_tokens:  # a head of one output: logits are of the sampled rows alone, and are added to it
            layers = dataclasses.replace(frozen, head="value", engine=without_padding_and_graphs(config))
            # without kernels: the decoder computes experts by torch, which keeps more than the kernels of training
            sampling = _stages(layers, dims, (phase.prefill_tokens,), spec, known)
    if not trained and not only_forward:  # it only samples
        only_forward = _stages(frozen, dims, (), spec, known)
    # graphs refuse pp above 1 (mcore_models/graph_limits.py)
    pool = _graph_pool(trained[0], config, spec) if trained and config.engine.cuda_graphs else 0
    return RolePlan(
        role, model, given, dims, trained, only_forward, spec, sampling, graph_pool=pool, kernels=gpu.kernels
    )


def _graph_pool(stage: RankFigures, config: RoleConfig, spec: str) -> int:
    """Returns at most what graphs of training keep: a micro-batch's activations, and gradients of weights.

    A capture has all gradients at once (mcore_models/train_graphs.py). te's fused ones go into megatron's buffers.
    """
    fused = spec == "te" and config.engine.megatron.get("gradient_accumulation_fusion", True)
    gradients = 0 if fused else stage.trained_parameters * stage.dtype_bytes
    return sum(chunk.saved for chunk in stage.chunks) + gradients


def _as_experts_multiply(config: RoleConfig, spec: str, capability: tuple[int, int] | None) -> RoleConfig:
    from mrl.mcore_models.grouped import is_chosen

    chosen = is_chosen(config.engine.moe.grouped_mm, spec, DTYPES[config.model.dtype], capability)
    moe = dataclasses.replace(config.engine.moe, grouped_mm=chosen)
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, moe=moe))


def without_padding_and_graphs(config: RoleConfig) -> EngineConfig:
    """Returns the engine without userbuffers, padding and graphs: neither sampling nor a stage alone has them."""
    megatron_options = {name: value for name, value in config.engine.megatron.items() if name != userbuffers.FIELD}
    micro_batch = dataclasses.replace(config.engine.micro_batch, pad=False)
    return dataclasses.replace(config.engine, megatron=megatron_options, micro_batch=micro_batch, cuda_graphs=False)


def _ids(phase: Phase, config: RoleConfig) -> DistillIds | None:
    """Returns the ids of a token in a phase's passes. The student's vocabulary stands for its teachers', too."""
    distill = phase.distill
    if distill is None:
        return None
    vocabulary = vocab_size_of(read_hf_config(config.model.path))
    if vocabulary is None:
        why = "has no vocab_size in its config.json, which distillation compares"
        raise ConfigError("model.path", quoted(config.model.path), why, "give a model that has")
    count = min(distill.top_k or vocabulary, vocabulary)
    if phase.kind == "forward":
        return DistillIds(count, None, temperature=distill.temperature)
    loss = DistillLoss(kind=distill.loss, beta=distill.beta, tail=count < vocabulary)
    return DistillIds(count, loss, TEACHER, distill.temperature, distill.first_temperature)


def _stages(
    config: RoleConfig,
    dims: ParallelDims,
    lengths: Sequence[int],
    spec: Literal["te", "local"],
    known: KnownChunks,
    *,
    entropy: str = "none",
    ids: DistillIds | None = None,
    kernels: bool = False,
) -> tuple[RankFigures, ...]:
    """Returns one rank of each stage. Stages with the same layers are run once.

    Tensor, context and data parallel ranks of a stage differ only in their share of the optimizer, which is listed.
    """
    kinds = meta.kinds_of_stages(config, dims)
    made: dict[tuple, RankFigures] = {}
    stages = []
    for stage, kind in enumerate(kinds):
        rank = stage * (dims.world_size // dims.pp)
        if kind.same not in made:
            made[kind.same] = meta.measure(
                config, dims, rank, lengths, spec=spec, entropy=entropy, known=known, ids=ids, kernels=kernels
            )
        stages.append(dataclasses.replace(made[kind.same], layers=kind.layers, coords=dims.coordinates(rank)))
    return tuple(stages)


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes on a rank of one stage in one phase. None is unknown, and in no sum."""

    phase: str
    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int | None
    cache: int  # keys, values and states, or what an engine inside the trainer takes
    idle: int  # of roles that do not work

    @property
    def total(self) -> int:
        known = self.parameters + self.gradients + self.optimizer + self.cache + self.idle
        return known + (self.activations or 0)


def memory_uses(phases: Phases, roles: Mapping[str, RolePlan], longest: int, gpu_memory: int) -> list[MemoryUse]:
    """Returns what the fullest rank of each stage of each phase's role holds."""
    uses_of_phases = []
    for phase in phases.phases:
        plan = roles[phase.role]
        # on the same GPUs
        others = [one for role, one in roles.items() if role != phase.role and one.first_rank == plan.first_rank]
        for stage in range(plan.dims.pp):
            use = _use(phase, plan, stage, longest, gpu_memory)
            if not phases.offload_idle:
                own = dataclasses.replace(plan.stages[stage], fp8_copies=_copies(phase, plan, stage))
                kept = _resident(plan, own)
                idle = sum(max(sum(_resident(other, one)) for one in other.stages) for other in others)
                use = dataclasses.replace(
                    use, parameters=max(use.parameters, kept[0]), gradients=max(use.gradients, kept[1]),
                    optimizer=max(use.optimizer, kept[2]), idle=idle,
                )  # fmt: skip
            uses_of_phases.append(use)
    return uses_of_phases


def _resident(plan: RolePlan, stage: RankFigures) -> tuple[int, int, int]:
    """Returns bytes of parameters, gradients and optimizer that a role keeps on the device if no role is offloaded."""
    away = set(plan.config.engine.offload)
    weights = 0 if "parameters" in away else stage.parameters + stage.fp8_copies
    gradients = 0 if "gradients" in away else stage.gradients
    optimizer = 0 if "optimizer" in away else stage.largest_optimizer
    return weights + stage.buffers + plan.graph_pool, gradients, optimizer


def _copies(phase: Phase, plan: RolePlan, stage: int) -> int:
    """Returns bytes of the 8-bit copies of weights in a phase of the role itself.

    Generation and the weight sync free the copies. A forward phase keeps those that training made.
    """
    return 0 if phase.kind == "sample" else plan.stages[stage].fp8_copies


def _use(phase: Phase, plan: RolePlan, stage: int, longest: int, gpu_memory: int) -> MemoryUse:
    figures = (plan.trains if phase.kind == "train" else plan.forward or plan.trains)[stage]
    weights, gradients = figures.parameters + figures.buffers + _copies(phase, plan, stage), figures.gradients
    weights += plan.graph_pool
    if phase.kind != "sample":
        weights += plan.gathered
        if plan.config.engine.fsdp.defer_sync:  # of a mini-batch, whole
            gradients = 4 * _trained_elements(plan.config)
    if phase.kind == "sample":
        if phase.handed_to_tp:  # the engine's weights are awake, its cache is not yet
            return MemoryUse(phase.name, stage, weights, 0, 0, 0, _model_bytes(plan.config) // phase.handed_to_tp, 0)
        if phase.engine_fraction:
            return MemoryUse(phase.name, stage, plan.graph_pool, 0, 0, 0, int(phase.engine_fraction * gpu_memory), 0)
        if plan.config.engine.backend == "fsdp" and plan.dims.world_size == 1:  # they stay gathered while it samples
            weights += _gathered_bytes(plan.config)
        cache = _cache_bytes(phase, plan, stage)
        return MemoryUse(phase.name, stage, weights, 0, 0, _sampling(phase, plan, stage), cache, 0)
    activations = _activations(phase, plan, stage, longest)
    if phase.kind == "forward":
        return MemoryUse(phase.name, stage, weights, 0, 0, activations, 0, 0)
    optimizer = figures.largest_optimizer
    if "optimizer" in plan.config.engine.offload:  # on the host, until the step, when activations are gone
        at_the_step = (activations or 0) < optimizer
        optimizer, activations = (optimizer, 0) if at_the_step else (0, activations)
    return MemoryUse(phase.name, stage, weights, gradients, optimizer, activations, 0, 0)


def _activations(phase: Phase, plan: RolePlan, stage: int, longest: int) -> int | None:
    """Returns the most bytes at once of a phase's passes; None for a part without planned passes."""
    dims, figures = plan.dims, (plan.trains if phase.kind == "train" else plan.forward)[stage]
    if not figures.chunks:
        return None
    batches = micro_batches(plan.config, dims, phase.sequences // phase.steps, longest)
    order = schedule.passes(
        stage, pp=dims.pp, vpp=dims.vpp, micro_batches=min(batches.count, 4 * dims.pp * dims.vpp),
        forward_only=phase.kind == "forward",
    )  # fmt: skip
    return most_activations(order, figures.chunks, batches.count)


def most_activations(
    order: Sequence[schedule.ScheduledPass], chunks: Sequence[ChunkFigures], micro_batches: int = 1
) -> int:
    """Returns the most bytes of activations at once on a stage that goes through `order`.

    micro_batches: of the whole mini-batch; `order` may be its beginning.
    """
    alive = schedule.most_alive(
        order, [c.saved for c in chunks], [c.forward_peak for c in chunks], [c.backward_peak for c in chunks]
    )
    alive += max(chunk.shared for chunk in chunks)
    inputs = max(c.distill_inputs for c in chunks)
    log_probs = max(c.distill_log_probs for c in chunks)
    joined = max(c.distill_joined for c in chunks)
    return micro_batches * inputs + max(alive + (micro_batches - 1) * log_probs, micro_batches * (log_probs + joined))


def _sampling(phase: Phase, plan: RolePlan, stage: int) -> int | None:
    """Returns the most bytes at once if the role samples itself; None for a part without planned passes.

    Prompts go through its layers. Then the next token of every running sequence is chosen.
    """
    if not plan.sampling:
        return None
    layers = max(chunk.forward_peak + chunk.shared for chunk in plan.sampling[stage].chunks)
    return layers + (_choice_bytes(phase, plan) if stage == plan.dims.pp - 1 else 0)


def _choice_bytes(phase: Phase, plan: RolePlan) -> int:
    """Returns the most bytes of logits and of a choice among them: the engine's own code chooses without memory."""
    rows, meta_device = _rows(phase, plan), torch.device("meta")
    columns = math.ceil(read_hf_config(plan.config.model.path)["vocab_size"] / plan.dims.tp)
    params = SamplingParams(phase.temperature, phase.top_k, phase.top_p, phase.min_p)
    chosen_by = SamplingRows.of([params] * rows, [0] * rows, meta_device)
    with operators.planned(plan.kernels), PeakBytes() as found:
        logits = torch.empty(rows, columns, dtype=DTYPES[plan.config.model.dtype], device=meta_device)
        choose_among(logits, chosen_by, VocabShard(columns), chosen_by.candidates)
    return found.peak


def _model_bytes(config: RoleConfig) -> int:
    """Returns bytes of the whole model in its compute dtype."""
    if config.engine.backend == "fsdp":
        return _gathered_bytes(config)
    dense, experts, _ = parameters_of(read_hf_config(config.model.path), "lm")
    return (dense + experts) * DTYPES[config.model.dtype].itemsize


def parameters_of(hf: Mapping[str, Any], head: str) -> tuple[int, int, int]:
    """Returns a model's dense parameters, those of its experts, and how many experts a layer has. hf: normalised."""
    shapes = expected_hf_names(family_for(hf), hf, head="value" if head == "value" else "lm")
    experts = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
    total = sum(math.prod(shape) for shape in shapes.values())
    return total - experts, experts, int(hf.get("num_experts") or 0) if experts else 0


def _cache_bytes(phase: Phase, plan: RolePlan, stage: int) -> int:
    """Returns bytes of keys and values, and of recurrent layers' states, in the layers of a stage, on one rank."""
    layers, linear = [n for chunk in plan.stages[stage].layers for n in chunk], meta.linear_layers(plan.config)
    recurrent = sum(layer in linear for layer in layers)
    found = phase.cache_tokens * (len(layers) - recurrent) * meta.cache_bytes(plan.config, plan.dims)
    if recurrent:
        found += min(_rows(phase, plan), phase.cache_tokens) * recurrent * meta.recurrent_bytes(plan.config, plan.dims)
    return found


def _rows(phase: Phase, plan: RolePlan) -> int:
    """Returns the sequences of a replica that samples."""
    return math.ceil(phase.sequences / (plan.dims.dp * plan.dims.cp))


# -- a part on backend fsdp: weights, gradients and moments, exactly ---------------------------------------------------


def sharded_figures(config: RoleConfig, dims: ParallelDims) -> RankFigures:
    """Returns what a rank holds; `chunks` is empty, as nothing is run.

    Weights that train are fp32, their own masters. A copy of the model lies on world_size / replicate ranks.
    """
    shapes, buffers = shapes_of(config)
    copies = config.engine.fsdp.replicate
    ranks = dims.world_size // copies
    trained = [shape for shape in shapes if shape.trains]
    elements = sum(shape.held(ranks) for shape in trained)
    frozen = sum(shape.held(ranks) * shape.itemsize for shape in shapes if not shape.trains)
    updated = tuple(sum(shape.updated(ranks, rank) for shape in trained) for rank in range(ranks)) * copies
    layers = tuple(range(read_hf_config(config.model.path).get("num_hidden_layers") or 1))
    return RankFigures(
        coords=dims.coordinates(0), parameters=frozen + 4 * elements, trained_parameters=elements, buffers=buffers,
        grad_buffers=(Buffer(False, ranks, elements, 4, updated),) if trained else (), chunks=(), layers=(layers,),
        dtype_bytes=DTYPES[config.model.dtype].itemsize,
    )  # fmt: skip


def _gathered_bytes(config: RoleConfig) -> int:
    """Returns bytes of the whole model in the dtypes that it computes in."""
    return sum(shape.held(1) * shape.gathered for shape in shapes_of(config)[0])


def _bytes_over_a_mini_batch(config: RoleConfig, dims: ParallelDims, gpu_memory: int) -> int:
    """Returns bytes of the weights that stay gathered over a mini-batch; 0 if blocks are gathered one at a time."""
    gathered, shards = _gathered_bytes(config), dims.world_size // config.engine.fsdp.replicate
    if config.engine.fsdp.defer_sync or precision.stays_gathered(gathered, shards, gpu_memory):
        return gathered
    return 0


def _trained_elements(config: RoleConfig) -> int:
    """Returns the elements of the whole model that train."""
    return sum(shape.held(1) for shape in shapes_of(config)[0] if shape.trains)
