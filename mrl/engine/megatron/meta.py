"""Measures one rank of a model in a layout: its memory, and the memory, arithmetic and traffic of a micro-batch.

The engine's own code runs on tensors without memory, and no other rank runs. The process says that it is rank `r` of a
world of any size, groups are made for this rank alone, and collectives do nothing. Models are built, wrapped and run as
on a GPU without transformer-engine (flash attention included). So the bytes of these operators' results are counted.
The memory of a running kernel is not seen, nor the allocator's gaps between tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from mrl import patches
from mrl.config.megatron_speed import CPU_OFFLOAD_FIELD, moment_bytes, state_bytes
from mrl.config.schema import ParallelConfig, RoleConfig
from mrl.engine.lora.folder import adapters
from mrl.engine.megatron.chunk_run import ChunkRun, DistillIds
from mrl.engine.megatron.meta_run import (
    BLOCK,
    CostCounter,
    EvenExperts,
    GPUKernelChoice,
    Traffic,
    keep_mode_in_backward,
    norms_of,
)
from mrl.kernels import operators
from mrl.mcore_models import cpu_stand_in, fp8, megatron_fields, userbuffers
from mrl.mcore_models.layer_spec import DTYPES, faster_locally, takes_te, wanted_spec
from mrl.mcore_models.te_limits import Gpu, disabled_switches, te_refusal
from mrl.ops import devices
from mrl.parallel import Coordinates, ParallelDims
from mrl.weights.accounting import num_mtp_layers
from mrl.weights.families import fields_of
from mrl.weights.hf_config import read_hf_config
from mrl.weights.rules import chunk_plans

Spec = Literal["te", "local"]
"""The spec of a model's layers: transformer-engine's, or megatron's own."""


@dataclasses.dataclass(frozen=True)
class ChunkFigures:
    """Holds the figures of one micro-batch in a model chunk. Bytes are above those that the rank holds anyway."""

    saved: int  # from the end of the forward to the backward pass, the chunk's input and output included
    forward_peak: int  # the most at once in the forward pass
    backward_peak: int  # the most at once in the backward pass, saved tensors included
    forward_flops: float  # of matrix products and attention, without recomputation
    backward_flops: float  # with recomputation
    forward_traffic: tuple[Traffic, ...]
    backward_traffic: tuple[Traffic, ...]
    sent: int  # bytes of hidden states for the next stage; their gradient has as many
    shared: int  # of megatron's buffer of gathered hidden states, one for all passes of a rank; in no figure above
    # Bytes of distillation, beside all of the above, because all micro-batches of a mini-batch have them at once:
    distill_inputs: int = 0  # ids and the teacher's log-probs, from before the first pass on
    distill_log_probs: int = 0  # log-probs of ids from its forward pass, until the last pass is done
    distill_joined: int = 0  # the joined log-probs of all micro-batches, after that


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Describes a buffer of gradients and parameters that the distributed optimizer divides over ranks."""

    of_experts: bool
    ranks: int  # how many divide it: dp * cp for dense parameters, edp for experts
    elements: int  # padding included
    parameter_bytes: int  # of an element
    masters: tuple[int, ...]  # elements that each of these ranks updates
    moments: int = 8  # bytes of both moments of an element
    on_host: bool = False  # masters and moments are
    of_muon: tuple[int, ...] = ()  # those of `masters` with only one moment; empty for none

    @property
    def optimizer_bytes(self) -> int:
        """Returns bytes of an element's master weight and both moments on the device."""
        return state_bytes(self.parameter_bytes, self.moments, on_host=self.on_host)

    def optimizer_bytes_on(self, rank: int) -> int:
        """Returns bytes of master weights and moments on one of the ranks that divide the buffer."""
        of_muon = self.of_muon[rank] if self.of_muon else 0
        return self.optimizer_bytes * self.masters[rank] - 4 * of_muon


@dataclasses.dataclass(frozen=True)
class RankFigures:
    """Holds the bytes of a model on one rank, and the figures of its chunks for a micro-batch."""

    coords: Coordinates
    parameters: int  # padding of the buffers included
    trained_parameters: int
    buffers: int  # tensors of the model that are no parameters, and transformer-engine's userbuffers
    grad_buffers: tuple[Buffer, ...]  # none if nothing trains
    chunks: tuple[ChunkFigures, ...]
    layers: tuple[tuple[int, ...], ...]  # of each chunk, by their numbers in the model
    dtype_bytes: int
    fp8_copies: int = 0  # bytes of weights in 8 bits, beside the parameters
    tied_gradient: int = 0  # bytes of the embedding's gradient that this stage sums with the other end's

    @property
    def gradients(self) -> int:
        """Returns bytes of gradients, which are in fp32."""
        return sum(4 * buffer.elements for buffer in self.grad_buffers)

    def optimizer(self, dense_rank: int, expert_rank: int) -> int:
        """Returns bytes of master weights and both moments on a rank, by its index among dp * cp and among edp."""
        return sum(b.optimizer_bytes_on(expert_rank if b.of_experts else dense_rank) for b in self.grad_buffers)

    @property
    def largest_optimizer(self) -> int:
        """Returns what `optimizer` does, for the rank of the stage with the most."""
        return sum(max(b.optimizer_bytes_on(rank) for rank in range(b.ranks)) for b in self.grad_buffers)


def prepare() -> None:
    """Makes this process plan: from now on its models have no memory. Call it before torch is used."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    devices.use_meta_device()
    cpu_stand_in.prepare()
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  its import makes the backend "fake" known


@contextlib.contextmanager
def as_rank(rank: int, dims: ParallelDims) -> Iterator[None]:
    """Makes this process `rank` of the layout's world inside. Only process groups with this rank are made."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mrl.engine.megatron import groups

    new_group = dist.new_group

    def group_of(ranks: Any = None, *_: Any, **__: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return new_group(ranks, backend="fake")

    def mine(world_size: int, sizes: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
        group = own_group(rank, sizes, mask)
        # initialize_model_parallel joins the "tp-ep-pp" groups of all replicas of an expert into one and counts them
        # (0.16.1 and 0.19.2, intra_dist_opt_ranks). So it must get as many groups as there are replicas.
        return [group] + [[]] * (world_size // len(group) - 1) * (sum(mask) > 2)

    def gather_objects(out: list, value: Any, group: Any = None) -> None:
        out[:] = [value] * len(out)  # all ranks would give the same

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=dims.world_size)
    replacements = {
        "torch.distributed:new_group": group_of,
        "torch.distributed.distributed_c10d:new_group": group_of,
        "torch.distributed:all_gather_object": gather_objects,
        "torch.distributed.distributed_c10d:all_gather_object": gather_objects,
        "megatron.core.parallel_state:generate_masked_orthogonal_rank_groups": mine,
    }
    try:
        with patches.replaced(replacements):
            groups.forget_groups()
            yield
    finally:
        groups.forget_groups()
        dist.destroy_process_group()


def own_group(rank: int, sizes: Sequence[int], mask: Sequence[bool]) -> list[int]:
    """Returns the ranks that differ from `rank` only on the masked axes; the first axis is the fastest.

    megatron lists all groups of a world and then looks for its own. For ten thousand ranks this takes seconds.
    """
    strides = [math.prod(sizes[:i]) for i in range(len(sizes))]
    base = sum((rank // stride % size) * stride for stride, size, of_group in zip(strides, sizes, mask, strict=True)
               if not of_group)  # fmt: skip
    # parallel_state has pipeline stages outermost; axes beyond the sizes keep the rank's own index
    base += rank // math.prod(sizes) * math.prod(sizes)
    axes = [(stride, size) for stride, size, of_group in zip(strides, sizes, mask, strict=True) if of_group]
    steps = [[i * stride for i in range(size)] for stride, size in axes]
    return sorted(base + sum(places) for places in itertools.product(*steps))


def measure(
    config: RoleConfig, dims: ParallelDims, rank: int, lengths: Sequence[int], *, spec: Spec = "local",
    entropy: str = "none", known: dict[tuple, ChunkFigures] | None = None, ids: DistillIds | None = None,
    kernels: bool = False,
) -> RankFigures:  # fmt: skip
    """Returns the figures of `rank`, with those of a micro-batch of sequences of these lengths if there are any.

    config: as an engine gets it. Only config.json is read. spec: the layers that keep activations. transformer-engine's
    are the local ones with its norms. These keep their input and a number a row. known: figures of chunks, not to be
    measured again; those of this rank are added. ids: of distillation. kernels: whether mrl's own run (mrl.kernels).
    """
    from mrl.engine.megatron import weights
    from mrl.engine.megatron.model import Model

    megatron_options = {
        k: v for k, v in config.engine.megatron.items() if k not in megatron_fields.TRANSFORMER_ENGINE_FIELDS
    }
    engine = dataclasses.replace(config.engine, layer_spec="local", megatron=megatron_options)
    with as_rank(rank, dims), norms_of(spec), operators.planned(kernels):
        model = Model(dataclasses.replace(config, engine=engine), dims)
        model.transformer.perform_initialization = False
        with model.state.installed():
            model.build()
            chunks = model.chunks
            model.transformer.layer_spec = spec  # te's attention turns heads itself (layers.Rotary)
            plans = weights.plans_here(model.hf, dims, model.coords, mtp=model.mtp)
            trained = config.optimizer is not None
            found = []
            if lengths:
                run = _MeasuredRun(config, model, lengths, entropy, ids)
                known = {} if known is None else known
                keys = _keys_of_chunks(config, dims, model.coords.pp_rank, (*lengths, spec, kernels, entropy, ids))
                for chunk, of, plan, key in zip(model.wrapped, chunks, plans, keys, strict=True):
                    if key not in known:
                        known[key] = run.measure(chunk, of, plan)
                    found.append(known[key])
            parameters = [p for chunk in chunks for p in chunk.parameters()]
            in_buffers = _buffers(config, model) if trained else []
            frozen = sum(p.numel() * p.element_size() for p in parameters if not (trained and p.requires_grad))
            return RankFigures(
                fp8_copies=_fp8_copies(config, model, chunks, plans),
                coords=model.coords,
                parameters=frozen + sum(b.elements * b.parameter_bytes for b in in_buffers),
                trained_parameters=sum(p.numel() for p in parameters if trained and p.requires_grad),
                buffers=_buffer_bytes(config, model, chunks) + _placeholder_bytes(config, model, chunks, spec),
                grad_buffers=tuple(in_buffers), chunks=tuple(found), layers=tuple(tuple(p.layers) for p in plans),
                dtype_bytes=model.dtype.itemsize, tied_gradient=_tied_gradient(chunks, dims) if trained else 0,
            )  # fmt: skip


def _fp8_copies(config: RoleConfig, model: Any, chunks: Sequence[Any], plans: Sequence[Any]) -> int:
    """Returns bytes of 8-bit copies of the matrices of layers, adapters excluded."""
    matrices = [
        (f".{name}", number, parameter.numel())
        for chunk, plan in zip(chunks, plans, strict=True)
        for layer, number in zip(chunk.decoder.layers, plan.layers, strict=True)
        for name, parameter in layer.named_parameters()
        if parameter.dim() == 2 and ".adapter." not in name
    ]
    layers, trains = model.transformer.num_layers, config.optimizer is not None
    return fp8.copies_bytes(config.engine.megatron, matrices, layers, trains=trains)


def _buffer_bytes(config: RoleConfig, model: Any, chunks: Sequence[Any]) -> int:
    own = sum(b.numel() * b.element_size() for chunk in chunks for b in chunk.buffers())
    wanted = userbuffers.BufferShape.of(config.engine, model.transformer.hidden_size, model.dims)
    return own + (0 if wanted is None else wanted.nbytes)


def _placeholder_bytes(config: RoleConfig, model: Any, chunks: Sequence[Any], spec: Spec) -> int:
    """Returns bytes of what transformer-engine's layers return as gradients of weights.

    They add the gradients themselves to megatron's fp32 ones. For autograd they keep an empty tensor for each shape of
    weights (2.20.2, module/base.py `get_dummy_wgrad`).
    """
    fused = config.engine.megatron.get("gradient_accumulation_fusion", "activations" not in config.engine.offload)
    if spec != "te" or not fused:
        return 0
    layers = [parameter for chunk in chunks for name, parameter in chunk.decoder.named_parameters()
              if parameter.requires_grad and parameter.dim() > 1 and ".adapter." not in name]  # fmt: skip
    return sum(math.prod(shape) for shape in {one.shape[-2:] for one in layers}) * model.dtype.itemsize


def _keys_of_chunks(config: RoleConfig, dims: ParallelDims, stage: int, more: tuple) -> list[tuple]:
    """Returns a key of each chunk of a stage; chunks with one key have the same figures.

    The number of stages and chunks is not in it, because a chunk's passes are those of its own layers. Nor is
    recomputation if nothing is kept for a backward pass.
    """
    trains = config.optimizer is not None
    engine = dataclasses.replace(config.engine, parallel=ParallelConfig())
    if not trains:
        engine = dataclasses.replace(engine, recompute="none", recompute_modules=None)
    same = dataclasses.replace(config, engine=engine, optimizer=None)
    layout = (dims.world_size, dims.tp, dims.cp, dims.ep, dims.etp, dims.sp)
    return [(repr(same), trains, layout, more, chunk) for chunk in kinds_of_stages(config, dims)[stage].same]


def _tied_gradient(chunks: Sequence[Any], dims: ParallelDims) -> int:
    """Returns bytes of the fp32 gradient of an embedding that is also the last stage's output layer."""
    ends = [c for c in chunks if (c.share_embeddings_and_output_weights or c.config.mtp_num_layers) and dims.pp > 1]
    ends = [chunk for chunk in ends if chunk.pre_process or chunk.post_process]
    return sum(4 * chunk.shared_embedding_or_output_weight().numel() for chunk in ends)


def layer_spec_on_gpus(config: RoleConfig, dims: ParallelDims, capability: tuple[int, int] | None) -> Spec:
    """Returns the layer spec of a run on GPUs with transformer-engine, and with the flash-attn and cuDNN that it takes.

    capability: the GPUs'; None if it is not known, and any generation may do.
    """
    fields, dtype = _fields(config), DTYPES[config.model.dtype]
    gpu = Gpu(capability, switched_off=disabled_switches(config.engine.attention))
    wanted = wanted_spec(config.engine.layer_spec, config.engine.attention)
    if wanted == "auto":
        faster = faster_locally(config.engine, fields, dims, dtype, lora=config.model.lora is not None)
        return "te" if takes_te(fields, dims, gpu, dtype=dtype, faster=faster) else "local"
    return "local" if wanted == "local" or te_refusal(fields, dims, gpu, dtype=dtype) is not None else "te"


def _fields(config: RoleConfig) -> dict[str, Any]:
    return fields_of(dict(read_hf_config(config.model.path)))


def _buffers(config: RoleConfig, model: Any) -> list[Buffer]:
    """Describes megatron's buffers, with the elements of each on every rank."""
    from mrl.engine.megatron import muon, optim

    assert config.optimizer is not None
    matrices = model.matrices() if config.optimizer.name == "muon" else {}
    options, described = config.engine.megatron, []
    for buffer in optim.gradient_buffers(model.wrapped):
        ranks = buffer.data_parallel_group.size()
        masters, of_muon = [0] * ranks, [0] * ranks
        for parameter, ranges in muon.ranges_of_ranks(buffer):
            for rank, (start, end) in ranges.items():
                masters[rank] += end - start
                if id(parameter) in matrices:
                    of_muon[rank] += end - start
        first = next(iter(buffer.param_index_map))
        described.append(Buffer(
            of_experts=not getattr(first, "allreduce", True), ranks=ranks, elements=buffer.grad_data.numel(),
            parameter_bytes=buffer.param_dtype.itemsize, masters=tuple(masters), moments=moment_bytes(options),
            on_host=bool(options.get(CPU_OFFLOAD_FIELD)), of_muon=tuple(of_muon) if matrices else (),
        ))  # fmt: skip
    return described


class _MeasuredRun(ChunkRun):
    """Measures one micro-batch in chunks of a model."""

    def measure(self, chunk: Any, inner: Any, plan: Any) -> ChunkFigures:
        from megatron.core import parallel_state

        buffers = parallel_state.get_global_memory_buffer().buffer
        buffers.clear()  # GlobalMemoryBuffer keeps the first pass's buffer for all others, so it is counted apart

        def shared() -> int:
            return sum(-(-buffer.nbytes // BLOCK) * BLOCK for buffer in buffers.values())

        experts = EvenExperts(lambda values: torch.tensor(values, device="cpu"), waited=lambda _: None)
        undo = experts.install()
        chunk.train(self.trains)
        grad = contextlib.nullcontext() if self.trains else torch.no_grad()
        try:
            with grad, GPUKernelChoice(experts), CostCounter(_kinds_of_groups()) as watch:
                micro_batch = self.micro_batch()
                given = 0 if self.ids is None else self.ids.add_to_inputs(micro_batch)
                begun = watch.alive
                output = self.forward(micro_batch, chunk, inner, self.hidden(micro_batch, inner))
                kept = begun + shared()
                saved, forward_peak, forward = watch.alive - kept, watch.peak - kept, watch.take_counts()
                sent = 0 if plan.has_output else output.nbytes
                distilled = () if self.ids is None else (given, *self.ids.kept(micro_batch))
                backward: tuple[float, tuple[Traffic, ...]] = (0.0, ())
                backward_peak = 0
                if self.trains:
                    watch.peak = watch.alive
                    with keep_mode_in_backward(experts):
                        torch.autograd.backward(output, None if plan.has_output else torch.empty_like(output))
                    backward = watch.take_counts()
                    backward_peak = watch.peak - begun - shared()
                return ChunkFigures(
                    saved, forward_peak, backward_peak, forward[0], backward[0], forward[1], backward[1], sent,
                    shared(), *distilled,
                )  # fmt: skip
        finally:
            undo()


def _kinds_of_groups() -> dict[str, str]:
    """Returns the kind of each of this rank's process groups, by its name. Groups with the same ranks have different
    names."""
    from megatron.core import parallel_state as state

    asked = {
        "tp": state.get_tensor_model_parallel_group, "cp": state.get_context_parallel_group,
        "pp": state.get_pipeline_model_parallel_group, "ep": state.get_expert_model_parallel_group,
        "etp": state.get_expert_tensor_parallel_group,
        "etp*ep": state.get_expert_tensor_and_model_parallel_group,
        "tp*cp": state.get_tensor_and_context_parallel_group,
    }  # fmt: skip
    return {group().group_name: kind for kind, group in asked.items()}


@dataclasses.dataclass(frozen=True)
class StageKind:
    """Describes a pipeline stage by its layers."""

    layers: tuple[tuple[int, ...], ...]  # of each chunk, by their numbers in the model
    same: tuple  # equal for stages that hold and compute the same


def kinds_of_stages(config: RoleConfig, dims: ParallelDims) -> list[StageKind]:
    """Returns the stages of a layout, from the first to the last."""
    hf = read_hf_config(config.model.path)
    fields = fields_of(dict(hf))
    experts = fields.get("moe_layer_freq") if "num_moe_experts" in fields else None
    windows, linear = fields.get("window_attn_skip_freq"), fields.get("linear_attention_freq")
    plans = chunk_plans(hf["num_hidden_layers"], dims.pp, dims.vpp, 0 if config.mtp is None else num_mtp_layers(hf))
    adapted = _adapted_modules(config)

    def kind(layer: int) -> tuple:
        of_experts = experts[layer] if isinstance(experts, list) else experts
        of_attention = (windows[layer] if windows else None, linear[layer] if linear else None)
        return (of_experts, of_attention, adapted.get(layer))

    found = []
    for stage in range(dims.pp):
        chunks = [plans[stage, v] for v in range(dims.vpp)]
        same = tuple((c.has_embedding, c.has_output, c.mtp, tuple(map(kind, c.layers))) for c in chunks)
        found.append(StageKind(tuple(tuple(c.layers) for c in chunks), same))
    return found


def _adapted_modules(config: RoleConfig) -> dict[int, tuple]:
    """Returns layer -> its modules with adapters, and their shapes; a selection may name layers."""
    if config.model.lora is None:
        return {}
    found: dict[int, list] = {}
    for name, shape in adapters(config.model.path, config.model.lora, config.head).items():
        number = re.search(r"\.layers\.(\d+)\.(.*)", name)
        if number is not None:
            size = (shape.in_features, shape.out_features, shape.rank, shape.experts)
            found.setdefault(int(number[1]), []).append((number[2], *size))
    return {layer: tuple(sorted(modules)) for layer, modules in found.items()}


def cache_bytes(config: RoleConfig, dims: ParallelDims) -> int:
    """Returns bytes of one token's keys and values in one layer, on one rank (mrl.ops.kv_cache)."""
    fields = _fields(config)
    item = DTYPES[config.model.dtype].itemsize
    if "kv_lora_rank" in fields:
        heads = fields["num_attention_heads"] // dims.tp
        return heads * (fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"] + fields["v_head_dim"]) * item
    return max(1, fields["num_query_groups"] // dims.tp) * 2 * fields["kv_channels"] * item


def recurrent_bytes(config: RoleConfig, dims: ParallelDims) -> int:
    """Returns bytes of one sequence's two states in a layer with a gated delta net, on one rank (mrl.ops.kv_cache)."""
    fields = _fields(config)
    heads, values = fields["linear_num_key_heads"] // dims.tp, fields["linear_num_value_heads"] // dims.tp
    key, value = fields["linear_key_head_dim"], fields["linear_value_head_dim"]
    channels = 2 * heads * key + values * value
    convolution = channels * (fields["linear_conv_kernel_dim"] - 1) * DTYPES[config.model.dtype].itemsize
    return convolution + 4 * values * key * value


def linear_layers(config: RoleConfig) -> frozenset[int]:
    """Returns the layers with a gated delta net, which keep states in place of keys and values."""
    freq = _fields(config).get("linear_attention_freq") or ()
    return frozenset(layer for layer, linear in enumerate(freq) if linear)
