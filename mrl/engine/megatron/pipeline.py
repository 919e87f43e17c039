"""Runs a mini-batch through megatron's pipeline schedules, micro-batch by micro-batch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mrl.batch import Batch
from mrl.config.schema import RoleConfig
from mrl.engine.base import Ctx, LossFn, PostprocessFn, Predictions, PreprocessFn
from mrl.engine.logprobs import VocabShard, log_probs_from_hidden, top_log_probs
from mrl.engine.megatron import inputs as model_inputs
from mrl.engine.megatron.scaling import megatron_loss, megatron_scale
from mrl.mcore_models import fp8, userbuffers
from mrl.mcore_models.head import MTPLayerInputs
from mrl.ops import devices
from mrl.parallel import Coordinates, ParallelDims


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """Holds the settings that all micro-batches of an engine share."""

    dims: ParallelDims
    coords: Coordinates
    packed: bool
    thd: bool
    head: str
    vocab_size: int
    mtp: int = 0  # MTP layers
    mtp_weight: float = 0.0  # of the mean of their losses
    detaches_mtp: bool = False  # the gradient of their losses stays within them
    multiple: int = 1  # a rank's positions are a multiple of it (mcore_models/fp8.py)
    places: int | None = None  # positions of every micro-batch, over all ranks, if all have the same (userbuffers.py)
    fixed: bool = False  # as of `PackedLayout.for_sequences`

    @classmethod
    def of(cls, model: Any, config: RoleConfig) -> PipelineConfig:
        """Returns the settings of a `Model`. config: the user's; the model's own may have other layers (meta.py)."""
        return cls(
            dims=model.dims, coords=model.coords, packed=config.packing, thd=model.spec == "te", head=config.head,
            vocab_size=model.hf["vocab_size"], mtp=model.mtp, mtp_weight=model.mtp_weight,
            detaches_mtp=model.detaches_mtp, multiple=fp8.multiple_of(config.engine.megatron),
            places=userbuffers.places_of(config.engine, model.dims),
            fixed=config.engine.micro_batch.pad and model.dims.cp == 1,
        )  # fmt: skip


@dataclasses.dataclass
class MicroBatch:
    """Holds one micro-batch with its own metadata."""

    data: Batch
    ctx: Ctx
    inputs: model_inputs.ModelInputs
    predictions: Predictions = dataclasses.field(default_factory=dict)  # filled on the last pipeline stage
    loss: Tensor | None = None  # likewise
    mtp_loss: Tensor | None = None  # likewise: the sum over tokens of the mean over MTP layers, without its weight


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Holds the loss settings of one `forward_backward_step`."""

    loss_fn: LossFn | None
    denominator: float
    share: float
    forward_only: bool
    postprocess_fn: PostprocessFn | None
    reduces: bool = False  # gradients are reduced while the last backward pass runs
    adds: bool = False  # adds to gradients of earlier calls
    tokens: float = 1.0  # training tokens of MTP layers in the global mini-batch: the denominator of their loss


def make_micro_batch(
    batch: Batch, ctx: Ctx, preprocess_fn: PreprocessFn | None, setup: PipelineConfig, *, trains: bool = True
) -> MicroBatch:
    """Does step one: makes the model's inputs. trains: without it MTP layers are left out.

    `ctx` is copied, so a hook's change for one micro-batch does not reach the next.
    """
    ctx = {**ctx, "metrics": {}}
    if preprocess_fn is not None and batch.num_sequences:
        batch, ctx = preprocess_fn(batch, ctx)
    device = devices.device()
    inputs = model_inputs.prepare(
        batch, setup.dims, setup.coords, packed=setup.packed, device=device, thd=setup.thd,
        mtp=setup.mtp if trains else 0, multiple=setup.multiple, places=setup.places,
        fillers=1 if setup.places is None else setup.vocab_size, fixed=setup.fixed,
    )  # fmt: skip
    return MicroBatch(batch.to(device), ctx, inputs)


def run(
    chunks: Sequence[Any], config: Any, micro_batches: Sequence[MicroBatch], setup: PipelineConfig, call: StepConfig
) -> None:
    """Runs the forward, and the backward unless `call.forward_only`. Fills the micro-batches' results on the last
    stage."""
    config.grad_scale_func = megatron_scale(call.share)  # scales router losses: see scaling.py
    forward_backward = get_forward_backward_func()
    iterators = [iter(micro_batches) for _ in chunks]
    no_sync = [chunk.no_sync for chunk in chunks if hasattr(chunk, "no_sync")]  # empty if nothing trains
    # The schedules leave no_sync_func before the last backward pass of each chunk (0.16.1 and 0.19.2,
    # schedules.enable_grad_sync), and DDP's hooks then reduce. A mini-batch may come in several calls, and only the
    # last may reduce. So other calls are inside no_sync as a whole.
    config.no_sync_func = (no_sync if len(no_sync) > 1 else no_sync[0]) if call.reduces else None
    with contextlib.ExitStack() as stack:
        for without_sync in [] if call.reduces else no_sync:
            stack.enter_context(without_sync())
        forward_backward(
            forward_step_func=functools.partial(_forward_step, setup=setup, call=call, count=len(micro_batches)),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micro_batches),
            # ignored: with variable_seq_lengths stages send their shapes (p2p_communication._communicate_shapes)
            seq_length=micro_batches[0].inputs.tokens.numel(),
            micro_batch_size=1,
            forward_only=call.forward_only,
        )


def _forward_step(
    iterator: Iterator[Any], chunk: Any, *, setup: PipelineConfig, call: StepConfig, count: int
) -> tuple[Tensor, Callable[..., Any]]:
    """Does step two: runs the model. Returns its output, and the loss function for megatron to call on the last
    stage."""
    micro_batch = next(iterator)
    model = chunk.module if hasattr(chunk, "module") else chunk
    while hasattr(model, "module"):
        model = model.module
    ins = micro_batch.inputs
    if call.adds:
        fp8.accumulate_gradients(chunk)
    if model.post_process and setup.head == "lm":
        model.output_layer.project = functools.partial(_log_probs, setup=setup, ins=ins, ctx=micro_batch.ctx)
        model.mtp_inputs = [
            MTPLayerInputs(
                of.tokens, of.padding, functools.partial(_mtp_log_probs, setup=setup, of=of, ctx=micro_batch.ctx)
            )
            for of in ins.mtp
        ]
    padding = ins.padding if model.config.num_moe_experts else None
    output = chunk(ins.tokens, ins.layout, padding)
    model.mtp_inputs = ()  # else the forward of sampling would run MTP layers on these
    return output, functools.partial(_loss, micro_batch, setup, call, count)


def _mtp_log_probs(
    hidden: Tensor, weight: Tensor, *, setup: PipelineConfig, of: model_inputs.MTPInputs, ctx: Ctx
) -> Tensor:
    """Returns [P/cp, 1] fp32: log-probs of an MTP layer's labels that train, 0 elsewhere."""
    if setup.detaches_mtp:
        weight = weight.detach()
    log_probs, _ = log_probs_from_hidden(
        hidden,
        weight,
        of.labels,
        shard=_shard(weight, setup),
        rows=of.trained,
        temperature=ctx["temperature"],
        entropy="none",
        reduce_hidden_grad=not setup.dims.sp,
    )
    return log_probs[:, None]


def _shard(weight: Tensor, setup: PipelineConfig) -> VocabShard:
    group = parallel_state.get_tensor_model_parallel_group()
    return VocabShard(setup.vocab_size, group.rank() * weight.shape[0], group if group.size() > 1 else None)


def _log_probs(
    hidden: Tensor, weight: Tensor, *, setup: PipelineConfig, ins: model_inputs.ModelInputs, ctx: Ctx
) -> Tensor:
    """Returns [P/cp, columns] fp32: log-probs of the labels that train, 0 elsewhere, and the ctx's other columns.

    `_named` splits the columns.
    """
    shard = _shard(weight, setup)
    mode = ctx.get("entropy", "none")
    log_probs, entropy = log_probs_from_hidden(
        hidden,
        weight,
        ins.labels,
        shard=shard,
        rows=ins.trained,
        temperature=ctx["temperature"],
        entropy=mode,
        reduce_hidden_grad=not setup.dims.sp,
        first_temperature=ctx.get("first_temperature"),
    )
    columns = [log_probs.view(len(log_probs), -1)] + ([] if entropy is None else [entropy[:, None]])
    if top := ctx.get("top", 0):
        largest, tokens = top_log_probs(
            hidden, weight, top, shard=shard, rows=ins.trained, temperature=ctx["temperature"]
        )
        columns += [largest, tokens.to(largest.dtype)]  # ids are exact in fp32 up to 2**24
    return torch.cat(columns, dim=-1)


def _named(columns: Tensor, data: Batch, ctx: Ctx) -> Predictions:
    """Splits the columns [T, ...] of `_log_probs` into predictions."""
    labels = 1 if data.labels.dim() == 1 else data.labels.shape[1]
    entropies, top = int(ctx.get("entropy", "none") != "none"), ctx.get("top", 0)
    of_labels, entropy, largest, tokens = columns.split([labels, entropies, top, top], dim=-1)
    predictions = {"log_probs": of_labels.reshape(data.labels.shape)}
    predictions |= {"entropy": entropy[:, 0]} if entropies else {}
    return predictions | ({"top_log_probs": largest, "top_tokens": tokens.to(torch.int64)} if top else {})


def _loss(
    micro_batch: MicroBatch, setup: PipelineConfig, call: StepConfig, count: int, output: Tensor
) -> tuple[Tensor, dict]:
    """Does step three: restores the order of outputs, calls the hook, and scales the loss for megatron (see
    scaling.py)."""
    cp_group = parallel_state.get_context_parallel_group()
    columns = model_inputs.restore(output[0], micro_batch.inputs, cp_group)
    is_lm, mtp = setup.head == "lm", micro_batch.inputs.mtp
    columns, of_mtp = columns[:, : columns.shape[1] - len(mtp)], columns[:, columns.shape[1] - len(mtp) :]
    predictions = _named(columns, micro_batch.data, micro_batch.ctx) if is_lm else {"values": columns[:, 0]}
    # An empty micro-batch needs a backward pass too: it has collectives (tp, cp, ep), and other ranks would wait.
    nothing = output.sum() * 0.0
    loss = nothing
    if micro_batch.data.num_sequences:
        if call.postprocess_fn is not None:
            predictions, micro_batch.ctx = call.postprocess_fn(micro_batch.data, predictions, micro_batch.ctx)
        if call.loss_fn is not None:
            loss, micro_batch.ctx = call.loss_fn(micro_batch.data, predictions, micro_batch.ctx)
            micro_batch.loss = loss.detach().double()
            loss = loss + nothing
    micro_batch.predictions = {name: value.detach() for name, value in predictions.items()}
    scaled_by = functools.partial(megatron_loss, micro_batches=count, dp=setup.dims.dp, share=call.share)
    scaled = scaled_by(loss, denominator=call.denominator)
    if mtp:
        mtp_loss = -(of_mtp * torch.stack([of.loss_mask for of in mtp], dim=1)).sum() / len(mtp)
        micro_batch.mtp_loss = mtp_loss.detach().double()
        scaled = scaled + scaled_by(mtp_loss * setup.mtp_weight, denominator=call.tokens)
    return scaled, {}


def sum_micro_batches(micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
    """Returns this rank's sums over its micro-batches: "loss" and each metric, as Python floats (fp64)."""
    sums: dict[str, float] = {}
    for mb in micro_batches:
        if mb.loss is not None:
            sums["loss"] = sums.get("loss", 0.0) + float(mb.loss)
        if mb.mtp_loss is not None:
            sums["mtp_loss"] = sums.get("mtp_loss", 0.0) + float(mb.mtp_loss)
        for name, value in mb.ctx.get("metrics", {}).items():
            sums["metrics/" + name] = sums.get("metrics/" + name, 0.0) + float(value)
    return sums


def broadcast_from_last_stage(
    payload: tuple[dict[str, float], Predictions] | None, device: torch.device
) -> tuple[dict[str, float], Predictions]:
    """Sends the last pipeline stage's results to every stage of the replica."""
    group = parallel_state.get_pipeline_model_parallel_group()
    source = dist.get_process_group_ranks(group)[-1]
    if group.size() == 1:
        assert payload is not None, "one stage is the last"
        return payload
    described: list[Any] = [None]
    if payload is not None:
        described = [(payload[0], [(name, tuple(t.shape), t.dtype) for name, t in payload[1].items()])]
    dist.broadcast_object_list(described, src=source, group=group)
    sums, shapes = described[0]
    predictions: Predictions = {}
    for name, shape, dtype in shapes:
        tensor = (
            payload[1][name].contiguous() if payload is not None else torch.empty(shape, dtype=dtype, device=device)
        )
        dist.broadcast(tensor, src=source, group=group)
        predictions[name] = tensor
    return sums, predictions
