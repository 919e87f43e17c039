"""Chooses the next token: a pure function of logits, parameters and a key, independent of rank and batch.

Dimensions: `S` sequences, `V` columns of the vocabulary on this rank, `W` 64-bit words of noise, `C` candidates.

**Noise.** Token `argmax_v (z_v + g_v)` is a draw from softmax(z) if the `g_v = -log(-log u_v)` are independent
(Gumbel-max; Maddison et al., 2014, 1411.0030). `u_v` is the half `v % 2` of word `v // 2` of a SplitMix64 sequence
(Steele et al., 2014). The sequence starts at a hash of (seed, step, prompt, sample, position). No generator has a
state. So a draw depends neither on the rest of the batch, nor on how ranks split the columns, nor on the device.
Layouts round logits differently. In fp32 that turns a near tie, and with it the choice, in about one of a million
tokens.

**Filters** apply in the order of transformers:

- the temperature divides
- top_k keeps the k largest
- top_p keeps the fewest largest tokens with a probability of at least p together, normalised over the result of top_k
  (Holtzman et al., 2020)
- min_p keeps tokens with at least that fraction of the largest probability (Nguyen et al., 2024)

vLLM applies min_p first. The last three are lower bounds of `z`, so ranks must agree on only one number per sequence.
Exact ties with a bound are kept.

**Tensor parallelism.** Without top_k and top_p each rank gives four numbers per sequence. With them it also gives its
largest `C` logits. Their bound is exact once the sum of probabilities is reached above the smallest logit that every
rank has given. Until then `C` grows. Only very flat distributions need whole rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.engine.logprobs import VocabShard, gathered
from mrl.engine.splitmix import GAMMA, WORD, mix_in_place, mix_int, to_int64
from mrl.kernels import head, operators
from mrl.ops.devices import tensor_on

_CANDIDATES = 128
CANDIDATE_FACTOR = 8
"""The factor of candidates after too few of them."""
_NOISE_WORDS_ON_CPU = 2**15  # words computed at once, to stay in a CPU's caches
_NOISE_WORDS = (
    2**28
)  # on a GPU without Triton a step's noise is one chunk; temporaries take 16 bytes a word, at most 4 GiB


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Holds the parameters of sampling. The filters mean nothing at temperature 0."""

    temperature: float = 1.0  # divides the logits; 0 takes the most probable token (of equal ones the lowest id)
    top_k: int = 0  # 0 for all
    top_p: float = 1.0  # in (0, 1], 1 for all
    min_p: float = 0.0  # in [0, 1], 0 for all

    def __post_init__(self) -> None:
        assert self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1 and 0 <= self.min_p <= 1, self

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


GREEDY = SamplingParams(temperature=0.0)


class SamplingKey(NamedTuple):
    """Determines the noise of a completion: 64-bit integers. Two completions of one key and prompt are equal."""

    seed: int = 0
    step: int = 0
    prompt: int = 0
    sample: int = 0


def key_hash(key: Sequence[int]) -> int:
    """Returns 64 bits of a key: the part of `noise_key` that is the same at all positions."""
    word = 0
    for part in key:
        word = mix_int((word + GAMMA + part) & WORD)
    return word


def noise_key(key: Sequence[int], position: int) -> int:
    """Returns 64 bits for the token at `position` of its sequence, prompt included, so that turns of a conversation
    differ."""
    return mix_int((key_hash(key) + GAMMA + position) & WORD)


def noise_keys(hashes: Tensor, positions: Sequence[int]) -> Tensor:
    """Returns [S] int64 on the CPU: `noise_key` of each sequence, from the signed hash [S] of its key."""
    return mix_in_place(hashes + torch.tensor(positions) + to_int64(GAMMA))


def random_bits(keys: Tensor, start: int, count: int) -> Tensor:
    """Returns [S, count] int32 for the vocabulary ids `start, start + 1, ...`. keys: [S] int64."""
    first, end = start // 2, (start + count + 1) // 2
    words = torch.arange(first + 1, end + 1, device=keys.device) * to_int64(GAMMA)
    return mix_in_place(keys[:, None] + words).view(torch.int32)[:, start - 2 * first :][:, :count]


def gumbel(keys: Tensor, start: int, count: int) -> Tensor:
    """Returns [S, count] fp32 standard Gumbel noise of the vocabulary ids `start, start + 1, ...`. keys: [S] int64.

    It is `-log(-log1p(-w))` for `w` uniform in (0, 1). The largest values come from w near 0, and there fp32 is
    precise.
    """
    words = _NOISE_WORDS_ON_CPU if keys.device.type == "cpu" else _NOISE_WORDS
    rows = max(1, words // (count // 2 + 1))
    out = torch.empty(keys.shape[0], count, device=keys.device)
    for keys_here, out_here in zip(keys.split(rows), out.split(rows), strict=True):
        out_here.copy_(random_bits(keys_here, start, count) & 0x7FFFFFFF).add_(0.5).mul_(2.0**-31)
        out_here.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()
    return out


@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """Holds the sampling parameters of a batch: tensors [S] on the device of the logits, None if no row has the
    parameter."""

    noise_keys: Tensor | None  # int64
    random: Tensor | None  # bool: the rows that are not greedy
    temperature: Tensor | None  # 1 for greedy rows
    top_k: Tensor | None  # 0: none
    top_p: Tensor | None  # 1: none
    min_p: Tensor | None  # 0: none
    candidates: int  # how many of the largest logits to search for the filters' bounds at first

    @property
    def filtered(self) -> bool:
        return self.top_k is not None or self.top_p is not None or self.min_p is not None

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], noise_keys: Sequence[int] | Tensor, device: torch.device
    ) -> "SamplingRows":
        """Returns the rows of `params`. noise_keys: from `noise_key` or `noise_keys`, one a row."""
        # The rows of a run are alike. A copy of thousands of equal numbers takes the host longer than a fill kernel.
        alike = not params or params.count(params[0]) == len(params)
        kinds = params[:1] if alike else params
        neutral = SamplingParams()
        drawn = [neutral if p.greedy else p for p in kinds]

        def column(values: list, unset: float, dtype: torch.dtype) -> Tensor | None:
            if all(v == unset for v in values):
                return None
            if alike:
                return torch.full((len(params),), values[0], dtype=dtype, device=device)
            return tensor_on(device, values, dtype)

        greedy = [p.greedy for p in kinds]
        words = noise_keys if isinstance(noise_keys, Tensor) else [to_int64(k) for k in noise_keys]
        return cls(
            None if all(greedy) else tensor_on(device, words),
            None if all(greedy) else column([not g for g in greedy], True, torch.bool),
            column([p.temperature for p in drawn], 1.0, torch.float32),
            column([p.top_k for p in drawn], 0, torch.int64),
            column([p.top_p for p in drawn], 1.0, torch.float64),
            column([p.min_p for p in drawn], 0.0, torch.float32),
            max((p.top_k or (_CANDIDATES if p.top_p < 1 else 0) for p in drawn), default=0),
        )

    def with_keys(self, noise_keys: Tensor) -> "SamplingRows":
        """Returns the same parameters with other noise keys [S], from `noise_keys`."""
        if self.noise_keys is None:
            return self
        return dataclasses.replace(self, noise_keys=tensor_on(self.noise_keys.device, noise_keys))


def choose(logits: Tensor, rows: SamplingRows, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Returns (next token [S] int64, its log-probability [S] fp64) from local columns [S, V] of the logits.

    The log-probability is the model's at the temperature, before any filter: log_softmax(logits / temperature). A
    trainer computes the same (at temperature 0 as at 1). The same on every rank of the group. With top_p it waits for a
    GPU; `choose_among` does not.
    """
    count = rows.candidates
    while True:
        token, log_prob, exact = choose_among(logits, rows, shard, count)
        if exact is None or bool(exact.all()):
            return token, log_prob
        count *= CANDIDATE_FACTOR


def choose_among(
    logits: Tensor, rows: SamplingRows, shard: VocabShard, count: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Does what `choose` does, and looks for filters' bounds only among the `count` largest logits of each rank.

    The third result is [S] bool: whether these were enough, the same on every rank. It is None if they surely were. If
    not, call again with `CANDIDATE_FACTOR` times as many.
    """
    z, temperature = logits[:, : shard.num_valid(logits.shape[1])], rows.temperature
    kernel = operators.supports(z)
    if not kernel or rows.filtered:
        z, temperature = _scaled(z, temperature), None
    bound, exact = lower_bound(z, rows, shard.group, columns=logits.shape[1], count=count)
    if kernel:
        part = head.draw(z, shard.start, rows.noise_keys, rows.random, temperature, bound)
    else:
        part = _draw(z, rows, bound, shard.start)
    if shard.group is None or dist.get_world_size(shard.group) == 1:
        return part[1].long(), part[2] - part[3], exact
    best, token, chosen, total = gathered(part, shard.group).unbind(1)  # each [ranks, S]
    owner = best.argmax(dim=0, keepdim=True)  # the first of equals: the lowest id
    token, chosen = (t.gather(0, owner)[0] for t in (token, chosen))
    return token.long(), chosen - total.logsumexp(dim=0), exact


def _scaled(z: Tensor, temperature: Tensor | None) -> Tensor:
    """Returns the logits in fp32, divided by the temperatures."""
    z = z.float()
    if z.shape[1] == 0:  # this rank holds nothing but padding
        z = z.new_full((z.shape[0], 1), -torch.inf)
    return z if temperature is None else z / temperature[:, None]


def _draw(z: Tensor, rows: SamplingRows, bound: Tensor | None, start: int) -> Tensor:
    """Returns [4, S] fp64: the largest score, the global id of its column, its `z`, and the log-sum-exp."""
    score = z
    if rows.noise_keys is not None:
        noise = gumbel(rows.noise_keys, start, z.shape[1])
        if rows.random is not None:
            noise *= rows.random[:, None]
        score = noise.add_(z)
    if bound is not None:
        score = score.masked_fill(z < bound[:, None], -torch.inf)
    best, token = score.max(dim=-1)
    chosen = z.gather(1, token[:, None])[:, 0]
    return torch.stack([t.double() for t in (best, token + start, chosen, z.logsumexp(-1))])


def lower_bound(
    z: Tensor, rows: SamplingRows, group: dist.ProcessGroup | None, *, columns: int, count: int
) -> tuple[Tensor | None, Tensor | None]:
    """Returns [S] fp32: the smallest logit that top_k, top_p and min_p keep; None if no row has them.

    The second result is [S] bool: whether the `count` largest of each rank were enough; None if they surely were. z:
    [S, <= columns] logits over the temperature. columns: the most that any rank has.
    """
    bound = None
    if rows.min_p is not None:
        largest = gathered(z.amax(dim=-1), group).amax(dim=0)
        bound = largest + rows.min_p.log()  # log 0 = -inf bounds nothing
    if rows.top_k is None and rows.top_p is None:
        return bound, None
    top, exact = _top_bound(z, rows, group, min(count, columns))
    bound = top if bound is None else torch.maximum(bound, top)
    # top_k alone is exact, because there are at least k candidates
    return bound, None if rows.top_p is None or count >= columns else exact


def _top_bound(z: Tensor, rows: SamplingRows, group: dist.ProcessGroup | None, count: int) -> tuple[Tensor, Tensor]:
    """Returns the bound of top_k and top_p [S], and whether it is exact [S], from the `count` largest of each rank."""
    values = z.topk(min(count, z.shape[1]), dim=-1).values
    values = torch.nn.functional.pad(values, (0, count - values.shape[1]), value=-torch.inf)
    values = gathered(values, group)  # [ranks, S, C]
    given = values[..., -1].amax(dim=0)  # logits that are not here are no larger
    values = values[0] if len(values) == 1 else values.permute(1, 0, 2).flatten(1).sort(descending=True).values
    bound = torch.full_like(given, -torch.inf)
    if rows.top_k is not None:
        kth = values.gather(1, (rows.top_k - 1).clamp(0, values.shape[1] - 1)[:, None])[:, 0]
        bound = kth.where(rows.top_k > 0, bound)
    if rows.top_p is None:
        return bound, torch.ones_like(bound, dtype=torch.bool)
    largest = values[:, :1]
    local = (z - largest).exp_().masked_fill_(z < bound[:, None], 0.0).sum(-1, dtype=torch.float64)
    mass = (values - largest).exp_() / gathered(local, group).sum(dim=0)[:, None]
    reached = mass.cumsum(-1)
    kept = ((reached - mass) < rows.top_p[:, None]) & (values >= bound[:, None])
    last = kept.sum(-1, keepdim=True) - 1
    at_last, reached = values.gather(1, last)[:, 0], reached.gather(1, last)[:, 0]
    off = rows.top_p >= 1
    exact = off | (bound > -torch.inf) | ((at_last >= given) & (reached >= rows.top_p))
    return bound.where(off, at_last), exact
