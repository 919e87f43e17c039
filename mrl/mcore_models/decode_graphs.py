"""Runs decoding steps in fixed shapes, so that a GPU replays them as CUDA graphs.

A step feeds one token of each running sequence. If sequences are few, the host needs longer to launch the kernels than
they run. A CUDA graph launches them at once. But a graph has one shape, fixed memory for everything, and nothing that
the host reads. So a step is widened to a bucket of rows and of positions. Its tokens and positions go into tensors that
stay, and the decoder runs with `fixed`. A row beyond the sequences feeds any token at position 0 of an unused row of
the cache, or at the next position of a row in use, and its output is dropped.

    fixed = DecodeGraphs(decoder, cache, captures=True)
    hidden = fixed(tokens, positions, None)     # [sequences, N]

Graphs live as long as the object and the shape of its cache. On a CPU the same steps run and nothing is captured.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.errors import one_line
from mrl.mcore_models import graph_capture
from mrl.mcore_models.decoder import Decoder
from mrl.ops.devices import tensor_on
from mrl.ops.kv_cache import CachedStep, KVCache

logger = logging.getLogger(__name__)

FIRST_PLACES = 256
"""Positions of a row in the smallest bucket; each next one has twice as many."""

BEFORE_CAPTURE = 4
"""Steps of a bucket that run kernel by kernel first: a capture takes longer than a step, and short generations come
through many buckets. They also make whatever libraries make at a first call, which a capture must not."""


def rows_of(sequences: int, most: int) -> int:
    """Returns the rows of the bucket for so many sequences: a power of two or half more, and no more than `most`."""
    power = 1 << (sequences - 1).bit_length()
    between = 3 * power // 4
    return min(between if sequences <= between and power >= 4 else power, most)


def places_of(longest: int, most: int) -> int:
    """Returns how many positions of a row a bucket reads. longest: filled positions of the longest sequence."""
    return min(max(FIRST_PLACES, 1 << (longest - 1).bit_length()), most)


@dataclasses.dataclass
class _Bucket:
    """Holds the step of one shape."""

    inputs: Tensor  # [2, rows] int64: tokens, positions
    hidden: Tensor | None  # [rows, N] from the stage before; None on the first
    places: int
    steps: int = 0  # that ran without a graph
    graph: torch.cuda.CUDAGraph | None = None
    out: Tensor | None = None  # [rows, N] what each replay of the graph fills


class DecodeGraphs:
    """Runs the steps of one chunk over one cache. captures: as CUDA graphs, for tensors on a GPU."""

    def __init__(self, decoder: Decoder, cache: KVCache, *, captures: bool) -> None:
        self.decoder, self.cache, self.captures = decoder, cache, captures
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._of: tuple[int, int] | None = None  # shape of the cache that the buckets are for
        self._pool = torch.cuda.graph_pool_handle() if captures else None

    def __call__(
        self, tokens: Tensor, positions: Sequence[int], hidden: Tensor | None, behind: Sequence[int] = ()
    ) -> Tensor:
        """Runs the decoder on one token of each of the first sequences. The result is valid until the next call.

        behind: filled positions of the rows after these, if other sequences use them.
        """
        count = len(tokens)
        most = rows_of(count, self.cache.rows) - count
        places = [*positions, *behind[:most]]
        bucket = self._bucket(count, max(places) + 1, hidden)
        padding = [0] * (bucket.inputs.shape[1] - len(places))
        bucket.inputs[0, :count].copy_(tokens)
        bucket.inputs[1].copy_(tensor_on(bucket.inputs.device, places + padding))
        if bucket.hidden is not None:
            bucket.hidden[:count] = hidden
        if self.captures and bucket.graph is None and bucket.steps >= BEFORE_CAPTURE:
            self._capture(bucket)
        if bucket.graph is not None and bucket.out is not None:
            bucket.graph.replay()
            return bucket.out[:count]
        bucket.steps += 1
        return self._run(bucket)[:count]

    def _bucket(self, count: int, longest: int, hidden: Tensor | None) -> _Bucket:
        if self._of != (self.cache.rows, self.cache.length):  # the cache has other tensors now
            self._buckets, self._of = {}, (self.cache.rows, self.cache.length)
        shape = rows_of(count, self.cache.rows), places_of(longest, self.cache.length)
        if shape not in self._buckets:
            weight = next(self.decoder.model.parameters())
            inputs = torch.zeros(2, shape[0], dtype=torch.int64, device=weight.device)
            of_hidden = None if hidden is None else hidden.new_zeros(shape[0], hidden.shape[1])
            self._buckets[shape] = _Bucket(inputs, of_hidden, shape[1])
        return self._buckets[shape]

    def _run(self, bucket: _Bucket) -> Tensor:
        step = CachedStep.fixed(self.cache, bucket.inputs[1], bucket.places)
        return self.decoder(bucket.inputs[0], bucket.hidden, step, fixed=True)

    def _capture(self, bucket: _Bucket) -> None:
        """Makes the graph of a bucket. If CUDA refuses, it is logged, nothing more is captured, and steps run without
        graphs, on all tensor-parallel ranks.
        """
        graph, out, refusal = torch.cuda.CUDAGraph(), None, None
        try:
            with graph_capture.capture(graph, self._pool):
                out = self._run(bucket)
        except RuntimeError as error:
            refusal = one_line(str(error), 200)
        group = self.decoder.group if self.decoder.parallel else None
        if graph_capture.on_any_rank(refusal is not None, group, bucket.inputs.device):
            self.captures = False
            logger.warning(
                "rollout.cuda_graphs: a step of %d rows was not captured (%s); steps run without graphs",
                bucket.inputs.shape[1], refusal or "on another rank",
            )  # fmt: skip
            return
        bucket.graph, bucket.out = graph, out
