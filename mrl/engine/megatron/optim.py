"""DDP, the distributed optimizer, and the phases of an optimizer step, on megatron-core."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.transformer_config import TransformerConfig

from mrl.config.schema import OptimizerConfig
from mrl.engine.base import GradNorm
from mrl.mcore_models.build import Model

# megatron's own names for what becomes of a chunk's gradients
BUFFERS = ("buffers", "expert_parallel_buffers")


def wrap(models: Sequence[Model], config: TransformerConfig) -> list[DistributedDataParallel]:
    """DDP with fp32 gradient buffers that are reduced once, when `reduce_gradients` is called."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True
    )
    return [DistributedDataParallel(config, ddp, model, disable_bucketing=i > 0) for i, model in enumerate(models)]


def build_optimizer(
    config: OptimizerConfig, chunks: Sequence[DistributedDataParallel], dtype: torch.dtype
) -> MegatronOptimizer:
    """AdamW over this rank's shard of the parameters, with fp32 master weights; no decay of biases and norms.

    megatron marks groups that do not decay with a factor of 0, which only its own scheduler applies: it is applied here.
    """
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam", lr=config.lr, min_lr=config.min_lr, weight_decay=config.weight_decay, adam_beta1=config.betas[0],
            adam_beta2=config.betas[1], adam_eps=config.eps, clip_grad=config.clip_grad, bf16=dtype == torch.bfloat16,
            params_dtype=dtype, use_distributed_optimizer=True,
        ),
        list(chunks),
    )  # fmt: skip
    for part in optimizers_of(optimizer):
        for group in part.param_groups:
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return optimizer


def reduce_gradients(chunks: Sequence[DistributedDataParallel]) -> None:
    """Sums accumulated gradients over data-parallel ranks, sequence-parallel norms, and copies of tied embeddings.

    Once per optimizer step: a reduced buffer holds sums in this rank's shard and parts elsewhere, so reducing it
    again, or accumulating on top, would count ranks twice.
    """
    finalize_model_grads(list(chunks))


def optimizers_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The dense and the expert optimizer (or the only one)."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def step(optimizer: MegatronOptimizer, clip_grad: float) -> GradNorm:
    """One update from reduced gradients.

    1. Hand the gradients of this rank's shards to the fp32 master weights.
    2. The global L2 norm, each parameter counted once.
    3. Not finite: leave everything as it is and say so.
    4. Scale the gradients down to `clip_grad`.
    5. AdamW on the shards, then gather the parameters.
    """
    with torch.no_grad():
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return GradNorm(norm, skipped=f"the gradient norm is {norm}")
        for part in optimizers_of(optimizer):
            parameters = [] if getattr(part, "is_stub_optimizer", False) else part.get_parameters()
            if clip_grad > 0 and parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=norm)
        optimizer.step_with_ready_grads()
    return GradNorm(norm)


def set_learning_rate(optimizer: MegatronOptimizer, lr: float) -> None:
    for part in optimizers_of(optimizer):
        for group in part.param_groups:
            group["lr"] = lr


def gradient_buffers(chunks: Sequence[DistributedDataParallel]) -> Iterator:
    """Every gradient buffer of this rank, dense ones first."""
    for chunk in chunks:
        for name in BUFFERS:
            yield from getattr(chunk, name)


def whole_gradients(chunks: Sequence[DistributedDataParallel]) -> None:
    """After `reduce_gradients`: gathers the shards, so that `main_grad` of every parameter is the reduced sum."""
    for buffer in gradient_buffers(chunks):
        group = buffer.data_parallel_group
        if group.size() == 1:
            continue
        for bucket in buffer.buckets:
            shard = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


def init_moments(optimizer: MegatronOptimizer) -> None:
    """Gives AdamW the state of "no step yet" where it has none: megatron saves and loads what is there already."""
    for part in optimizers_of(optimizer):
        inner = getattr(part, "optimizer", None)
        for group in inner.param_groups if isinstance(inner, torch.optim.AdamW) else ():
            for p in group["params"]:
                if not inner.state[p]:
                    inner.state[p] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p.data), "exp_avg_sq": torch.zeros_like(p.data)}


@contextlib.contextmanager
def loading_moments(optimizer: MegatronOptimizer) -> Iterator[None]:
    """megatron restores every entry of AdamW's state from the checkpoint, but keeps the step count, which torch's AdamW has
    as an entry, with the parameter groups: it is set from there, and must not be looked for among the tensors."""
    parts = [part for part in optimizers_of(optimizer) if isinstance(getattr(part, "optimizer", None), torch.optim.AdamW)]
    for part in parts:
        part._set_main_param_and_optimizer_states = functools.partial(_set_moments, part)
    try:
        yield
    finally:
        for part in parts:
            del part._set_main_param_and_optimizer_states


def _set_moments(part: Any, parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    group, place = part.model_param_group_index_map[parameter]
    main = part.optimizer.param_groups[group]["params"][place]
    own = {"param": main, **part.optimizer.state[main]}
    for name, tensor in tensors.items():
        own[name].copy_(tensor)
