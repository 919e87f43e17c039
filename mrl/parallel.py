"""Degrees of parallelism and the coordinates of a rank, as arithmetic: no process group, no torch.

Ranks are laid out as megatron-core does it (order `tp-cp-ep-dp-pp`, the fastest axis first):
`rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp * pp_rank))` for the dense layers, and
`rank = etp_rank + etp * (ep_rank + ep * (edp_rank + edp * pp_rank))` for the experts.
"""

from __future__ import annotations

import dataclasses
import math

from mrl.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ParallelDims:
    """The degrees of one engine's layout.

    tp: tensor parallel, splits each weight matrix. cp: context parallel, splits each sequence.
    pp: pipeline parallel, splits the layers. vpp: model chunks a pipeline rank holds.
    ep: expert parallel, splits the experts of an MoE layer over ranks of tp x cp x dp.
    etp: tensor parallel of the experts. sp: sequence parallel, splits activations between tp regions.
    dp: data parallel, what is left of the world: `world_size / (tp * cp * pp)`.
    """

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "cp", "ep", "etp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.parallel.{name}", getattr(self, name), "is too few", "give at least 1")
        if self.world_size % self.model_size:
            raise ConfigError(
                "engine.parallel",
                why=(
                    f"tp*pp*cp ({self.tp}*{self.pp}*{self.cp} = {self.model_size}) does not divide the "
                    f"{self.world_size} processes"
                ),
                fix=f"use a multiple of {self.model_size} processes, or smaller degrees",
            )
        per_stage = self.world_size // self.pp
        if per_stage % (self.ep * self.etp):
            raise ConfigError(
                "engine.parallel",
                why=(
                    f"ep*etp ({self.ep}*{self.etp} = {self.ep * self.etp}) does not divide the {per_stage} "
                    "processes of a pipeline stage (tp*cp*dp)"
                ),
                fix=f"use one of {divisors_near(per_stage, self.ep * self.etp)} for the product",
            )
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError("engine.parallel.vpp", self.vpp, "needs pp of 2 or more", "set pp, or vpp to 1")
        if self.sp and self.tp == 1:
            raise ConfigError("engine.parallel.sp", True, "needs tp of 2 or more", "set sp to auto or false")

    @property
    def model_size(self) -> int:
        """Ranks that hold one replica of the model and one sequence: tp * pp * cp."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        return self.world_size // self.model_size

    @property
    def edp(self) -> int:
        """Replicas of an expert."""
        return self.world_size // (self.pp * self.ep * self.etp)

    @property
    def experts_span_replicas(self) -> bool:
        """Whether an MoE layer needs ranks of several dense replicas (dp or cp): ep*etp ranks hold its experts."""
        return self.tp % (self.ep * self.etp) != 0

    def places_of(self, length: int) -> int:
        """Returns the fewest places of a sequence, over all context-parallel ranks: each has two segments of it."""
        unit = 2 * self.cp if self.cp > 1 else 1
        return -(-length // unit) * unit

    def coordinates(self, rank: int) -> "Coordinates":
        """Returns the position of `rank` (0 <= rank < world_size) on each axis."""
        tp_rank, rest = rank % self.tp, rank // self.tp
        cp_rank, rest = rest % self.cp, rest // self.cp
        dp_rank, pp_rank = rest % self.dp, rest // self.dp
        etp_rank, rest = rank % self.etp, rank // self.etp
        ep_rank, rest = rest % self.ep, rest // self.ep
        return Coordinates(tp_rank, cp_rank, dp_rank, pp_rank, etp_rank, ep_rank, rest % self.edp)

    def describe(self) -> str:
        """Returns the layout in a word, as in `tp2xpp2xdp2`; `dp1` when nothing is split."""
        axes = [(n, getattr(self, n)) for n in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")]
        if self.etp == self.tp:
            axes = [a for a in axes if a[0] != "etp"]
        parts = [f"{n}{d}" + ("+sp" if n == "tp" and self.sp else "") for n, d in axes if d > 1]
        return "x".join(parts) or "dp1"


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """A rank's position on each axis."""

    tp_rank: int = 0
    cp_rank: int = 0
    dp_rank: int = 0
    pp_rank: int = 0
    etp_rank: int = 0
    ep_rank: int = 0
    edp_rank: int = 0


def stage_layers(num_layers: int, pp: int, vpp: int = 1) -> list[list[int]]:
    """Returns the layer indices of each virtual stage, in pipeline order: `pp * vpp` lists.

    Virtual stage `v * pp + p` is chunk `v` of pipeline rank `p`. When the count does not divide, the surplus goes to
    the middle stages: the first holds the embedding and the last the output layer.
    """
    stages = pp * vpp
    if num_layers < stages:
        raise ConfigError(
            "engine.parallel",
            why=f"pp*vpp ({pp}*{vpp} = {stages}) is more than the model's {num_layers} layers",
            fix=f"use at most {num_layers}",
        )
    base, surplus = divmod(num_layers, stages)
    order = sorted(range(stages), key=lambda s: (s in (0, stages - 1), s))
    sizes = [base + (s in order[:surplus]) for s in range(stages)]
    starts = [sum(sizes[:s]) for s in range(stages)]
    return [list(range(a, a + n)) for a, n in zip(starts, sizes, strict=True)]


def divisors(number: int) -> list[int]:
    """Returns the divisors of `number`, in order; above 10^12 without those between 10^6 and a millionth of it."""
    small = [n for n in range(1, min(math.isqrt(number), 10**6) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def divisors_near(number: int, near: int, most: int = 12) -> str:
    """Returns divisors of `number` in words: at most `most`, the ones nearest to `near`."""
    found = sorted(sorted(divisors(number), key=lambda n: abs(n - near))[:most])
    return ", ".join(map(str, found))
