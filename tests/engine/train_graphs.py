"""Steps with and without `engine.cuda_graphs`, on every rank of a world. CUDA is `recorded_graphs`."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.config.schema import RoleConfig
from mrl.engine.base import PLAIN_CTX, BaseEngine
from mrl.engine.registry import build_engine
from mrl.mcore_models import attention, train_graphs
from tests.engine import contract, overlap, recorded_graphs, te_like, tiny

SIZES = ((9, 24), (40, 5), (5, 24), (40, 5), (14, 24), (7, 5))  # sequences of a step, and tokens of the longest


@dataclasses.dataclass(frozen=True)
class Compared:
    differ: dict[str, float]  # what is not the same to the bit
    replays: int
    buckets: int
    shapes: int  # that were captured
    lines: list[str]  # that are said


def compare(config: RoleConfig, te: bool = False, stale: str = "", refuses: int | None = None) -> Compared:
    """Compares all numbers of steps. stale: an input that replays do not get. refuses: the rank whose captures fail."""
    with te_like.te_like() if te else contextlib.nullcontext():
        plain, _, replays, _ = _run(with_graphs(config, False), "", None)
        assert not replays
        found, (buckets, shapes), replays, lines = _run(with_graphs(config, True), stale, refuses)
    assert found.keys() == plain.keys()
    differ = {str(name): float((found[name] - value).abs().max()) for name, value in plain.items()
              if not torch.equal(found[name], value)}  # fmt: skip
    return Compared(differ, replays, buckets, shapes, lines)


def with_graphs(config: RoleConfig, on: bool) -> RoleConfig:
    micro_batch = dataclasses.replace(config.engine.micro_batch, pad=True)
    return dataclasses.replace(
        config, engine=dataclasses.replace(config.engine, micro_batch=micro_batch, cuda_graphs=on)
    )


def _run(config: RoleConfig, stale: str, refuses: int | None) -> tuple:
    lines: list[str] = []
    fails = dist.get_rank() == refuses
    replicas = dist.get_world_size() > config.engine.parallel.tp
    with (
        recorded_graphs.installed(fails=fails) as counted,
        mock.patch.multiple(train_graphs, BEFORE_CAPTURE=1),
        mock.patch.multiple(attention, SHORTEST=attention.SHORTEST if replicas else 8),  # buckets by the longest, too
        mock.patch.object(train_graphs.Bucket, "fill", _without(stale, train_graphs.Bucket.fill)),
        mock.patch.object(train_graphs.logger, "warning", lambda text, *of: lines.append(text % of)),
    ):
        engine = build_engine(config)
        engine.model.captures_graphs = True
        engine.init_model()
        engine.set_loss_fn(contract.loss_fn)
        found = _steps(engine)
    buckets = [bucket for graphs in engine.model.train_graphs for bucket in graphs._buckets.values()]
    made = len(buckets), sum(bucket.forward is not None for bucket in buckets)
    engine.to("host", model=False, optimizer=False, gradients=True)
    assert not any(graphs._buckets for graphs in engine.model.train_graphs)
    return found, made, counted[0], lines


def repeated(config: RoleConfig) -> dict[str, Any]:
    """Runs the steps on a GPU: twice without graphs, for what differs by kernels that add in no fixed order, and with."""
    found, lines = [], []
    with (
        mock.patch.multiple(train_graphs, BEFORE_CAPTURE=1),
        mock.patch.object(train_graphs.logger, "warning", lambda text, *of: lines.append(text % of)),
    ):
        for on in (False, False, True):
            engine = build_engine(with_graphs(config, on))
            engine.init_model()
            engine.set_loss_fn(contract.loss_fn)
            found.append(_steps(engine))
    plain, *others = found
    again, differ = (max(float((one[name] - plain[name]).abs().max()) for name in plain) for one in others)
    return {
        "again": again,
        "differ": differ,
        "replays": sum(g.replays for g in engine.model.train_graphs),
        "lines": lines,
    }


def _without(stale: str, fill: Any) -> Any:
    def filled(bucket: Any, hidden: Tensor, layout: Any, others: dict[str, Tensor]) -> None:
        places = {"hidden": bucket.hidden, "cu_seqlens": bucket.layout.cu_seqlens_q} | bucket.others
        kept = places[stale].detach().clone() if stale and bucket.forward is not None else None
        fill(bucket, hidden, layout, others)
        if kept is not None:
            places[stale].data.copy_(kept)

    return filled


def _steps(engine: BaseEngine) -> dict[Any, Tensor]:
    """Returns losses, metrics, log-probs, gradients, norms, weights and evaluations. One step has two calls, and the
    model is on the host between two."""
    found: dict[Any, Tensor] = {}
    for i, (sequences, longest) in enumerate(SIZES):
        batch = tiny.uneven_batch(i, sequences=sequences, longest=longest)
        predictions, loss, ctx = overlap.gradients(engine, batch, i)
        found["loss", i] = torch.tensor(loss)
        found |= {("metric", i, name): torch.tensor(value) for name, value in ctx["metrics"].items()}
        found["log-probs", i] = predictions["log_probs"]
        if i in (1, 3):
            found |= {("gradient", i, name): value.clone() for name, value in engine.hf_gradients()}
        token = engine.guard_before_step() if i == 0 else None
        found["norm", i] = torch.tensor(engine.optimizer_step())
        problems = [] if token is None else engine.guard_after_step(token)
        assert not problems, problems
        engine.lr_scheduler_step()
        if i in (1, 3):  # the next forward gathers the weights
            continue
        found |= {("weight", i, name): value.clone() for name, value in engine.hf_weights()}
        with engine.eval_mode():
            _, ctx = engine.forward_backward_step(engine.shard_data(batch), PLAIN_CTX, forward_only=True)
        found["evaluated", i] = torch.tensor(ctx["loss"])
        if i == 2:
            pools = [graphs._pool for graphs in engine.model.train_graphs]
            engine.to("host")
            assert not any(graphs._buckets or graphs._pool in pools for graphs in engine.model.train_graphs)
            engine.to("device")
    return found


def overwritten(config: RoleConfig) -> str:
    """Returns what is said of a backward pass after the forward of another micro-batch."""
    with recorded_graphs.installed(), mock.patch.multiple(train_graphs, BEFORE_CAPTURE=0):
        engine = build_engine(with_graphs(config, True))
        engine.model.captures_graphs = True
        engine.init_model()
        [chunk] = engine.model.wrapped
        [graphs] = engine.model.train_graphs
        hidden = torch.zeros(64, 1, 32, requires_grad=True)
        from mrl.engine.megatron import pipeline

        with engine.model.state.installed():
            ins = pipeline.make_micro_batch(tiny.uneven_batch(sequences=3), {}, None, engine.setup).inputs
            chunk.module.rotary_pos_emb.positions = ins.layout.positions
            given = {"packed_seq_params": ins.layout, "rotary_pos_emb": chunk.module.rotary_pos_emb()}
            first, _ = (graphs(hidden_states=hidden * 1, attention_mask=None, **given) for _ in range(2))
        try:
            first.sum().backward()
        except AssertionError as error:
            return str(error)
    return ""
