"""Sends rows of tokens to experts and back, one operator for each step, on tensors that `operators.uses_triton` has.

Values are those of `mrl.mcore_models.dispatch`, to the bit. Dimensions as there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.kernels import operators

_LAUNCHERS = "mrl.kernels.route_launchers"


def _routes_of(routing_map: Tensor, chosen: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = routing_map.shape[0]
    rows = torch.empty(tokens, chosen, dtype=torch.int64, device=routing_map.device)
    return rows, rows.new_empty(tokens * chosen), rows.new_empty(tokens * chosen)


find_routes = operators.operator(
    "find_routes(Tensor routing_map, int chosen) -> (Tensor, Tensor, Tensor)", _LAUNCHERS, _routes_of
)
"""Returns the fields of `dispatch.Routes`, in their order."""

copy_rows = operators.operator(
    "copy_rows(Tensor x, Tensor choices, int chosen) -> Tensor",
    _LAUNCHERS,
    lambda x, choices, chosen: x.new_empty(len(choices), x.shape[1]),
)
"""Returns x[choices // chosen] [R, H] of x [T, H]."""

sum_rows = operators.operator(
    "sum_rows(Tensor y, Tensor rows) -> Tensor", _LAUNCHERS, lambda y, rows: y.new_empty(len(rows), y.shape[1])
)
"""Returns sum_k y[rows[t, k]] [T, H] of y [R, H]; terms in this order, added in fp32 and rounded once."""
