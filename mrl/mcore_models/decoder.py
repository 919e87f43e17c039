"""A chunk's layers for generation: the computation of megatron's modules on their own weights, and nothing else.

In a step of generation a layer has few tokens, and what megatron's modules do around the arithmetic (autograd
functions, dispatch by configuration, bookkeeping of features that are off) takes as long as the arithmetic. This walks
the modules that `layers._local_layer` builds, for every family made of RMSNorm, grouped-query attention and SwiGLU;
`fits` says whether a chunk is one. Any other goes through GPTModel itself, and tests hold both to the same tokens.

Dimensions: `T` tokens, `N` hidden size, `G` key/value groups and `H` query heads on this rank, `D` head size. Tensor
parallelism without sequence parallelism: hidden states are whole on every rank, and partial sums are all-reduced.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mrl.mcore_models import elementwise
from mrl.mcore_models.attention import SdpaAttention
from mrl.mcore_models.kv_cache import CachedStep
from mrl.mcore_models.layers import RMSNorm
from mrl.mcore_models.lora import added_on_this_rank
from mrl.mcore_models.masked import Scoring

_KNOWN = re.compile(
    r"(input_layernorm|pre_mlp_layernorm|self_attention\.(linear_qkv|linear_proj|q_layernorm|k_layernorm))\.weight"
    r"|self_attention\.linear_qkv\.bias|mlp\.linear_fc[12]\.weight|mlp\.(router|experts|shared_experts)\..*"
    r"|(self_attention\.linear_(qkv|proj)|mlp\.linear_fc[12])\.adapter\..*"
)


def fits(model: torch.nn.Module) -> bool:
    """Returns whether `Decoder` computes what this chunk does; the same answer on every rank."""
    config = model.config
    known = all(_KNOWN.fullmatch(name) for layer in model.decoder.layers for name, _ in layer.named_parameters())
    ours = all(isinstance(layer.self_attention.core_attention, SdpaAttention) for layer in model.decoder.layers)
    whole_groups = config.num_query_groups % config.tensor_model_parallel_size == 0
    # under sequence parallelism experts take a part of the tokens
    split_tokens = config.num_moe_experts is not None and config.sequence_parallel
    plain_heads = config.rotary_percent == 1.0 and not config.qk_norm_over_heads
    return known and ours and whole_groups and plain_heads and not split_tokens and config.activation_func is F.silu


class Decoder:
    """Embedding (on the first stage), layers and final norm (on the last) of one chunk, as its weights are now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.group = model.pg_collection.tp
        self.parallel = self.group.size() > 1
        self.layers = [_Layer(layer) for layer in model.decoder.layers]

    def __call__(self, tokens: Tensor, hidden: Tensor | None, step: CachedStep) -> Tensor:
        """tokens [T]; hidden [T, N] from the stage before, None on the first. [T, N], normed on the last stage."""
        x = self._embedded(tokens) if hidden is None else hidden
        angles = torch.outer(step.positions.to(torch.float32), self.model.rotary_pos_emb.inv_freq)
        angles = torch.cat([angles, angles], dim=-1)[:, None, None]
        cos_sin = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        for layer in self.layers:
            x = self._add(x, layer.attention(x, step, cos_sin))
            x = self._add(x, layer.mlp(x), whole=layer.experts is not None)
        return _norm(x, self.model.decoder.final_layernorm) if self.model.post_process else x

    def _embedded(self, tokens: Tensor) -> Tensor:
        table = self.model.embedding.word_embeddings
        if not self.parallel:
            return F.embedding(tokens, table.weight)
        local = tokens - table.vocab_start_index
        here = (local >= 0) & (local < table.weight.shape[0])
        rows = F.embedding(local.where(here, torch.zeros_like(local)), table.weight) * here[:, None]
        dist.all_reduce(rows, group=self.group)
        return rows

    def _add(self, x: Tensor, part: Tensor, whole: bool = False) -> Tensor:
        if self.parallel and not whole:
            dist.all_reduce(part, group=self.group)
        return part.add_(x)


class _Layer:
    """One layer's weights and sizes."""

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attention
        self.core = attention.core_attention
        self.groups, self.head = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
        self.queries = attention.num_attention_heads_per_partition // self.groups  # of one group
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.pre_mlp_layernorm
        self.in_attention, self.in_mlp = attention, layer.mlp
        self.qkv, self.qkv_bias = _columns(attention.linear_qkv.weight), attention.linear_qkv.bias
        self.proj = _columns(attention.linear_proj.weight)
        self.head_norm = None  # [queries + 1, D]: the norms of a group's queries and of its key
        if isinstance(attention.q_layernorm, RMSNorm):
            query, key = attention.q_layernorm.weight, attention.k_layernorm.weight
            self.head_norm = torch.cat([query.expand(self.queries, -1), key[None]])
        self.experts = None if hasattr(layer.mlp, "linear_fc1") else layer.mlp
        if self.experts is None:
            self.fc1, self.fc2 = _columns(layer.mlp.linear_fc1.weight), _columns(layer.mlp.linear_fc2.weight)

    def attention(self, x: Tensor, step: CachedStep, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """This rank's part of [T, N]."""
        normed = _norm(x, self.input_norm)
        qkv = added_on_this_rank(self.in_attention.linear_qkv, normed, normed @ self.qkv)
        if self.qkv_bias is not None:
            qkv += self.qkv_bias
        heads = qkv.view(-1, self.groups, self.queries + 2, self.head)
        turned, value = heads[:, :, :-1], heads[:, :, -1]
        if self.head_norm is not None:
            turned = _rms_norm(turned, self.input_norm.eps) * self.head_norm
        turned = elementwise.turn(turned, *cos_sin, -1.0)
        scoring = Scoring(self.core.scale, self.core.window)
        out = step.attend(self.core.layer_number, turned[:, :, :-1], turned[:, :, -1], value, scoring)
        out = out.flatten(1)
        return added_on_this_rank(self.in_attention.linear_proj, out, out @ self.proj)

    def mlp(self, x: Tensor) -> Tensor:
        """This rank's part of [T, N]; the whole where there are experts."""
        normed = _norm(x, self.mlp_norm)
        if self.experts is not None:
            return self.experts(normed.unsqueeze(1))[0].squeeze(1)
        both = added_on_this_rank(self.in_mlp.linear_fc1, normed, normed @ self.fc1)
        gate, linear = both.chunk(2, dim=-1)
        product = F.silu(gate).mul_(linear)
        return added_on_this_rank(self.in_mlp.linear_fc2, product, product @ self.fc2)


def _columns(weight: Tensor) -> Tensor:
    """[in, out] for `x @ w`. On a CPU laid out so: a product of few rows is a quarter faster than with the weight as it
    is stored, and takes the weight's memory once more while completions are made, of conversations from the first turn
    to the last. On a GPU a view."""
    weight = weight.detach().t()
    return weight.contiguous() if weight.is_cpu else weight


def _rms_norm(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


def _norm(x: Tensor, norm: RMSNorm) -> Tensor:
    """As `RMSNorm` rounds: in fp32 inside, the weight in x's dtype."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
    return norm.weight * _rms_norm(x, norm.eps)
