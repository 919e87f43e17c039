"""Updates the matrices of layers with Muon, over megatron's distributed optimizer, and the rest with AdamW.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) moves a matrix by its averaged gradient with all
singular values brought near 1. That takes the whole matrix. But a data-parallel rank updates only a range of entries,
and a tensor-parallel rank holds only rows or columns. An update is:

1. AdamW updates everything that is no matrix of a layer.
2. Each rank averages the gradients of its own entries.
3. Entries of a parameter that several data-parallel ranks update go to its owner, the rank with the most of them.
4. The owner gathers the parameter over tensor-parallel ranks and takes Hugging Face's matrices out of it (q, k and v;
   gate and up). It orthogonalises each, and keeps the part of its own shard.
5. The other data-parallel ranks get their entries back, and each moves its masters.

Matrices are those of Hugging Face's files, whatever megatron joins and splits. So updates do not depend on the layout.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from mrl.config.sections import MuonConfig
from mrl.weights.rules import Rule

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients of the quintic iteration: steepest at zero, so that singular values end between 0.7 and 1.2."""

MIN_NORM = 1e-7

Move = tuple[int, int, Any, Any]
"""A rank of the group, another one, the first one's tensor, and the place for it in the other one's memory.

The tensor is None on other ranks than the first, and the place on others than the second.
"""

SCALES: Mapping[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: max(rows, columns) ** 0.5,
    "unit_rms_norm": lambda rows, columns: (rows / columns) ** 0.5,
    "shape_scaling": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
}

MOMENTUM = "momentum"
"""The name of Muon's only moment of a matrix, in the optimizer's state and in checkpoints."""


def orthogonalise(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Returns the matrix [R, C] with its singular values near 1, by Newton-Schulz steps computed in `dtype`."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype)
    x = x.T if is_tall else x  # x @ x.T is then the smaller of the two products
    x = x / x.norm().clamp(min=MIN_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def is_matrix(rule: Rule) -> bool:
    """Returns whether Muon updates a parameter: matrices of layers. Embeddings and heads are of no layer."""
    return rule.layer is not None and not rule.buffer and all(len(shape) == 2 for shape in rule.hf_shapes)


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """Holds a parameter as this rank's model has it, with the entries that each data-parallel rank updates."""

    rule: Rule
    ranges: Mapping[int, tuple[int, int]]  # by rank of the group: first entry, and the one past the last
    main: Tensor | None  # masters of this rank's entries; None if it updates none
    group: Mapping[str, Any] | None  # their hyper-parameters

    @property
    def owner(self) -> int:
        """Returns the rank that computes the update. It is the same on tensor-parallel ranks, because their buffers are
        alike."""
        return max(self.ranges, key=lambda rank: (self.ranges[rank][1] - self.ranges[rank][0], -rank))

    @property
    def entries(self) -> int:
        return max(end for _, end in self.ranges.values())


class Muon(torch.optim.Optimizer):
    """Updates matrices of layers with Muon, and with AdamW the rest of the parameters of one of megatron's
    optimizers."""

    def __init__(
        self, adamw: torch.optim.Optimizer, groups: list[dict[str, Any]], shards: Sequence[Shard],
        ranks: dist.ProcessGroup, options: MuonConfig, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """Takes the groups of `adamw`, without the shards' parameters. ranks: the data-parallel group that divides the
        shards."""
        # torch refuses an empty list, and also megatron's shards: they are views, not leaves
        super().__init__([torch.nn.Parameter(torch.empty(0))], {})
        self.param_groups, self.state = groups, adamw.state
        self.adamw, self.ranks, self.options, self.dtype = adamw, ranks, options, dtype
        own = [shard for shard in shards if ranks.rank() in shard.ranges]
        self.divided = [shard for shard in own if len(shard.ranges) > 1]
        self.undivided = [shard for shard in own if len(shard.ranges) == 1]
        self._masters = {id(shard.main) for shard in own}

    def updates_master(self, main: Tensor) -> bool:
        """Returns whether a master is of a matrix, which Muon updates."""
        return id(main) in self._masters

    @classmethod
    def from_optimizer(
        cls, part: MegatronOptimizer, matrices: Mapping[int, Rule], mains: Mapping[int, Tensor], options: MuonConfig,
        dtype: torch.dtype,
    ) -> Muon:  # fmt: skip
        """Returns one that updates what `part.optimizer`, an AdamW, would.

        matrices: their rules, and mains: masters of this rank's entries, both by the id of the parameter. dtype: for
        the computation of Newton-Schulz steps.
        """
        adamw = part.optimizer
        of_muon = {id(mains[number]): number for number in matrices if number in mains}
        group_of: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        for group in adamw.param_groups:
            own = [main for main in group["params"] if id(main) in of_muon]
            group["params"] = [main for main in group["params"] if id(main) not in of_muon]
            if own:
                groups.append(group | {"params": own})
                group_of |= {of_muon[id(main)]: groups[-1] for main in own}
        adamw.param_groups = [group for group in adamw.param_groups if group["params"]]
        shards = [
            Shard(matrices[id(parameter)], ranges, mains.get(id(parameter)), group_of.get(id(parameter)))
            for buffer in part.buffers
            for parameter, ranges in ranges_of_ranks(buffer)
            if id(parameter) in matrices
        ]
        return cls(adamw, [*adamw.param_groups, *groups], shards, part.buffers[0].data_parallel_group, options, dtype)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        self.adamw.step()
        # Parameters of several ranks come first, with all messages at once. A rank has at most two of them in a bucket:
        # DistributedOptimizer gives it one range of the bucket, so only the first and the last parameter can be cut.
        wholes = self._to_owners({shard: self._average(shard) for shard in self.divided})
        updates = {shard: self._update_of(shard, whole) for shard, whole in wholes.items()}
        for shard, update in self._to_ranks(updates).items():
            self._move(shard, update)
        for shard in self.undivided:
            self._move(shard, self._update_of(shard, self._average(shard)))

    def _average(self, shard: Shard) -> Tensor:
        """Adds the gradient to the running average, and returns this rank's entries of the matrix to orthogonalise."""
        assert shard.main is not None
        gradient, state, beta = shard.main.grad, self.state[shard.main], self.options.momentum
        assert gradient is not None
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(shard.main)
        state[MOMENTUM].lerp_(gradient, 1 - beta)
        moved = gradient.lerp(state[MOMENTUM], beta) if self.options.use_nesterov else state[MOMENTUM]
        return moved.view(-1)

    def _update_of(self, shard: Shard, flat: Tensor) -> Tensor:
        """Returns the update of all entries of this rank's shard. flat: the result of `_average`.

        Collective over the ranks with the parameter's other shards. Each calls it for the same parameters in the same
        order.
        """
        rule = shard.rule
        shards = [flat.view(rule.shape())]
        if rule.degree > 1:
            of_all = flat.new_empty(rule.degree * flat.numel())
            dist.all_gather_into_tensor(of_all, flat.contiguous(), group=_axis_group(rule))
            shards = [part.view(rule.shape(rank)) for rank, part in enumerate(of_all.chunk(rule.degree))]
        updates = {}
        for name, matrix in rule.merge(shards).items():
            scale = SCALES[self.options.scale_mode](*matrix.shape) * self.options.extra_scale_factor
            updates[name] = orthogonalise(matrix, self.options.num_ns_steps, self.dtype).to(flat.dtype) * scale
        return rule.assemble(updates.__getitem__, rule.rank).reshape(-1)

    def _move(self, shard: Shard, update: Tensor) -> None:
        """Moves the masters of this rank's entries. update: of these alone."""
        assert shard.main is not None and shard.group is not None
        rate = shard.group["lr"]
        shard.main.mul_(1 - rate * shard.group["weight_decay"])
        shard.main.add_(update.view_as(shard.main), alpha=-rate)

    def _to_owners(self, held: Mapping[Shard, Tensor]) -> dict[Shard, Tensor]:
        """Returns all entries of the parameters that this rank owns. held: of each divided one, this rank's entries."""
        wholes = {s: held[s].new_empty(s.entries) for s in self.divided if s.owner == self.ranks.rank()}
        moves: list[Move] = []
        for shard in self.divided:
            for peer, (start, end) in shard.ranges.items():
                place = wholes[shard][start:end] if shard in wholes else None
                moves.append((peer, shard.owner, held[shard], place))
        _exchange(moves, self.ranks)
        return wholes

    def _to_ranks(self, wholes: Mapping[Shard, Tensor]) -> dict[Shard, Tensor]:
        """Returns this rank's entries of each divided parameter. wholes: all entries of those that it owns."""
        own: dict[Shard, Tensor] = {}
        moves: list[Move] = []
        for shard in self.divided:
            assert shard.main is not None
            own[shard] = shard.main.new_empty(shard.main.numel())
            for peer, (start, end) in shard.ranges.items():
                part = wholes[shard][start:end] if shard in wholes else None
                moves.append((shard.owner, peer, part, own[shard]))
        _exchange(moves, self.ranks)
        return own


def _exchange(moves: Sequence[Move], ranks: dist.ProcessGroup) -> None:
    """Copies tensors between ranks. The source and the target of a move have it at the same place in their lists."""
    sent: dict[int, list[Tensor]] = collections.defaultdict(list)
    wanted: dict[int, list[Tensor]] = collections.defaultdict(list)
    rank = ranks.rank()
    for source, target, tensor, place in moves:
        if source == target == rank:
            place.copy_(tensor)
        elif source == rank:
            sent[target].append(tensor)
        elif target == rank:
            wanted[source].append(place)
    incoming = {peer: torch.cat(places) for peer, places in wanted.items()}
    operations = [dist.P2POp(dist.irecv, t, group=ranks, group_peer=peer) for peer, t in incoming.items()]
    operations += [dist.P2POp(dist.isend, torch.cat(t), group=ranks, group_peer=peer) for peer, t in sent.items()]
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
    for peer, tensors in wanted.items():
        parts = incoming[peer].split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part)


def _axis_group(rule: Rule) -> dist.ProcessGroup:
    if rule.axis == "etp":
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def ranges_of_ranks(buffer: Any) -> Iterator[tuple[torch.nn.Parameter, dict[int, tuple[int, int]]]]:
    """Yields the parameters of one of megatron's buffers, each with the entries that ranks update.

    The entries are by rank: the first, and the one past the last. A rank without any is left out.
    """
    # each bucket is divided evenly
    ranks = buffer.data_parallel_group.size()
    for bucket in buffer.buckets:
        share = bucket.grad_data.numel() // ranks
        for parameter in bucket.params_list:
            first, last, *_ = buffer.param_index_map[parameter]
            first, last = first - bucket.offset, last - bucket.offset
            ranges = {}
            for rank in range(first // share, -(-last // share)):
                ranges[rank] = max(first, rank * share) - first, min(last, (rank + 1) * share) - first
            yield parameter, ranges
