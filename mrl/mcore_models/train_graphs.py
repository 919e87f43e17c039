"""Replays the forward and the backward pass of a chunk's layers as CUDA graphs in training (`engine.cuda_graphs`).

A layer has many small kernels, and the host starts each in both passes. Two graphs start them all: one for the forward
pass of the layers, one for the backward pass. Embedding, head and loss stay outside.

A graph has one shape and fixed memory. `engine.micro_batch.pad` gives all micro-batches the same number of positions.
Sequences and the longest of them come in buckets (`PackedLayout.fixed`), and each bucket has a pair of graphs. Tensors
that stay take each micro-batch's hidden states, rotary angles, padding mask and `cu_seqlens`.

The backward graph adds gradients of parameters to megatron's buffers, as hooks of its DDP do. They run in no replay.
So DDP overlaps nothing: a replica that replays and one that does not would reduce and gather in different orders.

Evaluation and log-probs run kernel by kernel, and so do the first micro-batches of a bucket. They have the same bits.

    graphs = TrainGraphs(decoder, group)
    decoder.forward = graphs          # what GPTModel calls
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from mrl.errors import one_line
from mrl.mcore_models import graph_capture, grouped
from mrl.mcore_models.attention import PackedLayout

logger = logging.getLogger(__name__)

STARTS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")

BEFORE_CAPTURE = 3
"""Micro-batches of a bucket that run kernel by kernel first. Libraries make in them what a capture must not make."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """Is a tensor that the layers train."""

    leaf: Tensor  # that autograd sees
    main_grad: Tensor  # fp32, where megatron sums its gradient

    def add(self, gradient: Tensor | None) -> None:
        """Does what DDP's hook does (distributed_data_parallel.py, 0.16.1 and 0.19.2)."""
        if gradient is not None and not getattr(self.leaf, "grad_added_to_main_grad", False):
            self.main_grad.add_(gradient)


@dataclasses.dataclass
class Bucket:
    """Holds the tensors and graphs of one shape."""

    hidden: Tensor  # [T, 1, H]
    layout: PackedLayout
    others: dict[str, Tensor]  # further inputs by name
    steps: int = 0  # micro-batches so far
    forward: torch.cuda.CUDAGraph | None = None
    backward: torch.cuda.CUDAGraph | None = None
    out: Tensor | None = None  # [T, 1, H], and its gradient
    out_grad: Tensor | None = None
    hidden_grad: Tensor | None = None
    kept: Sequence[Tensor] = ()  # megatron's buffers that the graphs write to; it takes others for larger tensors

    def fill(self, hidden: Tensor, layout: PackedLayout, others: dict[str, Tensor]) -> None:
        with torch.no_grad():
            self.hidden.copy_(hidden)
            self.layout.cu_seqlens_q.copy_(layout.cu_seqlens_q)
            for name, tensor in others.items():
                self.others[name].copy_(tensor)


class TrainGraphs:
    """Stands for the forward of a chunk's decoder. group: the tensor-parallel ranks, which have graphs all or none."""

    def __init__(self, decoder: torch.nn.Module, group: dist.ProcessGroup) -> None:
        self.run, self.decoder, self.group = decoder.forward, decoder, group
        self.captures, self.replays = True, 0
        self._buckets: dict[tuple, Bucket] = {}
        self._shared: dict[tuple, Tensor] = {}  # of buckets, by name and shape
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, hidden_states: Tensor, *, packed_seq_params: Any, **others: Any) -> Tensor:
        """Runs the layers. With graphs the result is valid until the next micro-batch."""
        layout, tensors = packed_seq_params, {k: v for k, v in others.items() if isinstance(v, Tensor)}
        if not (torch.is_grad_enabled() and self.captures):
            return self.run(hidden_states=hidden_states, packed_seq_params=layout, **others)
        unknown = [name for name, value in others.items() if value is not None and name not in tensors]
        assert layout.fixed and hidden_states.requires_grad, "graphs take padded micro-batches that train"
        assert not unknown, f"graphs do not take {unknown}"
        bucket = self._bucket(hidden_states, layout, tensors)
        bucket.steps += 1
        if bucket.steps > BEFORE_CAPTURE:
            bucket.fill(hidden_states, layout, tensors)
            if bucket.forward is None:
                self._capture(bucket)
        if bucket.forward is None:
            return self.run(hidden_states=hidden_states, packed_seq_params=layout, **others)
        return _Replay.apply(hidden_states, bucket, self)

    def forget(self) -> None:
        """Drops all graphs: parameters or gradients leave their memory."""
        self._buckets.clear()
        self._shared.clear()
        self._pool = torch.cuda.graph_pool_handle()  # a pool ends with the last graph in it

    def _shared_like(self, name: str, like: Tensor) -> Tensor:
        """Returns a tensor that all buckets of a shape have under this name."""
        key = name, like.shape, like.dtype
        if key not in self._shared:
            self._shared[key] = torch.zeros_like(like)
        return self._shared[key]

    def _bucket(self, hidden: Tensor, layout: PackedLayout, others: dict[str, Tensor]) -> Bucket:
        shapes = ((name, t.shape, t.dtype) for name, t in (("hidden", hidden), *sorted(others.items())))
        key = (*shapes, len(layout.cu_seqlens_q), layout.max_seqlen_q)
        if key not in self._buckets:
            starts = dict.fromkeys(STARTS, torch.zeros_like(layout.cu_seqlens_q))
            # without lengths on the host, so that nothing takes those of another micro-batch
            static = dataclasses.replace(layout, padded_lengths=(), positions=None, **starts)
            # not shared: functions of layers may keep what they make of angles (elementwise.py)
            own = {name: torch.zeros_like(tensor) for name, tensor in others.items()}
            self._buckets[key] = Bucket(self._shared_like("hidden", hidden).requires_grad_(), static, own)
        return self._buckets[key]

    def _weights(self) -> list[Weight]:
        """Returns what the layers train."""
        together = [w for w in grouped.weights_of(self.decoder) if w.gradients is not None]
        joined = {id(parameter) for weights in together for parameter in weights.parameters}
        found = [
            Weight(p, p.main_grad)
            for p in self.decoder.parameters() if p.requires_grad and id(p) not in joined
        ]  # fmt: skip
        return [*(Weight(w.tensors[0], w.gradients) for w in together), *found]

    def _capture(self, bucket: Bucket) -> None:
        """Makes the graphs of a bucket. If CUDA refuses, one line says so, and all goes on kernel by kernel."""
        refusal = None
        try:
            with _capturing():
                self._capture_both(bucket)
        except RuntimeError as error:
            refusal = one_line(str(error), 200)
        if graph_capture.on_any_rank(refusal is not None, self.group, bucket.hidden.device):
            self.captures = False
            self.forget()
            bucket.forward = None
            logger.warning(
                "engine.cuda_graphs: layers were not captured (%s); training runs without graphs",
                refusal or "on another rank",
            )

    def _capture_both(self, bucket: Bucket) -> None:
        weights = self._weights()
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with graph_capture.capture(forward, self._pool):
            out = self.run(
                hidden_states=bucket.hidden, packed_seq_params=bucket.layout, **{"attention_mask": None} | bucket.others
            )
        out_grad = self._shared_like("gradient of the output", out)
        for weight in weights:
            if hasattr(weight.leaf, "grad_added_to_main_grad"):
                weight.leaf.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        with graph_capture.capture(backward, self._pool):
            bucket.hidden_grad, *grads = torch.autograd.grad(
                out, [bucket.hidden, *(weight.leaf for weight in weights)], out_grad, allow_unused=True
            )
            for weight, grad in zip(weights, grads, strict=True):
                weight.add(grad)
        bucket.out, bucket.out_grad = out.detach(), out_grad
        bucket.kept = [*parallel_state.get_global_memory_buffer().buffer.values()]
        bucket.forward, bucket.backward = forward, backward


class _Replay(torch.autograd.Function):
    """Is the layers of a bucket for autograd."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, bucket: Bucket, graphs: TrainGraphs) -> Tensor:
        assert bucket.forward is not None and bucket.out is not None
        graphs.replays += 1
        ctx.bucket, ctx.graphs, ctx.replay = bucket, graphs, graphs.replays
        bucket.forward.replay()
        return bucket.out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        bucket: Bucket = ctx.bucket
        # graphs of all buckets share their memory
        assert ctx.replay == ctx.graphs.replays, "another micro-batch has overwritten the activations of this one"
        assert bucket.backward is not None and bucket.out_grad is not None and bucket.hidden_grad is not None
        bucket.out_grad.copy_(grad)
        bucket.backward.replay()
        return bucket.hidden_grad.detach(), None, None


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    """Leaves out inside what no capture takes.

    Under sequence parallelism each forward of a block changes random states (`CudaRNGStatesTracker.fork`, 0.16.1 and
    0.19.2). Nothing draws: dropout is refused.

    DDP keeps autograd's nodes of parameters, which were made on the default stream. A backward pass would wait there.
    torch lets them run on the stream of the capture.
    """
    tracker = get_cuda_rng_tracker()
    override = torch.autograd.graph.set_override_stale_capture_stream
    tracker.fork = lambda *_: contextlib.nullcontext()
    override(True)
    try:
        yield
    finally:
        override(False)
        del tracker.fork
