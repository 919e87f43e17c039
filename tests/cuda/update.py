"""One update of the Megatron engine, on fake CUDA tensors (run.py) or for real: what it takes of memory and of waiting."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mrl.algorithms.distill import TEACHER, DistillLoss
from mrl.batch import Batch, make_batch
from mrl.config.schema import (
    EngineConfig,
    LoraConfig,
    MicroBatchConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    OptimizerConfig,
    ParallelConfig,
    RoleConfig,
)
from mrl.engine.megatron import optim, optim_state
from mrl.engine.megatron.engine import MegatronEngine
from mrl.engine.peak_bytes import PeakBytes
from tests.cuda import models
from tests.cuda.cases import Case, Result

TOKENS = 1000
"""Of micro-batches that are padded to one size: those of tests/cuda/te_cases.py hold fewer."""


def config_of(case: Case, folder: Path) -> RoleConfig:
    parallel = ParallelConfig(tp=case.tp, pp=case.pp, vpp=case.vpp, cp=case.cp, ep=case.ep, etp=case.etp, sp=case.sp)
    start, lora = ("pretrained", LoraConfig()) if case.lora else ("random", None)
    moments = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), "bfloat16") | {"use_precision_aware_optimizer": True}
    engine = EngineConfig(
        megatron=(moments if case.bf16_moments else {})
        | ({"optimizer_cpu_offload": True} if case.optimizer_on_host else {})
        | case.megatron,
        parallel=parallel, recompute=case.recompute, recompute_modules=case.modules, offload=list(case.offload), layer_spec=case.spec,
        moe=MoEConfig(grouped_mm=case.grouped or "auto", **({"aux_loss": 0.01, "z_loss": 0.001} if case.router_losses else {})),
        micro_batch=MicroBatchConfig(tokens=TOKENS) if case.megatron.get("tp_comm_overlap")
        else MicroBatchConfig(tokens=case.graphs, pad=True) if case.graphs
        else MicroBatchConfig(size=len(case.lengths)), cuda_graphs=bool(case.graphs),
    )  # fmt: skip
    model = ModelConfig(path=str(folder), dtype=case.dtype, init=start, lora=lora)
    mtp = MTPConfig(detach=case.detached) if case.mtp else None
    optimizer = OptimizerConfig(name="muon" if case.muon else "adamw")
    return RoleConfig(model=model, engine=engine, optimizer=optimizer, head=case.head, mtp=mtp)


def batch_of(case: Case) -> Batch:
    """A mini-batch whose micro-batches have sequences of `case.lengths` each."""
    tokens = [list(range(1, 2 + n)) for n in case.lengths] * case.micro_batches  # the last one is a label alone
    batch = make_batch(tokens, [[1.0] * len(t) for t in tokens])
    if not case.ids:
        return batch
    further = torch.arange(case.ids).expand(batch.num_tokens, -1)
    teacher = torch.full(further.shape, -math.log(2 * case.ids))
    labels = torch.cat([batch.labels[:, None], further], dim=1)
    return dataclasses.replace(batch, labels=labels, token_fields={TEACHER: teacher})


def make(
    case: Case, folder: Path, batch: Batch, memory: PeakBytes, syncs: dict[str, int],
    built: Callable[[Any, int], None] = lambda dims, hidden: None,
) -> Result:  # fmt: skip
    """built: called with the layout and the hidden size once the engine is there."""
    engine = MegatronEngine(config_of(case, folder))
    engine.init_model()
    after_init = memory.alive
    built(engine.model.dims, engine.model.hf["hidden_size"])
    distill = DistillLoss(kind="forward_kl")
    engine.set_loss_fn(distill if case.ids else lambda data, predictions, ctx: (_loss(data, predictions), ctx))
    plan, each = engine._plan, len(case.lengths)
    # micro-batches of equal lengths: stages tell each other one shape
    engine._plan = lambda batch: [[i * each + j for j in range(each)] for i, _ in enumerate(plan(batch))]
    engine.optimizer_zero_grad()
    syncs.clear()
    before = memory.alive
    with engine.train_mode():
        for _ in range(case.calls):
            engine.forward_backward_step(batch)
    in_micro_batch = {line: n / case.micro_batches / case.calls for line, n in syncs.items()}
    after_backward = memory.peak
    syncs.clear()
    engine.optimizer_step()
    peak, after_step, in_step = memory.peak, memory.alive, dict(syncs)
    parts = optim.optimizers_of(engine.model.optimizer)
    for part in parts:
        optim_state.set_step_count(part.optimizer, 1)  # as after a resume
    parameters = [p for model in engine.model.chunks for p in model.parameters()]
    everything = {
        "parameters": parameters,
        "masters": [main for _, _, main, _ in optim.shards(engine.model.optimizer)],
        "gradients": [buffer.grad_data for buffer in optim.gradient_buffers(engine.model.wrapped)],
        "states": list(optim._state_tensors(engine.model.optimizer)),
        "steps": [state["step"] for part in parts for state in part.optimizer.state.values() if "step" in state],
    }
    return Result(
        parameters=sum(p.numel() * p.element_size() for p in parameters), after_init=after_init,
        backward_peak=after_backward, activations=after_backward - before, peak=peak, after_step=after_step, syncs=in_micro_batch,
        step_syncs=in_step, updated=sum(1 for _ in optim.shards(engine.model.optimizer)),
        held={
            "parameters": sum(b.param_data.nbytes for b in optim.gradient_buffers(engine.model.wrapped))
            + sum(p.nbytes for p in parameters if not p.requires_grad),
            "gradients": sum(t.nbytes for t in everything["gradients"]),
            "optimizer": sum(main.nbytes for _, p, main, _ in optim.shards(engine.model.optimizer) if p.dtype != main.dtype)
            + sum(t.nbytes for part in parts for state in part.optimizer.state.values()
                  for t in state.values() if t.dim()),
        },
        tensors={name: sorted({f"{t.device.type} {t.dtype}" for t in some}) for name, some in everything.items()},
    )  # fmt: skip


def _loss(data: Any, predictions: Any) -> Any:
    if "values" in predictions:
        return (predictions["values"] * data.loss_mask).sum()
    return -(predictions["log_probs"] * data.loss_mask).sum()


def on_cpu(case: Case) -> list[Result]:
    """Every rank's result of the same update on real tensors. A case of the test harness, on as many ranks."""
    with tempfile.TemporaryDirectory() as folder, PeakBytes("cpu", block=512) as memory:
        path = models.write(case.model, Path(folder), case.layers, **case.changes)
        if case.lora:
            models.write_zeros(path)
        result = make(case, path, batch_of(case), memory, {})
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, result)
    return everyone
