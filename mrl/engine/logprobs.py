"""Computes log-probabilities of labels, and entropies, from vocabulary-parallel logits without gathering them.

Dimensions: `T` tokens, `R` tokens with wanted log-probs, `K` labels of a token, `H` hidden size, `V` columns of the
vocabulary on this rank (all of them without tensor parallelism), `C` tokens of a chunk.

For logits `z` (already divided by the temperature), with `m = max z` and `s = sum exp(z - m)` over the vocabulary:

    log p(y) = z_y - m - log s            entropy = m + log s - sum p z = log s - sum p (z - m)
    d log p(y) / dz_i = [i == y] - p_i    d entropy / dz_i = -p_i (log p_i + entropy)

Each rank computes `m`, `s`, `sum exp(z - m) (z - m)` and `z_y` of its own columns, chunk by chunk. Two all-reduces join
them, of one and of `2 + 2 K` floats per token. Columns at or past `vocab_size` are padding and take no part. The
backward pass computes the softmax again in chunks, so no fp32 [T, V] exists. Logits that are kept are never written to.

On a GPU one kernel reads a chunk's logits (mrl/kernels/head.py), and one writes their gradient over those that the
backward pass has computed again. So a chunk takes no memory but its logits. The gradient of the weight is added to its
fp32 `main_grad` if it has one: see mrl/kernels/main_grad.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mrl.kernels import head, operators
from mrl.kernels.main_grad import main_grad_of, mark_added

EntropyMode = Literal["none", "detached", "differentiable"]


@dataclasses.dataclass(frozen=True)
class VocabShard:
    """Holds the columns of the vocabulary that this rank's logits have."""

    vocab_size: int  # entries of the real vocabulary, without padding
    start: int = 0  # global index of the first local column
    group: dist.ProcessGroup | None = None  # the ranks with the other columns; None if this rank has all

    def num_valid(self, columns: int) -> int:
        """Returns how many of the `columns` local ones are not padding."""
        return min(max(self.vocab_size - self.start, 0), columns)


@dataclasses.dataclass(frozen=True)
class LogitRule:
    """Computes logits from the output layer's numbers: `scale * x`, then `softcap * tanh(z / softcap)` if set."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the logits, in x's dtype; a new tensor if they differ from x."""
        z = x if self.scale == 1.0 else x * self.scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    def backward(self, grad: Tensor, z: Tensor, temperature: float) -> Tensor:
        """Returns the gradient of x from the gradient of the logits, in place. The logits are `z * temperature`."""
        if self.softcap is not None:
            grad *= 1 - (z * (temperature / self.softcap)).square()
        return grad if self.scale == 1.0 else grad.mul_(self.scale)


PLAIN = LogitRule()


def log_probs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    shard: VocabShard,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    entropy: EntropyMode = "none",
    chunk: int | None = None,
    keep_logits: bool | None = None,
    reduce_hidden_grad: bool = True,
    rule: LogitRule = PLAIN,
    first_temperature: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the log-prob of each label under `logits = rule(hidden @ weight.T)`, and entropies if asked.

    hidden: [T, H], the same on every rank of the group. weight: [V, H] local rows of the output layer. labels: [T]
    global ids, or [T, K] for several log-probs of one distribution. chunk: tokens whose logits are computed at once;
    None chooses by size. rows: [R] int64, different tokens. Only these have logits, and all others give 0. None: all.

    The log-probs have the labels' shape, the entropies [T]. They are fp32 (fp64 for fp64) and the same on every rank of
    the group. The entropy is None for "none" and carries no gradient for "detached". A label that no rank holds gives
    NaN.

    keep_logits: keep the logits (in hidden's dtype) for the backward pass instead of computing them again; None keeps
    them if they are small. reduce_hidden_grad: sum hidden's gradient over the group. False leaves each rank's part to a
    caller with a backward that reduces it (sequence parallelism reduce-scatters). first_temperature: the temperature of
    the first of several labels, if it is another one. It costs a second softmax.
    """
    if first_temperature not in (None, temperature):
        of = functools.partial(
            log_probs_from_hidden, hidden, weight, shard=shard, rows=rows, chunk=chunk, keep_logits=keep_logits,
            reduce_hidden_grad=reduce_hidden_grad, rule=rule,
        )  # fmt: skip
        of_first, _ = of(labels[:, :1], temperature=first_temperature)
        of_rest, entropies = of(labels[:, 1:], temperature=temperature, entropy=entropy)
        return torch.cat([of_first, of_rest], dim=1), entropies
    columns = weight.shape[0]
    count = hidden.shape[0] if rows is None else rows.shape[0]
    if keep_logits is None:
        keep_logits = count * columns <= _KEEP_LOGITS_ELEMENTS
    spec = _Spec(shard, temperature, entropy, chunk or _chunk_tokens(columns, hidden), rule)
    wanted = labels if rows is None else labels[rows]
    results = _HiddenLogProbs.apply(hidden, weight, wanted, rows, spec, keep_logits, reduce_hidden_grad)
    if rows is not None:
        results = tuple(v.new_zeros(hidden.shape[0], *v.shape[1:]).index_copy(0, rows, v) for v in results)
    return results[0], None if entropy == "none" else results[1]


@torch.no_grad()
def top_log_probs(
    hidden: Tensor,
    weight: Tensor,
    top: int,
    *,
    shard: VocabShard,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    rule: LogitRule = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Returns the `top` largest log-probs [T, top] of each token, largest first, and their global ids [T, top].

    Arguments: see `log_probs_from_hidden`. If the vocabulary has fewer, the rest is -inf with id 0. The same on every
    rank of the group, without gradients.
    """
    if rows is not None:
        found = top_log_probs(hidden[rows], weight, top, shard=shard, temperature=temperature, chunk=chunk, rule=rule)
        values, ids = (v.new_zeros(hidden.shape[0], top).index_copy(0, rows, v) for v in found)
        return values, ids
    spec = _Spec(shard, temperature, "none", chunk or _chunk_tokens(weight.shape[0], hidden), rule)
    parts, found = [], [torch.zeros(0, top, dtype=torch.int64, device=hidden.device)]
    for part in _chunks(hidden.shape[0], spec.chunk):
        z = spec.scaled(hidden[part] @ weight.t())
        found.append(_largest(z, top, shard))
        parts.append(_local_sums(z, found[-1], spec))
        del z
    ids = torch.cat(found)
    values = _join_parts(parts, ids, hidden, spec)[0].masked_fill(ids < 0, -torch.inf)
    return values, ids.where(values != -torch.inf, torch.zeros_like(ids))


def _largest(z_CV: Tensor, top: int, shard: VocabShard) -> Tensor:
    """Returns the global ids [C, top] of the `top` largest of each row of all ranks; -1 if there are fewer."""
    values, ids = z_CV.topk(min(top, z_CV.shape[1]), dim=1)
    lacking = (0, top - values.shape[1])
    values, ids = F.pad(values, lacking, value=-torch.inf), F.pad(ids + shard.start, lacking, value=-1)
    if shard.group is not None:
        values, ids = (gathered(t, shard.group).permute(1, 0, 2).flatten(1) for t in (values, ids))
        ids = ids.gather(1, values.topk(top, dim=1).indices)
    return ids


def gathered(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns [ranks, ...] of the group, in rank order."""
    if group is None or dist.get_world_size(group) == 1:
        return tensor[None]
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)


_KEEP_LOGITS_ELEMENTS = 2**24


def _chunk_tokens(columns: int, hidden: Tensor) -> int:
    """Returns how many tokens have fp32 logits of 16 MB on a CPU (about its caches) and 256 MB on a GPU (to keep it
    busy), or logits of 512 MB for the kernels: the torch code has three such tensors at once."""
    elements = 2**22 if hidden.device.type == "cpu" else 2**26
    elements = 2**29 // hidden.element_size() if not hidden.is_cpu and operators.supports(hidden) else elements
    return max(1, elements // max(columns, 1))


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Holds the arguments of the autograd function that are no tensors."""

    shard: VocabShard
    temperature: float
    entropy: EntropyMode
    chunk: int
    rule: LogitRule

    def scaled(self, logits_CV: Tensor) -> Tensor:
        """Returns the real columns as they are for the kernels, which scale them. Otherwise by the rule, divided by the
        temperature, in fp32 or better; new if that changes anything."""
        logits_CV = logits_CV[:, : self.shard.num_valid(logits_CV.shape[1])]
        if operators.supports(logits_CV):
            return logits_CV
        logits_CV = self.rule(logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)))
        return logits_CV / self.temperature if self.temperature != 1.0 else logits_CV

    @property
    def numbers(self) -> list[float]:
        """Returns the rule and the temperature as the kernels take them."""
        return [self.rule.scale, self.rule.softcap or 0.0, self.temperature]


def _chunks(total: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, total)) for start in range(0, total, chunk)]


def _as_columns(values: Tensor) -> Tensor:
    """Returns [C, K] from [C] or [C, K]."""
    return values[:, None] if values.dim() == 1 else values


def _local_sums(z_CV: Tensor, labels_C: Tensor, spec: _Spec) -> Tensor:
    """Returns the maximum and the sums of these columns [3 + 2 K, C].

    The sums are sum exp(z-m), sum exp(z-m)(z-m), z of each label, and whether each label is here. labels_C: [C] or [C,
    K]. The second sum is 0 if no entropy is asked for. A kernel that sees the whole vocabulary joins them: it returns
    the log-sum-exp, the entropy and the log-prob of each label [2 + K, C].
    """
    columns, labels_CK = z_CV.shape[1], _as_columns(labels_C)
    if operators.supports(z_CV):
        shard, entropy = spec.shard, spec.entropy != "none"
        labels_CK = labels_CK.contiguous()
        return head.head_sums(z_CV, labels_CK, shard.start, spec.numbers, entropy, shard.group is None)
    if columns == 0:  # this rank holds nothing but padding
        sums = z_CV.new_zeros(2 + 2 * labels_CK.shape[1], z_CV.shape[0])
        return torch.cat([z_CV.new_full((1, z_CV.shape[0]), -torch.inf), sums])
    max_C = z_CV.amax(dim=1)
    shifted = z_CV - max_C[:, None]
    exp = shifted.exp_() if spec.entropy == "none" else shifted.exp()
    local = labels_CK - spec.shard.start
    here = (local >= 0) & (local < columns)
    target = z_CV.gather(1, local.clamp(0, columns - 1))
    weighted = torch.zeros_like(max_C) if spec.entropy == "none" else torch.linalg.vecdot(exp, shifted)
    sums = torch.stack([max_C, exp.sum(1), weighted])
    return torch.cat([sums, target.where(here, target.new_zeros(())).t(), here.to(z_CV.dtype).t()])


def _join(sums: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, ...]:
    """Joins the ranks' columns. Returns log-probs [T, K], and [T] each: entropy, the largest logit `m`, and `log s`."""
    local_max, total, weighted = sums[:3]
    largest, sums = local_max, sums[1:]
    if group is not None:
        largest = local_max.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        below = (local_max - largest).where(total > 0, torch.zeros_like(total))
        scale = below.exp()
        sums = torch.cat([torch.stack([total * scale, (weighted + below * total) * scale]), sums[2:]])
        dist.all_reduce(sums, group=group)
        total, weighted = sums[:2]
    target, here = sums[2:].chunk(2)
    log_total = total.log()
    log_probs = (target - largest - log_total).where(here == 1, torch.full_like(target, torch.nan))
    return log_probs.t(), log_total - weighted / total, largest, log_total


def _logits_gradient(
    z_CV: Tensor,
    labels_C: Tensor,
    lse_C: Tensor,
    grad_C: Tensor,
    entropy_terms: tuple[Tensor, Tensor] | None,
    spec: _Spec,
) -> Tensor:
    """Returns the gradient of the unscaled logits [C, V valid].

    grad_C: the gradient of the log-probs, [C] or [C, K] as the labels are. entropy_terms: (entropy [C], its gradient
    [C]) or None. A kernel writes it over z_CV, in that dtype.
    """
    labels_CK, grad_CK = _as_columns(labels_C), _as_columns(grad_C)
    if operators.supports(z_CV):
        entropy, entropy_grad = entropy_terms or (None, None)
        given = (t if t is None else t.contiguous() for t in (labels_CK, lse_C, grad_CK, entropy, entropy_grad))
        head.head_gradient_(z_CV, *given, spec.shard.start, spec.numbers)
        return z_CV
    sum_C = grad_CK.sum(1)
    log_p = z_CV - lse_C[:, None]
    if entropy_terms is None:
        grad = log_p.exp_()
        grad *= -sum_C[:, None]
    else:
        grad = log_p.exp()
        entropy_C, entropy_grad_C = entropy_terms
        log_p += entropy_C[:, None]
        log_p *= -entropy_grad_C[:, None]
        log_p -= sum_C[:, None]
        grad *= log_p
    local = labels_CK - spec.shard.start
    here = (local >= 0) & (local < z_CV.shape[1])
    if z_CV.shape[1]:
        grad.scatter_add_(1, local.clamp(0, z_CV.shape[1] - 1), grad_CK * here)
    grad = grad if spec.temperature == 1.0 else grad.div_(spec.temperature)
    return spec.rule.backward(grad, z_CV, spec.temperature)


class _HiddenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: Tensor | None,
        spec: _Spec,
        keep: bool,
        reduce_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.rows, ctx.total = rows, hidden.shape[0]
        hidden = hidden if rows is None else hidden[rows]
        parts, kept = [], []
        for part in _chunks(hidden.shape[0], spec.chunk):
            logits = hidden[part] @ weight.t()
            parts.append(_local_sums(spec.scaled(logits), labels[part], spec))
            if keep:
                kept.append(logits)
            del logits  # else the next chunk's would be there beside them
        log_probs, entropy, lse = _join_parts(parts, labels, hidden, spec)
        ctx.save_for_backward(hidden, weight, labels, lse, entropy, *kept)
        ctx.spec, ctx.reduce_grad = spec, reduce_grad
        ctx.weight = weight if weight.is_leaf else None  # a merged or cast one goes with the saved tensors
        if spec.entropy != "differentiable":
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, lse, entropy, *kept = ctx.saved_tensors
        spec = ctx.spec
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        valid = spec.shard.num_valid(weight.shape[0])
        real = weight[:valid]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        main_grad = main_grad_of(ctx.weight) if needs_weight and operators.supports(weight) else None
        grad_weight = main_grad
        if needs_weight and main_grad is None:  # accumulated over chunks in fp32 or better
            grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for number, part in enumerate(_chunks(hidden.shape[0], spec.chunk)):
            logits = kept[number] if kept else hidden[part] @ weight.t()
            terms = (entropy[part], grad_entropy[part]) if spec.entropy == "differentiable" else None
            z = spec.scaled(logits.clone() if kept and operators.supports(logits) else logits)
            grad = _logits_gradient(z, labels[part], lse[part], grad_log_prob[part], terms, spec).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, real, out=grad_hidden[part])
            if grad_weight is not None:
                _accumulate(grad_weight[:valid], grad.t(), hidden[part])
            del logits, z, grad
        if grad_hidden is not None and ctx.rows is not None:
            grad_hidden = grad_hidden.new_zeros(ctx.total, hidden.shape[1]).index_copy_(0, ctx.rows, grad_hidden)
        if needs_hidden and spec.shard.group is not None and ctx.reduce_grad:
            dist.all_reduce(grad_hidden, group=spec.shard.group)
        if main_grad is not None:
            mark_added(ctx.weight)
            grad_weight = torch.empty_like(weight)  # megatron's hook, which drops it, wants one
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None, None


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left @ right` to `total` in place, whatever the dtype of the factors."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif not left.is_cpu:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _join_parts(parts: list[Tensor], labels: Tensor, like: Tensor, spec: _Spec) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probs in the shape of the labels, entropy and log-sum-exp of all chunks.

    Without tokens they are empty tensors (the ranks of a group have the same tokens).
    """
    if not parts:
        empty = like.new_zeros(0, dtype=torch.promote_types(like.dtype, torch.float32))
        return empty.new_zeros(labels.shape), empty.clone(), empty.clone()
    sums = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if operators.supports(like) and spec.shard.group is None:
        return sums[2:].t().reshape(labels.shape), sums[1], sums[0]
    log_probs, entropy, largest, log_total = _join(sums, spec.shard.group)
    return log_probs.reshape(labels.shape), entropy, largest + log_total
