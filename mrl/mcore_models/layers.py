"""Has norms, rotary embedding and layer specs for megatron's GPTModel.

Two specs build the same model; `mrl.mcore_models.layer_spec` chooses. `te` uses transformer-engine's fused modules.
`local` uses megatron's own linear layers with the norms here and `SdpaAttention`. It runs on any machine, and tests
compare it with Hugging Face. Parameter names of both are in mrl/weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrl import patches
from mrl.kernels import layers as kernels
from mrl.kernels import operators
from mrl.mcore_models import elementwise
from mrl.mcore_models.attention import SdpaAttention
from mrl.mcore_models.config import Config, LatentConfig
from mrl.mcore_models.delta_net import DeltaSubmodules, GatedDeltaNet
from mrl.mcore_models.head import MTPSubmodules
from mrl.mcore_models.latent import LatentAttention, LatentSubmodules
from mrl.mcore_models.router import Router
from mrl.ops import devices

patches.check(__name__)  # the method that GatedSelfAttention overrides


class RMSNorm(torch.nn.Module):
    """Computes x / rms(x) * weight (Zhang and Sennrich, 2019), in fp32 inside; marks its weight for sequence
    parallelism.

    With `layernorm_zero_centered_gamma` the factor is 1 + weight, and the product is rounded once.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.centered = config.layernorm_zero_centered_gamma
        weight = torch.full((hidden_size,), 0.0 if self.centered else 1.0, device=devices.device())
        self.weight = torch.nn.Parameter(weight.to(config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if kernels.norm_fits(x, self.weight):
            return kernels.rms_norm(x, self.weight, self.eps, self.centered)
        weight = self.weight.float() + 1 if self.centered else self.weight
        if x.dtype == torch.float32:
            if x.is_cpu:
                return elementwise.RMSNormFunction.apply(x, weight, self.eps)
            return F.rms_norm(x, weight.shape, weight, self.eps)
        if self.centered:
            return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)
        normed = F.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return self.weight * normed.to(x.dtype)


class NormOverHeads(RMSNorm):
    """Computes RMSNorm over all heads of a query or key together, though each tensor-parallel rank has some of them.

    Every rank holds the whole weight and uses the part of its heads. If ranks share key heads, each counts them in
    part.
    """

    heads: str
    """The field of the config that counts the heads of the whole model that the norm is over."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, getattr(config, self.heads) * hidden_size, eps)
        self.group = parallel_state.get_tensor_model_parallel_group()

    def forward(self, x: Tensor) -> Tensor:
        """Returns x [T, 1, heads of this rank, D], normed."""
        tp, flat = self.group.size(), x.flatten(2)
        if tp == 1:
            return super().forward(flat).view_as(x)
        whole, here = self.weight.numel(), flat.shape[-1]
        copies = here * tp // whole  # ranks that hold the same heads
        start = self.group.rank() // copies * here
        squares = _SumOverRanks.apply(flat.float().square().sum(-1, keepdim=True) / copies, self.group)
        normed = flat.float() * torch.rsqrt(squares / whole + self.eps)
        return (self.weight[start : start + here] * normed.to(x.dtype)).view_as(x)


class QueryNormOverHeads(NormOverHeads):
    heads = "num_attention_heads"


class KeyNormOverHeads(NormOverHeads):
    heads = "num_query_groups"


class _SumOverRanks(torch.autograd.Function):
    """Sums over a group. Every rank goes on from the sum, so its gradient is summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        dist.all_reduce(x := x.clone(), group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        dist.all_reduce(grad := grad.clone(), group=ctx.group)
        return grad, None


def inverse_frequencies(head_dim: int, theta: float, scaling: dict | None) -> Tensor:
    """Returns RoPE frequencies [head_dim / 2], fp32. scaling: Hugging Face's None, linear, llama3 or yarn, of any
    values."""
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if scaling is None:
        return inverse
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return inverse / factor
    if scaling["rope_type"] == "yarn":
        return _yarn_frequencies(head_dim, theta, scaling)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / inverse
    original = scaling["original_max_position_embeddings"]
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    return torch.where((wavelength <= original / low) & (wavelength >= original / high), between, scaled)


def _yarn_frequencies(head_dim: int, theta: float, scaling: dict) -> Tensor:
    """Returns YaRN's frequencies (arXiv 2309.00071, section 3.2), as in transformers: slow ones are divided, fast ones
    stay."""

    def channel(rotations: float) -> float:
        """Returns the channel that turns so often over the original length."""
        length = scaling["original_max_position_embeddings"]
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.get("beta_fast") or 32), channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    stays = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    periods = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return 1.0 / (scaling["factor"] * periods) * (1 - stays) + 1.0 / periods * stays


def rotary_scale(scaling: dict | None) -> float:
    """Returns the factor on cosines and sines: yarn's attention factor, as transformers computes it, else 1."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def grown(by: float) -> float:
        return 0.1 * by * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return grown(mscale) / grown(all_dim) if mscale and all_dim else grown(1.0)


class Rotary(RotaryEmbedding):
    """Is megatron's rotary embedding with the frequencies of `inverse_frequencies`, at given positions.

    positions: [T] of this rank's tokens of the micro-batch at hand, set by the model before each forward. scale: of
    `rotary_scale`. megatron's attention multiplies by it, because it gets angles.
    """

    def __init__(self, inverse: Tensor, cp_group: Any, scale: float, config: Config | LatentConfig) -> None:
        super().__init__(kv_channels=2 * inverse.numel(), rotary_percent=1.0, cp_group=cp_group)
        self.inv_freq, self.scale, self.config = inverse.to(devices.device()), scale, config
        self.positions = torch.empty(0)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Returns angles [T, 1, 1, R] in fp32; on a GPU under the local spec, scaled cosines and sines [2, T, R]."""
        angles = torch.outer(self.positions.to(self.inv_freq.dtype), self.inv_freq)
        angles = torch.cat([angles, angles], dim=-1)
        if self.config.layer_spec == "te" or not operators.uses_triton(angles):
            return angles[:, None, None]
        cos_sin = [(part * self.scale).to(self.config.params_dtype) for part in (angles.cos(), angles.sin())]
        return torch.stack(cos_sin)


def block_spec(config: Config | LatentConfig, layers: list[int]) -> TransformerBlockSubmodules:
    """Returns the specs of the decoder layers with the global numbers `layers`, dense or MoE by
    `config.moe_layer_freq`."""
    if config.layer_spec == "te":
        from megatron.core.extensions.transformer_engine import TENorm

        layer, norm = _te_layer, TENorm
    else:
        layer, norm = _local_layer, RMSNorm
    moe = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    specs = [layer(config, config.num_moe_experts if moe[i] else None) for i in layers]
    return TransformerBlockSubmodules(layer_specs=with_delta_nets(config, layers, specs), layer_norm=norm)


def with_delta_nets(config: Config | LatentConfig, layers: list[int], specs: list[ModuleSpec]) -> list[ModuleSpec]:
    """Returns the specs of layers with gated delta nets in place of the attention of those that have one."""
    for i, spec in zip(layers, specs, strict=True):
        if config.attention_output_gate:
            spec.submodules.self_attention.module = GatedSelfAttention
        if config.linear_attention_freq and config.linear_attention_freq[i]:
            theirs = spec.submodules.self_attention.submodules
            linears = DeltaSubmodules(in_proj=theirs.linear_qkv, out_proj=theirs.linear_proj)
            spec.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=linears)
    return specs


class RotarySelfAttention(SelfAttention):
    """Is megatron's attention, which turns queries and keys by one kernel where there is one.

    megatron makes cosines and sines again in every layer, for queries and for keys.
    """

    _cos_sin: Tensor | None = None  # of the forward at hand, if it turns here

    def forward(self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, **others: Any) -> Any:
        here = rotary_pos_emb.dim() == 3  # angles have four dimensions
        self._cos_sin = rotary_pos_emb if here else None
        return super().forward(hidden_states, rotary_pos_emb=None if here else rotary_pos_emb, **others)

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> Any:
        query, key, *rest = super().get_query_key_value_tensors(*args, **options)
        cos_sin, self._cos_sin = self._cos_sin, None
        if cos_sin is not None:
            query, key = (t.unsqueeze(1) for t in kernels.rotary(query.squeeze(1), key.squeeze(1), *cos_sin.unbind()))
        return query, key, *rest


class GatedSelfAttention(RotarySelfAttention):
    """Is megatron's attention with a gate on its output.

    megatron compiles the gate (`jit_fuser`, transformer/attention.py, 0.16.1 and 0.19.2). Its kernels are of the shapes
    that came first, so a resumed run would have other bits than the unbroken one.
    """

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        if (copies := gate.numel() // x.numel()) > 1:
            # tp ranks share a key head; 0.16.1 takes this rank's query heads and leaves the gate whole (attention.py)
            gate = gate.chunk(copies, dim=2)[self.pg_collection.tp.rank() % copies]
        return (x * gate.reshape(x.shape).float().sigmoid()).to(x.dtype)


def mtp_parts(config: Config | LatentConfig) -> MTPSubmodules:
    """Returns the parts of MTP layers. Their blocks are like the last layer that has attention, so past the dense ones
    of an MoE model."""
    linear = config.linear_attention_freq or [0] * config.num_layers
    [layer] = block_spec(config, [i for i in range(config.num_layers) if not linear[i]][-1:]).layer_specs
    if config.layer_spec == "te":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        return MTPSubmodules(TENorm, TEColumnParallelLinear, layer)
    return MTPSubmodules(RMSNorm, ColumnParallelLinear, layer)


def _local_layer(config: Config | LatentConfig, experts: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    # the map of `get_gpt_layer_local_spec` (models/gpt/gpt_layer_specs.py, 0.16.1 and 0.19.2) would give norms, in
    # checkpoints, the keys of transformer-engine's fused ones
    spec.submodules = dataclasses.replace(
        spec.submodules, input_layernorm=RMSNorm, pre_mlp_layernorm=RMSNorm, sharded_state_dict_keys_map={}
    )
    if config.multi_latent_attention:
        latent = LatentSubmodules(
            up=ColumnParallelLinear, heads=ColumnParallelLinear, norm=RMSNorm, core_attention=SdpaAttention,
            linear_proj=RowParallelLinear,
        )  # fmt: skip
        spec.submodules.self_attention = ModuleSpec(module=LatentAttention, submodules=latent)
        return _with_our_router(spec)
    attention = spec.submodules.self_attention
    norms = _over_heads(config) or ({"q_layernorm": RMSNorm, "k_layernorm": RMSNorm} if config.qk_layernorm else {})
    attention.module = RotarySelfAttention
    attention.submodules = dataclasses.replace(attention.submodules, core_attention=SdpaAttention, **norms)
    return _with_our_router(spec)


def _over_heads(config: Config) -> dict[str, type]:
    """Returns the norms of queries and keys if they are over all heads."""
    return {"q_layernorm": QueryNormOverHeads, "k_layernorm": KeyNormOverHeads} if config.qk_norm_over_heads else {}


def _with_our_router(layer: ModuleSpec) -> ModuleSpec:
    """Returns an MoE layer's spec with `Router` in it; a dense one as it is."""
    parts = mlp_submodules(layer)
    if isinstance(parts, MoESubmodules):
        parts.router = Router
    return layer


def mlp_submodules(layer: ModuleSpec) -> Any:
    """Returns the parts of a layer's MLP: of a ModuleSpec in megatron-core 0.16, of a partial in 0.19."""
    mlp = layer.submodules.mlp
    return mlp.keywords.get("submodules") if isinstance(mlp, functools.partial) else mlp.submodules


def _te_layer(config: Config | LatentConfig, experts: int | None) -> ModuleSpec:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec as te_layer

    spec = te_layer(
        num_experts=experts, moe_grouped_gemm=bool(experts), qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )  # fmt: skip
    attention = spec.submodules.self_attention
    if config.multi_latent_attention:
        theirs = attention.submodules
        latent = LatentSubmodules(
            up=theirs.linear_kv_up_proj, heads=theirs.linear_q_proj, norm=None,
            core_attention=theirs.core_attention, linear_proj=theirs.linear_proj,
        )  # fmt: skip
        spec.submodules.self_attention = ModuleSpec(module=LatentAttention, submodules=latent)
        return _with_our_router(spec)
    attention.submodules = dataclasses.replace(attention.submodules, **_over_heads(config))
    return _with_our_router(spec)
