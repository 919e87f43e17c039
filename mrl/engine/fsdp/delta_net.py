"""Computes gated delta nets of transformers models by mrl's rule, each document from a state of its own.

transformers (5.23) gives no error for a packed row: states and convolutions go on from one document into the next. It
sums decays in fp32, which loses digits of the gradients of A_log (mrl/ops/delta_rule.py).

Dimensions: `R` rows, `L` places of a row on this rank, `H` hidden size, `G` key heads; others as in `DeltaHeads`.
"""

from __future__ import annotations

import types

import torch
from torch import Tensor, nn

from mrl.engine.fsdp.ulysses import NO_CONTEXT_PARALLEL, Ulysses
from mrl.errors import ModelError
from mrl.ops.delta_heads import DeltaHeads
from mrl.ops.delta_rule import Chunks
from mrl.ops.kv_cache import CachedStep
from mrl.ops.packed import Documents

PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "A_log", "dt_bias", "norm", "out_proj")


def delta_nets(hf: nn.Module) -> list[nn.Module]:
    """Returns the gated delta nets of a model."""
    return [module for module in hf.modules() if all(hasattr(module, part) for part in PARTS)]


def replace_forwards(hf: nn.Module) -> None:
    """Gives each gated delta net of a model `forward` in place of its own."""
    for module in delta_nets(hf):
        if module.conv1d.bias is not None or module.activation != "silu":
            why = f"has convolutions with a bias or hidden_act {module.activation!r}, which mrl's rule does not compute"
            raise ModelError("config.json", why=why, fix="use another model")
        module.forward = types.MethodType(forward, module)


@torch.compiler.disable
def forward(
    module: nn.Module,
    hidden_states: Tensor,
    *,
    documents: Documents | None = None,
    ulysses: Ulysses = NO_CONTEXT_PARALLEL,
    cached_step: CachedStep | None = None,
    **_: object,
) -> Tensor:
    """Returns [R, L, H], by the interface of transformers' module; keywords as of `document_attention`."""
    heads, key = module.num_k_heads, module.head_k_dim

    def by_heads(blocks: Tensor, dim: int) -> Tensor:
        """Returns queries, keys and values of each head, from blocks of all queries, all keys and all values."""
        parts = blocks.tensor_split([heads * key, 2 * heads * key], dim=dim)
        return torch.cat([part.unflatten(dim, (heads, -1)) for part in parts], dim=dim + 1)

    rates = [rate(hidden_states).unflatten(2, (heads, -1)) for rate in (module.in_proj_b, module.in_proj_a)]
    inputs = torch.cat([by_heads(module.in_proj_qkv(hidden_states), 2), *rates], dim=-1)  # [R, L, G, ...]
    parameters = DeltaHeads(
        by_heads(module.conv1d.weight.squeeze(1), 0), module.A_log.view(heads, -1), module.dt_bias.view(heads, -1), key
    )
    if cached_step is not None:
        out = parameters.cached(module.layer_idx, inputs[0], cached_step)[None]
    else:

        def whole_rows(rows: Tensor) -> Tensor:
            """Returns [R, L, G, R*V] of whole rows [R, G, L, ...], by this rank's heads."""
            count, _heads, length, _channels = rows.shape
            mine = parameters if ulysses.group is None else parameters.part(ulysses.group.rank(), ulysses.size)
            lengths = [length] * count if documents is None else list(documents.lengths)
            of_rows = mine(rows.transpose(1, 2).flatten(0, 1), Chunks.of(lengths, rows.device))
            return of_rows.flatten(2).unflatten(0, (count, length))

        out = ulysses.attend(whole_rows, inputs.transpose(1, 2))
    gate = module.in_proj_z(hidden_states).view(-1, module.head_v_dim)
    normed = module.norm(out.reshape(-1, module.head_v_dim), gate)
    return module.out_proj(normed.view(*hidden_states.shape[:2], -1))
