"""Says where the gradient of a weight may be added to megatron's fp32 buffer inside a backward pass.

Under `gradient_accumulation_fusion` megatron's linear layers do so (tensor_parallel/layers.py, 0.16.1 and 0.19.2). Its
hook (distributed/distributed_data_parallel.py) then drops the gradient that autograd gets.
"""

from __future__ import annotations

from torch import Tensor, float32

_TIED = ("zero_out_wgrad", "shared_embedding")


def main_grad_of(weight: Tensor | None) -> Tensor | None:
    """Returns the weight's buffer, or None if its gradient is to be returned.

    A tied weight is left to autograd, because its sum has the gradient of the embedding, too.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or main_grad.dtype != float32 or not hasattr(weight, "grad_added_to_main_grad"):
        return None
    return None if any(getattr(weight, name, False) for name in _TIED) else main_grad


def mark_added(weight: Tensor) -> None:
    """Makes megatron's hook drop the gradient that is returned."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
