"""Runs a chunk's layers for generation: the computation of megatron's modules on their own weights, and nothing else.

In a step of generation a layer has few tokens. The modules of megatron then need as long around the arithmetic as for
it: autograd functions, dispatch by configuration, bookkeeping of features that are off. This walks the layers of both
specs (`layers.block_spec`). Linears of the te spec hold the weights of the norms before them. It takes these weights
and calls none of transformer-engine's modules except shared experts.

It serves every family made of RMSNorm, SwiGLU or experts, and grouped-query or latent attention or gated delta nets.
`supports_chunk` says whether a chunk is one. Any other goes through GPTModel itself, and tests hold both to the same
tokens.

Dimensions: `T` tokens, `N` hidden size, `G` key/value groups and `H` query heads on this rank, `D` head size, `E`
experts. Tensor parallelism is without sequence parallelism here, even if training has it. Hidden states are whole on
every rank, and partial sums are all-reduced. Only megatron's experts get their rank's part of the tokens.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mrl.kernels import layers as kernels
from mrl.kernels import operators
from mrl.mcore_models import elementwise, grouped
from mrl.mcore_models.attention import SdpaAttention
from mrl.mcore_models.delta_net import GatedDeltaNet
from mrl.mcore_models.latent import LatentAttention
from mrl.mcore_models.layers import NormOverHeads, RMSNorm
from mrl.mcore_models.lora import Adapter, add_adapter_output
from mrl.ops.kv_cache import CachedStep

_MLP = (
    r"(input_layernorm|pre_mlp_layernorm)\.weight"
    r"|mlp\.linear_fc1\.(layer_norm_)?weight|mlp\.linear_fc2\.weight|mlp\.(router|experts|shared_experts)\..*"
    r"|mlp\.linear_fc[12]\.adapter\..*"
)
_GROUPED = re.compile(
    _MLP + r"|self_attention\.(linear_qkv|linear_proj|q_layernorm|k_layernorm|in_proj|out_norm|out_proj)\.weight"
    r"|self_attention\.((linear_qkv|in_proj)\.layer_norm_weight|linear_(qkv|proj)\.bias|core_attention\.softmax_offset)"
    r"|self_attention\.(conv_weight|A_log|dt_bias)|self_attention\.(linear_(qkv|proj)|(in|out)_proj)\.adapter\..*"
)
_LATENT = re.compile(_MLP + r"|self_attention\..*")


def supports_chunk(model: torch.nn.Module) -> bool:
    """Returns whether `Decoder` computes this chunk. Stages may differ, because only a rank's own layers are looked
    at."""
    config = model.config
    latent = config.multi_latent_attention
    known = _LATENT if latent else _GROUPED
    layers = model.decoder.layers
    names = all(known.fullmatch(name) for layer in layers for name, _ in layer.named_parameters())
    attentions = [layer.self_attention for layer in layers]
    ours = all(isinstance(one, GatedDeltaNet) or isinstance(one.core_attention, SdpaAttention) for one in attentions)
    known_activations = config.activation_func is F.silu or all(hasattr(layer.mlp, "experts") for layer in layers)
    whole_groups = latent or config.num_query_groups % config.tensor_model_parallel_size == 0
    return names and ours and known_activations and whole_groups


def fixed_refusal(model: torch.nn.Module) -> str | None:
    """Returns why a supported chunk has no steps of fixed shapes (`Decoder.__call__`, fixed), or None if it has. Stages
    may differ."""
    config = model.config
    if config.num_moe_experts is None:
        return None
    experts = [layer.mlp.experts for layer in model.decoder.layers if hasattr(layer.mlp, "experts")]
    if config.tensor_model_parallel_size % (config.expert_model_parallel_size * config.expert_tensor_parallel_size):
        return "experts are spread over ranks of several replicas (engine.parallel.ep, engine.parallel.etp)"
    if config.moe_expert_capacity_factor is not None:
        return "experts drop tokens (engine.megatron.moe_expert_capacity_factor)"
    if config.moe_shared_expert_overlap:
        return "shared experts run inside the exchange of tokens (engine.megatron.moe_shared_expert_overlap)"
    if any(isinstance(module, Adapter) for one in experts for module in one.modules()):
        return "experts have adapters"
    return None


class Decoder:
    """Runs embedding (on the first stage), layers and final norm (on the last) of one chunk, as its weights are now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.group = model.pg_collection.tp
        self.parallel = self.group.size() > 1
        self.layers = [_Layer(layer, model.pg_collection) for layer in model.decoder.layers]
        self.final_norm = _Norm.of(model.decoder.final_layernorm) if model.post_process else None
        config = model.config
        latent = config.multi_latent_attention
        self.groups = 1 if latent else config.num_query_groups // config.tensor_model_parallel_size
        # transformer-engine's kernel turns in fp32 and rounds once
        self.rotary_dtype = torch.float32 if config.apply_rope_fusion else None

    def __call__(self, tokens: Tensor, hidden: Tensor | None, step: CachedStep, *, fixed: bool = False) -> Tensor:
        """Returns hidden states [T, N] of tokens [T], normed on the last stage. hidden: [T, N] from the stage before;
        None on the first.

        fixed: the kernels depend on the shapes of tokens and cache alone, and the host reads no tensor. If one rank has
        all experts, grouped products are such kernels. Otherwise every expert computes every token, and experts that
        the router did not choose count nothing.
        """
        x = self._embedded(tokens) if hidden is None else hidden
        cos_sin = self._cos_sin(step.positions, self.rotary_dtype or x.dtype)
        for layer in self.layers:
            x = self._add(x, layer.attention(x, step, cos_sin), bias=layer.attention.proj_bias)
            x = self._add(x, layer.mlp(x, fixed), whole=layer.experts is not None)
        return x if self.final_norm is None else self.final_norm(x)

    def _cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines [T, 1, R] each; [T, G, R] for the kernel that turns heads, a row for each group."""
        angles, rotary = positions.to(torch.float32), self.model.rotary_pos_emb
        groups = self.groups if operators.supports(angles) else 1
        angles = torch.outer(angles, rotary.inv_freq)[:, None].repeat(1, groups, 2)
        return (angles.cos() * rotary.scale).to(dtype), (angles.sin() * rotary.scale).to(dtype)

    def _embedded(self, tokens: Tensor) -> Tensor:
        table = self.model.embedding.word_embeddings
        if not self.parallel:
            return F.embedding(tokens, table.weight)
        local = tokens - table.vocab_start_index
        here = (local >= 0) & (local < table.weight.shape[0])
        rows = F.embedding(local.where(here, torch.zeros_like(local)), table.weight) * here[:, None]
        dist.all_reduce(rows, group=self.group)
        return rows

    def _add(self, x: Tensor, part: Tensor, whole: bool = False, bias: Tensor | None = None) -> Tensor:
        if self.parallel and not whole:
            dist.all_reduce(part, group=self.group)
        if bias is not None:
            part += bias
        return part.add_(x)


class _Linear:
    """Computes a linear layer with its adapter, on this rank alone.

    row: it is row-parallel, so it gives this rank's part of a sum over ranks. The bias is added to that sum once.
    """

    def __init__(self, module: Any, *, row: bool = False) -> None:
        self.module, self.weight = module, _columns(module.weight)
        self.bias = None if row else _bias(module)

    def __call__(self, x: Tensor) -> Tensor:
        out = add_adapter_output(self.module, x, x @ self.weight)
        return out if self.bias is None else out.add_(self.bias)


class _Layer:
    """Holds one layer's weights and sizes."""

    def __init__(self, layer: Any, groups: Any) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        kinds: dict[type, Any] = {LatentAttention: _LatentAttention, GatedDeltaNet: _DeltaNet}
        self.attention = kinds.get(type(attention), _GroupedAttention)(layer.input_layernorm, attention)
        self.experts = None if hasattr(mlp, "linear_fc1") else _Experts(mlp, groups)
        self.mlp_norm = _Norm.of(layer.pre_mlp_layernorm, mlp.linear_fc1 if self.experts is None else None)
        if self.experts is None:
            self.fc1, self.fc2 = _Linear(mlp.linear_fc1), _Linear(mlp.linear_fc2, row=True)

    def mlp(self, x: Tensor, fixed: bool) -> Tensor:
        """Returns this rank's part of [T, N], or the whole if there are experts."""
        normed = self.mlp_norm(x)
        return self.fc2(_swiglu(self.fc1(normed))) if self.experts is None else self.experts(normed, fixed)


class _GroupedAttention:
    """Computes attention of grouped queries, and the norm before it."""

    def __init__(self, norm: torch.nn.Module, attention: Any) -> None:
        self.core = attention.core_attention
        self.groups, self.head = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
        self.queries = attention.num_attention_heads_per_partition // self.groups  # of one group
        self.rows = self.queries + 2 + (self.queries if attention.config.attention_output_gate else 0)
        self.norm = _Norm.of(norm, attention.linear_qkv)
        self.qkv, self.proj = _Linear(attention.linear_qkv), _Linear(attention.linear_proj, row=True)
        self.proj_bias = _bias(attention.linear_proj)
        self.over_heads = None  # norms of all queries and of all keys together
        self.head_norm = None  # [queries + 1, D]: the norms of a group's queries and of its key
        if isinstance(attention.q_layernorm, NormOverHeads):
            self.over_heads = attention.q_layernorm, attention.k_layernorm
        elif hasattr(attention.q_layernorm, "weight"):
            query, key = (_Norm.of(norm) for norm in (attention.q_layernorm, attention.k_layernorm))
            weight = torch.cat([query.weight.expand(self.queries, -1), key.weight[None]])
            self.head_norm = dataclasses.replace(query, weight=weight)

    def __call__(self, x: Tensor, step: CachedStep, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Returns this rank's part of [T, N]."""
        heads, gate = self.qkv(self.norm(x)).view(-1, self.groups, self.rows, self.head), None
        if self.rows > self.queries + 2:
            queries, gate, rest = heads.split([self.queries, self.queries, 2], dim=2)
            heads = torch.cat([queries, rest], dim=2)
        turned, value = heads[:, :, :-1], heads[:, :, -1]
        if self.head_norm is not None:
            turned = self.head_norm(turned)
        elif self.over_heads is not None:
            turned = self._normed_over_heads(turned, *self.over_heads)
        query, key = self._turned(turned, *cos_sin)
        out = step.attend(self.core.layer_number, query, key.squeeze(2), value, self.core.scoring)
        return self.proj(out.flatten(1) if gate is None else (out * gate.float().sigmoid()).to(x.dtype).flatten(1))

    def _turned(self, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries [T, G, queries, D] and keys [T, G, 1, D] after the turn of heads [T, G, queries + 1, D]."""
        if operators.supports(heads):
            return kernels.rotary(heads[:, :, :-1], heads[:, :, -1:], cos, sin)
        turns = cos.shape[-1]  # of a head's channels, the first
        cos_sin = cos[:, :, None], sin[:, :, None]
        turned = elementwise.rotate_halves(heads[..., :turns].to(cos.dtype), *cos_sin, -1.0).to(heads.dtype)
        if turns < self.head:
            turned = torch.cat([turned, heads[..., turns:]], dim=-1)
        return turned[:, :, :-1], turned[:, :, -1:]

    def _normed_over_heads(self, heads: Tensor, of_queries: NormOverHeads, of_keys: NormOverHeads) -> Tensor:
        """Returns heads [T, G, queries + 1, D] after the norms over heads; the last of a group is its key."""
        query = of_queries(heads[:, :, :-1].flatten(1, 2)[:, None]).view(len(heads), self.groups, -1, self.head)
        key = of_keys(heads[:, None, :, -1]).view(len(heads), self.groups, 1, self.head)
        return torch.cat([query, key], dim=2)


class _DeltaNet:
    """Computes a gated delta net, and the norm before it."""

    proj_bias = None

    def __init__(self, norm: torch.nn.Module, attention: GatedDeltaNet) -> None:
        self.module, self.norm = attention, _Norm.of(norm, attention.in_proj)
        self.inputs, self.proj = _Linear(attention.in_proj), _Linear(attention.out_proj, row=True)

    def __call__(self, x: Tensor, step: CachedStep, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Returns this rank's part of [T, N]."""
        return self.proj(self.module.cached(self.inputs(self.norm(x)), step))


class _LatentAttention:
    """Computes latent attention, and the norm before it. Its down-projections are whole on every rank."""

    proj_bias = None

    def __init__(self, norm: torch.nn.Module, attention: LatentAttention) -> None:
        self.module, self.core, self.norm = attention, attention.core_attention, _Norm.of(norm)
        if attention.config.q_lora_rank is None:
            self.query: list[_Linear | _Norm] = [_Linear(attention.linear_q_proj)]
        else:
            up = attention.linear_q_up_proj
            self.query = [_Linear(attention.linear_q_down_proj), _Norm.of(attention.q_layernorm, up), _Linear(up)]
        self.down, self.up = _Linear(attention.linear_kv_down_proj), _Linear(attention.linear_kv_up_proj)
        self.latent_norm = _Norm.of(attention.kv_layernorm, attention.linear_kv_up_proj)
        self.proj = _Linear(attention.linear_proj, row=True)

    def __call__(self, x: Tensor, step: CachedStep, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Returns this rank's part of [T, N]."""
        query = normed = self.norm(x)
        for part in self.query:
            query = part(query)
        turns = self.module.config.qk_pos_emb_head_dim
        latent, key_turned = self.down(normed).split([self.module.config.kv_lora_rank, turns], dim=-1)
        both = self.up(self.latent_norm(latent))
        query, key, value = self.module.turned_heads(query, both, key_turned[:, None], cos_sin)
        out = step.attend(self.core.layer_number, query[:, :, None], key, value, self.core.scoring)
        return self.proj(out.flatten(1))


class _Experts:
    """Computes an MoE layer after its norm."""

    def __init__(self, mlp: Any, groups: Any) -> None:
        self.mlp, self.tp = mlp, groups.tp
        self.holders = groups.tp_ep  # ranks that have a part of the experts each
        self.here = slice(mlp.local_expert_indices[0], mlp.local_expert_indices[-1] + 1)
        experts = mlp.experts
        self.counts_stay = grouped.counts_stay(mlp)
        # of each, the weight and bias of both linears
        if hasattr(experts, "local_experts"):
            pairs = [(one.linear_fc1, one.linear_fc2) for one in experts.local_experts]
            self.weights = [tuple((of.weight, of.bias) for of in pair) for pair in pairs]
        else:
            both = experts.linear_fc1, experts.linear_fc2
            self.weights = [
                tuple((getattr(of, f"weight{i}"), _bias(of, f"bias{i}")) for of in both)
                for i in range(mlp.num_local_experts)
            ]

    def __call__(self, x: Tensor, fixed: bool) -> Tensor:
        """Returns [T, N] of x [T, N]."""
        if not fixed or self.counts_stay and grouped.works_on_device(x):
            # megatron's own, which otherwise reads on the host how many tokens each expert gets
            return self._of_parts(lambda part: self.mlp(part)[0], x)
        probs_TE, _ = self.mlp.router(x[:, None])  # 0 where an expert was not chosen
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for prob, ((fc1, bias1), (fc2, bias2)) in zip(probs_TE[:, self.here].unbind(-1), self.weights, strict=True):
            # a probability of 0 times infinity is no number: what was not chosen is left out, not multiplied away
            product = (self._activated(F.linear(x, fc1, bias1)) * prob[:, None]).to(x.dtype)
            out += F.linear(product.where(prob[:, None] > 0, torch.zeros_like(product)), fc2)
            if bias2 is not None:
                out += bias2 * prob[:, None]
        if self.holders.size() > 1:  # all have the same tokens: they are ranks of one replica
            dist.all_reduce(out, group=self.holders)
        out = out.to(x.dtype)
        shared = self.mlp.shared_experts
        return out if shared is None else out + self._of_parts(shared, x)

    def _activated(self, both: Tensor) -> Tensor:
        """Activates [gate, linear] like megatron's MLP."""
        config = self.mlp.config
        if config.activation_func is F.silu:
            return _swiglu(both)
        gate, linear = both.chunk(2, dim=-1)
        most = config.activation_func_clamp_value
        if most is not None:
            gate, linear = gate.clamp(max=most), linear.clamp(-most, most)
        return config.activation_func(gate) * (linear + config.glu_linear_offset)

    def _of_parts(self, module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Returns the output [T, N] of one of megatron's modules, which takes and gives [T, 1, N], for x [T, N].

        Under sequence parallelism the module expects a part of the tokens from each rank, of equal size. So zeros
        follow the last token.
        """
        if not self.mlp.config.sequence_parallel:
            return module(x[:, None]).squeeze(1)
        count, ranks = x.shape[0], self.tp.size()
        each = -(-count // ranks)
        first = min(self.tp.rank() * each, count)
        part = x[first : first + each]
        part = module(F.pad(part, (0, 0, 0, each - part.shape[0]))[:, None]).squeeze(1)
        whole = part.new_empty(each * ranks, x.shape[1])
        dist.all_gather_into_tensor(whole, part, group=self.tp)
        return whole[:count]


@dataclasses.dataclass(frozen=True)
class _Norm:
    """Computes an RMSNorm.

    once: like transformer-engine's, in fp32 with one rounding of the result. Otherwise like `RMSNorm`, which rounds
    before it multiplies by the weight.
    """

    weight: Tensor
    eps: float
    once: bool

    @classmethod
    def of(cls, norm: torch.nn.Module, linear: torch.nn.Module | None = None) -> "_Norm":
        """Returns the norm of the module `norm`, or the one that the linear after it does first."""
        if isinstance(norm, RMSNorm):
            if norm.centered:
                return cls(norm.weight.detach().float() + 1, norm.eps, once=True)
            return cls(norm.weight.detach(), norm.eps, once=False)
        owner = norm if hasattr(norm, "weight") else linear
        assert owner is not None, f"no norm in {type(norm).__name__}"
        weight = (owner.weight if owner is norm else owner.layer_norm_weight).detach().float()
        return cls(weight + 1 if owner.zero_centered_gamma else weight, owner.eps, once=True)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns x [..., N], normed. The weight is [N], or has one such row for each of the dimensions before."""
        if operators.supports(x) and x.shape[-1] <= kernels.MAX_NORM:
            return kernels.rms_norm_without_gradient(x, self.weight, self.eps)
        if x.dtype == torch.float32 and self.weight.dim() == 1:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        normed = F.rms_norm(x.float(), x.shape[-1:], None, self.eps)
        if self.once:
            return normed.mul_(self.weight).to(x.dtype)
        return self.weight * normed.to(x.dtype)


def _swiglu(both: Tensor) -> Tensor:
    if operators.supports(both):
        return kernels.swiglu(both)
    gate, linear = both.chunk(2, dim=-1)
    return F.silu(gate).mul_(linear)


def _bias(linear: torch.nn.Module, name: str = "bias") -> Tensor | None:
    bias = getattr(linear, name, None)
    return bias if bias is not None and bias.numel() else None  # transformer-engine's is empty for none


def _columns(weight: Tensor) -> Tensor:
    """Returns the weight as [in, out] for `x @ w`. On a GPU it is a view.

    On a CPU it is laid out so, because a product of few rows is then a quarter faster. That takes the weight's memory a
    second time while completions are made, from the first turn of conversations to the last.
    """
    weight = weight.detach().t()
    return weight.contiguous() if weight.is_cpu else weight
