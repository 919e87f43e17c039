"""What the PyPI package mbridge makes of a Hugging Face model: the shards of every rank, and the way back.

mbridge (Apache-2.0, https://github.com/ISEEKYAN/mbridge) knows the names of transformer-engine's layer spec. It asks a model
for its parameters' names and shapes and for the numbers of its layers; here they are given without one, so that names, tensor
algebra and splits are mbridge's own, and which parameters there are, and how large, is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from mbridge import AutoBridge
from mbridge.core.bridge import Bridge
from mbridge.core.parallel_states import ParallelStates
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from megatron.core.transformer import MLATransformerConfig
from torch import Tensor
from transformers import AutoConfig

from mrl.parallel import ParallelDims
from mrl.weights.rules import chunk_plans

EXPERTS = ".mlp.experts.linear_fc"
Shards = Mapping[tuple[int, str], Tensor]
"""(model chunk, mcore name): shard, of one rank."""


def latent_config(*, max_position_embeddings: int, **fields: Any) -> MLATransformerConfig:
    """As DeepseekV3Bridge makes it: megatron-core 0.16.1 and 0.19.2 have another name for a field that they had before."""
    return MLATransformerConfig(original_max_position_embeddings=max_position_embeddings, **fields)


DeepseekV3Bridge.TransformerConfigClass = staticmethod(latent_config)


def bridge_for(folder: str, layout: ParallelDims, rank: int, *, dtype: torch.dtype = torch.float32) -> Bridge:
    """mbridge's bridge of the model in `folder`, as on `rank` of `layout`."""
    at = layout.coordinates(rank)
    config = AutoConfig.from_pretrained(folder)
    if not hasattr(config, "rope_theta"):  # which transformers 5 keeps in rope_parameters and mbridge reads
        config.rope_theta = config.rope_parameters["rope_theta"]
    states = ParallelStates(
        tp_size=layout.tp, tp_rank=at.tp_rank, pp_size=layout.pp, pp_rank=at.pp_rank, ep_size=layout.ep, ep_rank=at.ep_rank,
        etp_size=layout.etp, etp_rank=at.etp_rank, vpp_size=layout.vpp if layout.vpp > 1 else None,
    )  # fmt: skip
    multiple = layout.tp
    bridge = AutoBridge.from_config(config, parallel_states=states, dtype=dtype, make_vocab_size_divisible_by=multiple)
    # as its model provider sets them
    bridge.vocab_size = config.vocab_size
    bridge.padded_vocab_size = math.ceil(config.vocab_size / multiple) * multiple
    return bridge


def global_names(bridge: Bridge, layers: tuple[int, ...], shards: Mapping[str, Tensor]) -> dict[str, str]:
    """mbridge's names of a model chunk's parameters in the whole model: layers and experts counted through."""
    numbered = [SimpleNamespace(layer_number=layer + 1) for layer in layers]
    chunk = SimpleNamespace(decoder=SimpleNamespace(layers=numbered), state_dict=lambda: dict(shards))
    return bridge._weight_name_mapping_mcore_local_to_global(chunk)


def shards_of(bridge: Bridge, weights: Mapping[str, Tensor], layout: ParallelDims, rank: int, ours: Shards) -> Shards:
    """What `Bridge.load_weights` puts into the parameters that `ours` names, whose values it does not read."""
    at = layout.coordinates(rank)
    made = {}
    for chunk in range(layout.vpp):
        held = {name: shard for (of, name), shard in ours.items() if of == chunk}
        layers = chunk_plans(bridge.hf_config.num_hidden_layers, layout.pp, layout.vpp)[at.pp_rank, chunk].layers
        for local, name in global_names(bridge, layers, held).items():
            tensors = [weights[hf] for hf in bridge._weight_name_mapping_mcore_to_hf(name)]
            whole = bridge._weight_to_mcore_format(local, tensors)
            place, degree = (at.etp_rank, layout.etp) if EXPERTS in local else (at.tp_rank, layout.tp)
            empty = torch.empty(held[local].shape, device="meta")
            made[chunk, local] = bridge._weight_split_across_tp(local, whole, empty, degree)[place]
    return made


def merged(
    bridge: Bridge, weights: Mapping[str, Tensor], ranks: list[Shards], layout: ParallelDims
) -> dict[str, Tensor]:
    """What `Bridge.export_weights` writes of the shards of all ranks of a layout without pipeline stages, by Hugging Face name.

    weights: the files' tensors, whose sizes say which shards are parts, as attributes of megatron's parameters do.
    """
    out = {}
    everywhere = [(layout.coordinates(rank), shards) for rank, shards in enumerate(ranks)]
    layers = tuple(range(bridge.hf_config.num_hidden_layers))
    for ep_rank in range(layout.ep):
        bridge.mpu.ep_rank = ep_rank
        here = [(at, shards) for at, shards in everywhere if at.ep_rank == ep_rank]
        held = {name: shard for (_, name), shard in here[0][1].items()}
        for local, name in global_names(bridge, layers, held).items():
            if EXPERTS in local:
                parts = {at.etp_rank: shards[0, local] for at, shards in here}
            else:
                parts = {at.tp_rank: shards[0, local] for at, shards in everywhere}
            stored = [weights[hf] for hf in bridge._weight_name_mapping_mcore_to_hf(name)]
            whole = _merge(bridge, local, [parts[place] for place in sorted(parts)], stored)
            out.update(zip(*bridge._weight_to_hf_format(name, whole), strict=True))
    return out


def _merge(bridge: Bridge, name: str, parts: list[Tensor], stored: list[Tensor]) -> Tensor:
    if len(parts) == 1 or parts[0].numel() == sum(tensor.numel() for tensor in stored):
        return parts[0]  # each rank holds the whole
    # asked for where a parameter is of one tensor
    dim = next((dim for dim, size in enumerate(parts[0].shape) if size != stored[0].shape[dim]), None)
    param = SimpleNamespace(tensor_model_parallel=True, partition_dim=dim)
    return bridge._weight_merge_across_tp(name, parts, param)
