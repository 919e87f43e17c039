"""Wraps models in DDP, builds the distributed optimizer and runs its steps, on megatron-core."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import Adam, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, l2_norm_impl
from megatron.core.transformer.transformer_config import TransformerConfig

from mrl import patches
from mrl.config.megatron_speed import CPU_OFFLOAD_FIELD, MOMENTS, PRECISION_AWARE
from mrl.config.schema import OptimizerConfig
from mrl.engine.base import GradNorm
from mrl.engine.megatron.muon import MOMENTUM, Muon
from mrl.engine.megatron.rounded_adam import HostAdamW, RoundedAdamW
from mrl.engine.trained_state import UpdateSettings
from mrl.mcore_models import grouped, layer_spec, megatron_fields
from mrl.mcore_models.build import Model
from mrl.mcore_models.lora import sum_over_experts_tp
from mrl.ops import devices
from mrl.weights.rules import Rule

patches.check(__name__)

PRECISION = (PRECISION_AWARE, *MOMENTS.values())


def wrap(
    models: Sequence[Model], config: TransformerConfig, megatron_options: Mapping[str, Any]
) -> list[DistributedDataParallel]:
    """Wraps models in DDP with fp32 gradient buffers. megatron_options: `engine.megatron`.

    The buffers are reduced once: when `reduce_gradients` is called, or from the last backward pass before it
    (`overlap_grad_reduce`).

    megatron reduces experts over their own replicas if ep is above 1, else over the dense replicas. If etp differs from
    tp, these hold other shards of an expert, or not all of its replicas. So every expert is marked here.
    """
    if config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
        for model in models:
            for name, parameter in model.named_parameters():
                if ".experts." in name:
                    parameter.allreduce = False
    # By default megatron sums gradients in the parameters' dtype (DistributedDataParallelConfig.grad_reduce_in_fp32 is
    # false in 0.16.1 and 0.19.2). In bf16 a sum of many micro-batches loses the later ones.
    given = megatron_fields.fields_of_kind(megatron_options, "ddp")
    # on a CPU gloo and the backward pass share the cores, so overlap gains nothing
    overlaps = devices.has_gpu() and parallel_state.get_data_parallel_group(with_context_parallel=True).size() > 1
    chosen = {
        "grad_reduce_in_fp32": True, "use_distributed_optimizer": True, "overlap_grad_reduce": overlaps,
        "overlap_param_gather": overlaps,
    } | given  # fmt: skip
    try:
        ddp = DistributedDataParallelConfig(**chosen)
    except (AssertionError, ValueError) as error:
        raise megatron_fields.megatron_refusal(given, error) from error
    # 0.19.2 warns that no full_param_layout was given, and then computes the same layout itself
    # (DistributedDataParallel.__init__)
    logging.getLogger(DistributedDataParallel.__module__).addFilter(_has_no_advice)
    # Chunks after the first have one bucket, as in Megatron-LM: with the interleaved schedule their reduction overlaps
    # with computation anyway.
    return [_wrapped(config, ddp, model, disable_bucketing=i > 0) for i, model in enumerate(models)]


def _wrapped(
    config: TransformerConfig, options: DistributedDataParallelConfig, model: Model, *, disable_bucketing: bool
) -> DistributedDataParallel:
    """Wraps a model, with the weights of grouped experts one after the other in the buffers."""
    order = grouped.in_buffer_order(model)
    model.named_parameters = lambda *_, **__: iter(order)  # type: ignore[method-assign]
    try:
        ddp = DistributedDataParallel(config, options, model, disable_bucketing=disable_bucketing)
    finally:
        del model.named_parameters
    for weights in grouped.weights_of(model):
        weights.join(ddp)
    return ddp


def _has_no_advice(record: logging.LogRecord) -> bool:
    return "full_param_layout not provided" not in record.getMessage()


def build_optimizer(
    config: OptimizerConfig,
    chunks: Sequence[DistributedDataParallel],
    dtype: torch.dtype,
    megatron_options: Mapping[str, Any],
    matrices: Mapping[int, Rule],
) -> MegatronOptimizer:
    """Builds AdamW over this rank's shard of the parameters, with fp32 masters and no decay of biases and norms.

    If the config says so, Muon updates matrices of layers. megatron_options: `engine.megatron`. matrices: their rules,
    by the id of the parameter.
    """
    given = megatron_fields.fields_of_kind(megatron_options, "optimizer")
    on_host = given.pop(CPU_OFFLOAD_FIELD, False)
    dtypes = {name: given.get(field, torch.float32) for name, field in MOMENTS.items()}
    # With use_precision_aware_optimizer megatron passes the moments' dtypes to the optimizer (0.16.1 and 0.19.2,
    # optimizer/__init__). Only transformer-engine's FusedAdam takes them; apex's and torch's have fp32 moments alone.
    if on_host or not _is_transformer_engines():
        given = {k: v for k, v in given.items() if k not in PRECISION}
    try:
        settings = MegatronOptimizerConfig(
            optimizer="adam", lr=config.lr, min_lr=config.min_lr, weight_decay=config.weight_decay,
            adam_beta1=config.betas[0], adam_beta2=config.betas[1], adam_eps=config.eps, clip_grad=config.clip_grad,
            bf16=dtype == torch.bfloat16, params_dtype=dtype, use_distributed_optimizer=True, **given,
        )  # fmt: skip
    except (AssertionError, ValueError) as error:
        if not given:
            raise
        raise megatron_fields.megatron_refusal(given, error) from error
    # OptimizerConfig.__post_init__ derives this field (0.16.1 and 0.19.2). If it is true, DistributedOptimizer makes no
    # fp32 masters and gives gradients as `decoupled_grad`, as HostAdamW needs. Otherwise it must be false: `_shards`
    # reads megatron's masters (shard_fp32_from_float16_groups), and FusedAdam would hold its own.
    settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = on_host
    optimizer = get_megatron_optimizer(settings, list(chunks))
    for part in optimizers_of(optimizer):
        if on_host:
            part.optimizer = HostAdamW.from_adam(part.optimizer, dtypes)
        elif set(dtypes.values()) != {torch.float32} and not _is_transformer_engines():  # torch or apex
            part.optimizer = RoundedAdamW.from_adam(part.optimizer, dtypes)
        if not on_host:
            part._copy_main_params_to_model_params = functools.partial(_copy_masters, part)
        part.config.exp_avg_dtype, part.config.exp_avg_sq_dtype = dtypes["exp_avg"], dtypes["exp_avg_sq"]
        for group in part.param_groups:
            if isinstance(part.optimizer, torch.optim.AdamW):
                group["fused"] = True  # one pass over memory; torch's default (foreach) copies whole lists of tensors
    if config.name == "muon":
        steps_in = dtype if config.muon.dtype == "auto" else layer_spec.DTYPES[config.muon.dtype]
        mains = {id(parameter): main for _, parameter, main, _ in shards(optimizer)}
        for part in optimizers_of(optimizer):
            if part.buffers:  # get_megatron_optimizer makes an expert optimizer even for a stage without experts
                part.optimizer = Muon.from_optimizer(part, matrices, mains, config.muon, steps_in)
    return optimizer


def _copy_masters(part: MegatronOptimizer) -> None:
    """Copies the masters of 16-bit parameters to these, in one operation. fp32 parameters are their own masters."""
    shards = list(itertools.chain(*part.shard_float16_groups))
    if shards:
        torch._foreach_copy_(shards, list(itertools.chain(*part.shard_fp32_from_float16_groups)))


def moments(part: MegatronOptimizer, main: torch.Tensor, *, make: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name and tensor of each moment of a master; zeros before the first update.

    make: the optimizer gets the zeros, so that they can be read into.
    """
    is_matrix = isinstance(part.optimizer, Muon) and part.optimizer.updates_master(main)
    held = part.optimizer.state[main] if make else part.optimizer.state.get(main, {})
    for name in (MOMENTUM,) if is_matrix else MOMENTS:
        moment = held.get(name)
        if moment is None:
            moment = torch.zeros_like(main, dtype=getattr(part.config, f"{name}_dtype", torch.float32))
            if make:
                held[name] = moment
        yield name, moment


def _is_transformer_engines() -> bool:
    return Adam.__module__.startswith("transformer_engine")


def implementations() -> dict[str, str]:
    """Returns the functions that compute AdamW and gradient norms.

    At import megatron-core takes them from transformer-engine, else from apex, else from torch and itself.
    """
    return {
        "optimizer": f"{Adam.__module__}.{Adam.__qualname__}",
        "norm": f"{getattr(l2_norm_impl, '__module__', None) or 'C++'}.{l2_norm_impl.__name__}",
    }


def reduce_gradients(chunks: Sequence[DistributedDataParallel]) -> None:
    """Sums accumulated gradients over data-parallel ranks, sequence-parallel norms, and copies of tied embeddings.

    Call it once per optimizer step. A reduced buffer holds sums in this rank's shard and parts elsewhere. Reducing it
    again, or accumulating on top, would count ranks twice.
    """
    sum_over_experts_tp(chunks)
    for group in bucket_groups(chunks):
        # With overlap_grad_reduce finish_grad_sync asserts that a backward pass has started the reduction (0.16.1 and
        # 0.19.2, param_and_grad_buffer). A backward pass inside `no_sync` starts none, so it starts here. In the first
        # batch finish_grad_sync starts it itself.
        if group.ddp_config.overlap_grad_reduce and not group.is_first_batch and group.grad_reduce_handle is None:
            group.start_grad_sync()
    finalize_model_grads(list(chunks))


def bucket_groups(chunks: Sequence[DistributedDataParallel]) -> Iterator[Any]:
    """Yields megatron's groups of buckets, in which gradients are reduced and parameters gathered; dense ones first."""
    for chunk in chunks:
        yield from (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)


def gathers_in_forward(chunks: Sequence[Any]) -> bool:
    """Returns whether an update leaves parameters to be gathered by the next forward (`overlap_param_gather`)."""
    return isinstance(chunks[0], DistributedDataParallel) and chunks[0].ddp_config.overlap_param_gather


def gather_in_forward(chunks: Sequence[DistributedDataParallel]) -> None:
    """Makes the next forward gather the parameters after an update, module by module.

    This holds also if they were gathered between the last update and this one.
    """
    for group in bucket_groups(chunks):
        group.param_gather_dispatched = False


def finish_gathers(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gathers the parameters that a gathering forward has not used."""
    for group in bucket_groups(chunks):
        group.finish_param_sync(skip_next_bucket_dispatch=True)


def optimizers_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Returns the dense and the expert optimizer, as far as they train something on this rank."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def step(optimizer: MegatronOptimizer, update: UpdateSettings, detached: Collection[int] | None = None) -> GradNorm:
    """Makes one update from reduced gradients.

    1. Give the gradients of this rank's shards to the fp32 master weights.
    2. Compute the global L2 norm, each parameter counted once.
    3. If it is not finite, leave everything as it is and say so.
    4. Scale the gradients down to `update.clip_grad`.
    5. Run AdamW, or Muon with it, on the shards, then gather the parameters.

    detached: ids of this rank's parameters that have a loss of their own (MTP layers). Their norm and clipping are
    apart, so the update of all others is the same as without them. The returned norm is that of the others. None on
    every rank if there are none.
    """
    _set_hyperparameters(optimizer, update)
    with torch.no_grad():
        optimizer.prepare_grads()
        apart = {id(shard) for _, parameter, shard, _ in _shards(optimizer) if id(parameter) in (detached or ())}
        norm, own = _norm_without(optimizer, lambda shard: id(shard) in apart), 0.0
        if not math.isfinite(norm):
            return GradNorm(norm, skipped=f"the gradient norm is {norm}")
        if detached is not None:
            own = _norm_without(optimizer, lambda shard: id(shard) not in apart)
            if not math.isfinite(own):
                return GradNorm(norm, skipped=f"the gradient norm of the MTP layers is {own}")
        for part in optimizers_of(optimizer):
            on_host = isinstance(part.optimizer, HostAdamW)
            for total, is_apart in ((norm, False), (own, True)):
                parameters = [shard for shard in part.get_parameters() if (id(shard) in apart) == is_apart]
                if update.clip_grad > 0 and parameters:
                    clip_grad_by_total_norm_fp32(
                        parameters, max_norm=update.clip_grad, total_norm=total, use_decoupled_grad=on_host
                    )
        optimizer.step_with_ready_grads()
    return GradNorm(norm)


def _norm_without(optimizer: MegatronOptimizer, leaves_out: Callable[[torch.Tensor], bool]) -> float:
    """Returns the global L2 norm of the gradients of all shards but some. Collective.

    The others are marked as copies meanwhile, because megatron does not count copies (`param_is_not_shared`). 0.19 has
    norms of groups, 0.16 does not.
    """
    every = (shard for part in optimizers_of(optimizer) for shard in part.get_parameters())
    marked = [(shard, getattr(shard, "shared", False)) for shard in every if leaves_out(shard)]
    try:
        for shard, _ in marked:
            shard.shared = True
        return float(optimizer.get_grad_norm())
    finally:
        for shard, before in marked:
            shard.shared = before


def _set_hyperparameters(optimizer: MegatronOptimizer, update: UpdateSettings) -> None:
    """Sets the settings of an update in every group.

    Megatron marks groups without decay with a factor of 0. Only its own scheduler applies that, so it is applied here.
    """
    for part in optimizers_of(optimizer):
        for group in part.param_groups:
            group.update(lr=update.lr, betas=update.betas, eps=update.eps)
            group["weight_decay"] = update.weight_decay * group["wd_mult"]


Shard = tuple[MegatronOptimizer, torch.nn.Parameter, torch.Tensor, slice]


def shards(optimizer: MegatronOptimizer) -> Iterator[Shard]:
    """Yields every parameter of which this data-parallel rank updates a part.

    Each is (dense or expert optimizer, model parameter, its masters here, their slice of the flat parameter).
    """
    for part, parameter, main, span in _shards(optimizer):
        host = part.optimizer if isinstance(part.optimizer, HostAdamW) else None
        yield part, parameter, main if host is None else host.masters[main], span


def _shards(optimizer: MegatronOptimizer) -> Iterator[Shard]:
    """Yields what `shards` does, with the tensors that the optimizer updates; their masters may be on the host."""
    for part in optimizers_of(optimizer):
        host = part.optimizer if isinstance(part.optimizer, HostAdamW) else None
        float16_mains = part.shard_fp32_from_float16_groups if host is None else part.shard_float16_groups
        for model_groups, main_groups in (
            (part.model_float16_groups, float16_mains),
            (part.model_fp32_groups, part.shard_fp32_groups),
        ):
            for parameters, mains in zip(model_groups, main_groups, strict=True):
                for parameter, main in zip(parameters, mains, strict=True):
                    span = part._get_model_param_range_map(parameter)["param"]
                    yield part, parameter, main, slice(span.start, span.end)


def gradient_buffers(chunks: Sequence[DistributedDataParallel]) -> Iterator:
    """Yields every gradient buffer of this rank, dense ones first."""
    for chunk in chunks:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def gather_gradients(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gathers the shards after `reduce_gradients`, so that `main_grad` of every parameter is the reduced sum."""
    for buffer in gradient_buffers(chunks):
        group = buffer.data_parallel_group
        if group.size() == 1:
            continue
        for bucket in buffer.buckets:
            shard = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


def offload_tensors(
    models: Sequence[Model], chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer | None
) -> dict[str, Callable[[], Iterable[torch.Tensor]]]:
    """Returns the tensors of each kind of state, for `engine.offload`."""
    return {
        "parameters": lambda: (p.data for model in models for p in model.parameters()),
        "gradients": lambda: () if optimizer is None else (b.grad_data for b in gradient_buffers(chunks)),
        "optimizer": lambda: () if optimizer is None else _state_tensors(optimizer),
    }


def _state_tensors(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Yields master weights and moments of this rank's shards."""
    for part in optimizers_of(optimizer):
        if isinstance(part.optimizer, HostAdamW):
            continue  # its state is always on the host
        for group in part.optimizer.param_groups:
            yield from (p.data for p in group["params"])
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())
