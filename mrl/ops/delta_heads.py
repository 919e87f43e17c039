"""Computes a gated delta net between its linear layers, for both engines: convolution, rates, rule, and states.

Dimensions are those of `mrl.ops.delta_rule`. Inputs of a key head are its query and key, the values of the heads that
share it, and what beta and decay are made of: 2K + R*V + 2R channels.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.ops import devices
from mrl.ops.delta_rule import CausalConvolution, Chunks, chunked_rule, one_token_rule, unit
from mrl.ops.kv_cache import CachedStep


@dataclasses.dataclass(frozen=True)
class DeltaHeads:
    """Holds the parameters of G key heads."""

    weight: Tensor  # [G, 2K + R*V, W] of the convolution
    a_log: Tensor  # [G, R]
    dt_bias: Tensor  # [G, R]
    key: int  # K
    repeatable: bool = False  # as of `chunked_rule`

    def part(self, rank: int, ranks: int) -> DeltaHeads:
        """Returns those of one of `ranks` equal parts of the heads."""
        weight, a_log, dt_bias = (p.chunk(ranks)[rank] for p in (self.weight, self.a_log, self.dt_bias))
        return DeltaHeads(weight, a_log, dt_bias, self.key, self.repeatable)

    def __call__(self, inputs: Tensor, chunks: Chunks) -> Tensor:
        """Returns outputs [T, G, R, V] in the dtype of the inputs [T, G, 2K + R*V + 2R]."""
        mixed, beta, decay = self._split(inputs)
        mixed = F.silu(CausalConvolution.apply(mixed, self.weight.flatten(0, 1), chunks.positions))
        of_rule = self._of_rule(mixed, beta, decay)
        return chunked_rule(*of_rule, chunks, repeatable=self.repeatable)[0].to(inputs.dtype)

    def _split(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the input [T, G * (2K + R*V)] of the convolution, and what beta and decay are made of [T, G, R]."""
        sharing = self.a_log.shape[1]
        mixed, beta, decay = inputs.split([self.weight.shape[1], sharing, sharing], dim=-1)
        return mixed.flatten(1), beta, decay

    def _of_rule(self, mixed: Tensor, beta: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns the arguments of the rule from the convolution's output."""
        query, key, value = mixed.unflatten(1, (len(self.a_log), -1)).tensor_split([self.key, 2 * self.key], dim=-1)
        value = value.unflatten(-1, (self.a_log.shape[1], -1))
        decay = -self.a_log.float().exp() * F.softplus(decay.float() + self.dt_bias.float())
        return unit(query), unit(key), value, decay, beta.sigmoid()

    def cached(self, layer: int, inputs: Tensor, step: CachedStep) -> Tensor:
        """Returns outputs for the new tokens of a step, zeros for padding behind them, and keeps the states after
        them."""
        (heads, channels, kernel), sharing = self.weight.shape, self.a_log.shape[1]
        mixed, beta, decay = self._split(inputs)
        empty = torch.empty(heads, sharing, self.key, (channels - 2 * self.key) // sharing, device=inputs.device)
        before, states = step.cache.states_of(layer, mixed.new_empty(mixed.shape[1], kernel - 1), empty)
        weight = self.weight.flatten(0, 1)
        count, total = step.decoding, step.tokens
        out = torch.zeros(len(inputs), *empty.shape[:2], empty.shape[3], device=inputs.device)
        if count:
            first = (step.positions[:count] == 0)[:, None, None]
            window = torch.cat([before[:count].masked_fill(first, 0), mixed[:count, :, None]], dim=-1)
            before[:count] = window[..., 1:]
            convolved = F.silu((window.float() * weight.float()).sum(-1).to(mixed.dtype))
            of_rule = self._of_rule(convolved, beta[:count], decay[:count])
            out[:count], states[:count] = one_token_rule(
                *of_rule, states[:count].masked_fill(first[..., None, None], 0)
            )
        if count < total:
            rows, several = slice(count, len(step.new_lengths)), slice(count, total)
            first = devices.tensor_on(inputs.device, [old == 0 for old in step.cached_lengths[rows]], torch.bool)
            leads = before[rows].masked_fill(first[:, None, None], 0)
            parts = mixed[several].split(step.new_lengths[rows])
            parts = [torch.cat([lead.t(), part]) for lead, part in zip(leads, parts, strict=True)]
            for row, part in enumerate(parts, count):
                before[row] = part[len(part) - kernel + 1 :].t()
            long = torch.cat(parts)
            behind = torch.full((len(long),), kernel, device=long.device)  # each token has its places before it
            convolved = F.silu(CausalConvolution.apply(long, weight, behind))
            convolved = torch.cat([part[kernel - 1 :] for part in convolved.split([len(part) for part in parts])])
            of_rule = self._of_rule(convolved, beta[several], decay[several])
            before_them = states[rows].masked_fill(first[:, None, None, None, None], 0)
            out[several], after = chunked_rule(*of_rule, step.chunks, before_them, repeatable=self.repeatable)
            states[rows] = after()
        return out.to(inputs.dtype)
