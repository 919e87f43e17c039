"""Checks one optimizer step: what should train does, gradients are finite, replicas are equal.

An engine passes its local tensors before and after the step; nothing here knows how they are split. Tensors are
compared by a 64-bit checksum of their bits, so no second copy of the weights is held.

Each rank judges its shard of a parameter alone. A shard that did not change is a fault if its gradient would have moved
it. Adam moves a weight `w` by about `lr * g / (|g| + eps)`. No change is right in two cases:

- the move is below the rounding of `w`, as in a long warm-up or for a norm weight of 1
- the gradient is zero, as for rows of an embedding that never occur

A parameter without any gradient on any rank is a fault, except an expert without tokens or a tower without images. An
adapter `B A` starts with B = 0. Until B has moved, the gradient of A is zero, which is no fault.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.engine import splitmix
from mrl.engine.collective import all_ranks

CHUNK = {"cpu": 2**16, "cuda": 2**22}
"""Elements that are hashed together: few on a CPU, to stay in its caches."""
ROUNDING_MARGIN = 8.0
"""An update must change a weight if it is this many roundings of the weight. The margin is for clipping: it makes
gradients smaller, and then Adam's eps weighs more."""


class FaultKind(enum.Enum):
    """Names the faults that a step can leave in a parameter, each as a sentence. {} stands for `Problem.detail`."""

    NOT_FINITE = "its gradient is not finite"
    NO_GRADIENT = "it has no gradient"
    ZERO_GRADIENT = "its gradient is zero"
    WAITS = "its gradient is zero as long as B of its adapter is"
    """No fault: A of an adapter could not train in this step, and should in the next."""
    UNCHANGED = "it has a gradient but the step did not change it"
    REPLICAS_DIFFER = "its replicas on {} differ"


@dataclasses.dataclass(frozen=True)
class Problem:
    """Describes one fault of one parameter after a step. `str` gives the line for the user."""

    kind: FaultKind
    parameter: str  # its name in the model's files
    detail: str = ""  # fills the kind's sentence, as the ranks with different replicas

    def __str__(self) -> str:
        return f"{self.parameter}: {self.kind.value.format(self.detail)}"


def confirmed_faults(problems: Iterable[Problem]) -> list[Problem]:
    """Returns those of `problems` that something is wrong by; the others wait for the next step."""
    return [problem for problem in problems if problem.kind is not FaultKind.WAITS]


@dataclasses.dataclass(frozen=True)
class WatchedParameter:
    """Holds one trainable parameter of this rank, just before the step."""

    name: str
    weight: Tensor  # the local shard that the optimizer updates: the fp32 master if there is one
    gradient: Tensor | None  # the reduced gradient of the update, of the same shape
    may_be_idle: bool = False  # a zero gradient is no fault: experts see only the tokens routed to them
    waits: bool = False  # it is an adapter's A, and this rank's shard of B is zero


@dataclasses.dataclass
class Finding:
    """Holds what one rank knows of its shard of a parameter. has_gradient to should_change are from before the step."""

    checksum: int
    has_gradient: bool
    finite: bool
    nonzero: bool
    should_change: bool
    may_be_idle: bool
    waits: bool = False
    changed: bool = False


@torch.no_grad()
def inspect(parameters: Iterable[WatchedParameter], *, lr: float, eps: float) -> dict[str, Finding]:
    """Returns this rank's findings before a step with rate `lr` and AdamW's `eps`, for `problems` afterwards."""
    findings = {}
    for p in parameters:
        g = p.gradient
        assert g is None or g.shape == p.weight.shape, f"{p.name}: gradient {g.shape}, weight {p.weight.shape}"
        assert p.name not in findings, f"{p.name} twice"
        findings[p.name] = Finding(
            checksum=checksum(p.weight),
            has_gradient=g is not None,
            finite=g is None or bool(torch.isfinite(g).all()),
            nonzero=g is not None and bool(g.any()),
            should_change=g is not None and _would_move(p.weight, g, lr, eps),
            may_be_idle=p.may_be_idle,
            waits=p.waits,
        )
    return findings


@torch.no_grad()
def problems(findings: dict[str, Finding], weights: Iterable[tuple[str, Tensor]]) -> list[Problem]:
    """Returns one problem for each parameter that failed, the same list on every rank. Collective over the default
    group.

    weights: names and local shards as in `inspect`, after the step.
    """
    for name, weight in weights:
        findings[name].changed = checksum(weight) != findings[name].checksum
    ranks: Sequence[dict[str, Finding]] = all_ranks().gather(findings)
    found_wrong = []
    for name in sorted({name for rank in ranks for name in rank}):
        found = [rank[name] for rank in ranks if name in rank]
        kind = _fault(found)
        if kind is not None:
            found_wrong.append(Problem(kind, name))
    return found_wrong


def _fault(found: list[Finding]) -> FaultKind | None:
    """Returns the fault of one parameter, from the findings of every rank with a shard of it."""
    if not all(f.finite for f in found):
        return FaultKind.NOT_FINITE
    if not any(f.has_gradient for f in found):
        return FaultKind.NO_GRADIENT
    if not any(f.nonzero for f in found):
        if all(f.may_be_idle for f in found):  # adapters too: such an expert may never train
            return None
        return FaultKind.WAITS if all(f.waits for f in found) else FaultKind.ZERO_GRADIENT
    if any(f.should_change and not f.changed for f in found):
        return FaultKind.UNCHANGED
    return None


@torch.no_grad()
def replica_problems(parameters: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None) -> list[Problem]:
    """Returns one problem for each tensor that is not bitwise the same on all ranks of `group`, on these ranks only.

    Collective over `group`, whose ranks give the same names in the same order. `merge_problems` joins the lists of all
    groups.
    """
    named = list(parameters)
    if not named or dist.get_world_size(group) == 1:
        return []
    sums = torch.tensor([checksum(t) for _, t in named], dtype=torch.int64, device=named[0][1].device)
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    differ = (low != high).tolist()
    ranks = f"ranks {dist.get_process_group_ranks(group or dist.group.WORLD)}"
    return [Problem(FaultKind.REPLICAS_DIFFER, n, ranks) for (n, _), d in zip(named, differ, strict=True) if d]


def merge_problems(problems: list[Problem]) -> list[Problem]:
    """Returns the problems of all ranks, each once, in the order of their lines. Collective over the default group."""
    return sorted({problem for rank in all_ranks().gather(problems) for problem in rank}, key=str)


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """Returns 64 bits that almost surely change with any bit of `tensor`, computed chunk by chunk."""
    flat = tensor.detach().reshape(-1)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    chunk = CHUNK[flat.device.type]
    for start in range(0, flat.numel(), chunk):
        total += hashes(flat[start : start + chunk].view(bits), start).sum()  # may wrap around
    return int(total)


def hashes(words: Tensor, start: int) -> Tensor:
    """Returns [.., n] int64: a hash of each of the words [.., n] and its index, counted from `start`.

    The words are integers of any size. The hashes are summed, so every bit must affect all bits of a hash. AdamW's
    first step moves all entries between two powers of two by the same number of roundings. With linear hashes of word
    and index the sum then stayed the same in 13 % of shards of 4 entries (+ - - +).
    """
    places = torch.arange(start + 1, start + 1 + words.shape[-1], device=words.device)
    return splitmix.mix_in_place(places * splitmix.to_int64(splitmix.GAMMA) + words)


def _would_move(weight: Tensor, gradient: Tensor, lr: float, eps: float) -> bool:
    """Returns whether some element's update is far above the rounding of its weight."""
    w, g = weight.detach().reshape(-1), gradient.detach().reshape(-1)
    rounding = ROUNDING_MARGIN * torch.finfo(w.dtype).eps
    chunk = CHUNK[w.device.type]
    for start in range(0, w.numel(), chunk):
        size = g[start : start + chunk].float().abs()
        update = lr * size / (size + eps)
        if bool((update > rounding * w[start : start + chunk].float().abs()).logical_and(update > 0).any()):
            return True
    return False
