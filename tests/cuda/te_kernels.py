"""transformer-engine's kernels as shapes and dtypes: what its C++ would hand back, of tensors without memory.

With them its own Python modules make a whole update on fake CUDA tensors: its linear and grouped layers, RoPE, attention,
routers, permutations (whose shapes transformer-engine gives itself, for torch.compile) and FusedAdam. Every function holds its inputs
to the shapes that the C++ asks for, and the dtypes that it writes are those that it is told to. No number is computed.

    kernels = install()         what was called of them since (te_cases.py)
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import transformer_engine_torch as tex
from torch import Tensor

from tests.cuda.te_cases import Kernels

_RUN = Kernels()
_KERNELS: dict[str, Any] = {}


def install() -> Kernels:
    """The functions here are transformer-engine's from now on, in this process. Returns what will be called of them."""

    def counted(name: str, kernel: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            _RUN.calls[name] += 1
            return kernel(*args, **kwargs)

        return call

    tex.KERNELS.update({name: counted(name, kernel) for name, kernel in _KERNELS.items()})
    importlib.import_module("transformer_engine.pytorch.cpp_extensions").__getattr__ = lambda name: getattr(tex, name)
    return _RUN


def _kernel(function: Any) -> Any:
    _KERNELS[function.__name__] = function
    return function


def _dtype(number: Any) -> torch.dtype:
    return importlib.import_module("transformer_engine.pytorch.constants").TE_DType_To_Torch[number]


def _storage() -> Any:
    """The class of all tensors in 8 bits."""
    return importlib.import_module("transformer_engine.pytorch.quantized_tensor").QuantizedTensorStorage


# -- matrix products ---------------------------------------------------------------------------------------------------


def _product(a: Any, transa: bool, b: Any, transb: bool) -> tuple[int, ...]:
    """Shape of op(b) @ op(a), whose inner sizes are equal. Either may have more than two axes, all but the last of rows."""
    of_a, of_b = tuple(a.size()), tuple(b.size())
    rows_a, rows_b = math.prod(of_a[:-1]), math.prod(of_b[:-1])
    outer_a, inner_a = (rows_a, of_a[-1]) if transa else (of_a[-1], rows_a)
    assert inner_a == (rows_b if transb else of_b[-1]), f"{of_a} {transa} with {of_b} {transb}"
    return (of_b[-1], outer_a) if transb else (*of_b[:-1], outer_a)


@_kernel
def generic_gemm(
    a: Any, transa: bool, b: Any, transb: bool, out: Tensor | None, quantizer: Any, out_dtype: Any, bias: Tensor | None,
    bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, workspace: Tensor, size: int, accumulate: bool,
    split_accumulator: bool, *, extra_output: Any = None, comm_overlap: Any = None, comm_type: Any = None,
    bulk_overlap: bool = False, **_: Any,
) -> tuple[Any, Tensor | None, None, Any]:  # fmt: skip
    assert not gelu and quantizer is None and workspace.numel() == size
    if comm_overlap is not None:
        _overlapped(comm_overlap, comm_type, bulk_overlap, b, _product(a, transa, b, transb), extra_output)
    out = _multiplied(a, transa, b, transb, out, out_dtype, accumulate)
    bias_grad = torch.empty_like(bias) if grad and bias is not None else None
    return out, bias_grad, None, extra_output


def _overlapped(
    buffer: Any, kind: Any, bulk: bool, rows: Tensor, out: tuple[int, ...], scattered: Tensor | None
) -> None:
    """Communication beside a product. What is gathered is the product's input, and what is scattered its output, but in
    bulk, where it is another tensor that lies in the buffer already."""
    whole, gathers = tuple(buffer.buffer.shape), kind == tex.CommOverlapType.AG
    if not bulk and gathers:
        assert math.prod(rows.shape) == math.prod(whole), f"{tuple(rows.shape)} for a buffer of {whole}"
    elif not bulk:
        assert math.prod(out) == math.prod(whole) and scattered is not None
        assert scattered.numel() == math.prod(whole) // buffer.tp, f"{tuple(scattered.shape)} of a buffer of {whole}"
    _RUN.overlaps[" ".join(["bulk"] * bulk + [type(buffer).__name__, "gather" if gathers else "scatter"])] += 1


def _multiplied(
    a: Any, transa: bool, b: Any, transb: bool, out: Tensor | None, out_dtype: Any, accumulate: bool
) -> Tensor:
    shape, quantized = _product(a, transa, b, transb), [isinstance(t, _storage()) for t in (a, b)]
    if any(quantized):
        assert all(quantized), f"a product of {type(a).__name__} and {type(b).__name__}"
        kind = type(a).__name__.removesuffix("Storage")
    else:
        assert a.dtype == b.dtype and a.is_cuda and b.is_cuda, f"{a.dtype} with {b.dtype}"
        kind = str(a.dtype).removeprefix("torch.")
    _RUN.products[kind] += 1
    if out is None:
        assert not accumulate
        return torch.empty(shape, dtype=b.dtype if out_dtype is None else _dtype(out_dtype), device="cuda")
    assert out.numel() == math.prod(shape) and out.shape[-1] == shape[-1], f"{tuple(out.shape)} for {shape}"
    if transb:  # a weight's gradient
        _RUN.summed[f"{out.dtype}".removeprefix("torch.") + (" sum" if accumulate else " over")] += 1
    return out


@_kernel
def te_general_grouped_gemm(
    a: Sequence[Any], transa: bool, b: Sequence[Any], transb: bool, out: Sequence[Tensor], out_dtype: Any,
    m_splits: Sequence[int], bias: Sequence[Tensor], bias_dtype: Any, single_output: bool, pre_gelu: Any, grad: bool,
    workspaces: Sequence[Tensor], size: int, accumulate: bool, split_accumulator: bool, sms: int,
) -> Any:  # fmt: skip
    """Each expert's product. `single_output`: all are rows of one tensor."""
    shapes = [_product(one, transa, other, transb) for one, other in zip(a, b, strict=True)]
    if single_output:
        [whole] = out
        assert tuple(whole.shape) == (sum(shape[0] for shape in shapes), shapes[0][1]), (
            f"{tuple(whole.shape)} of {shapes}"
        )
        out = whole.split([shape[0] for shape in shapes])
    for one, other, result in zip(a, b, out, strict=True):
        _multiplied(one, transa, other, transb, result, None, accumulate)
    return bias


# -- norms, rotary embedding, attention --------------------------------------------------------------------------------


@_kernel
def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: Any, dtype: Any, sms: int, zero_centered: bool
) -> tuple[Any, None, Tensor]:
    assert x.dim() == 2 and weight.shape == x.shape[-1:]
    if quantizer is not None:
        out = quantize(x, quantizer)
    elif out is None:
        out = torch.empty(x.shape, dtype=_dtype(dtype), device=x.device)
    return out, None, torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


@_kernel
def rmsnorm_bwd(
    grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, sms: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    assert grad.shape == x.shape and tuple(inverse.shape) == (x.shape[0],)
    return torch.empty_like(x), torch.empty_like(weight)


def _turned(
    t: Tensor, angles: Tensor, start: Any, layout: Any, interleaved: bool, lengths: Tensor | None, cp: int, rank: int
) -> Tensor:
    assert t.shape[-1] >= angles.shape[-1] and angles.dtype == torch.float32
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


_KERNELS |= {"fused_rope_forward": _turned, "fused_rope_backward": _turned}


@_kernel
def fused_attn_fwd(most_q: int, most_kv: int, is_training: bool, *rest: Any) -> list[Tensor]:
    q, k, v = (t for t in rest if isinstance(t, Tensor) and t.dim() == 3)
    assert k.shape[0] == v.shape[0] and q.shape[-1] == k.shape[-1] and k.shape[1] == v.shape[1]
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    stats = torch.empty(*q.shape[:-1], 1, dtype=torch.float32, device=q.device)
    return [out, stats, torch.empty(2, dtype=torch.int64, device=q.device), *_sinks(rest)]


def _sinks(values: Sequence[Any]) -> list[Tensor]:
    """Those of the heads, [1, h, 1, 1], where a layer has some."""
    return [t for t in values if isinstance(t, Tensor) and t.dim() == 4]


@_kernel
def fused_attn_bwd(most_q: int, most_kv: int, scale: float, *rest: Any) -> list[Tensor | None]:
    q, k, v, out, grad, *_ = (t for t in rest if isinstance(t, Tensor) and t.dim() == 3)
    assert out.shape == grad.shape and out.shape[:-1] == q.shape[:-1]
    aux = next(
        value for value in rest if isinstance(value, list | tuple) and len(value) > 1 and isinstance(value[0], Tensor)
    )
    return [*(torch.empty_like(t) for t in (q, k, v)), None, *(torch.empty_like(t) for t in _sinks(aux) or [q[:0]])]


@_kernel
def thd_read_half_tensor(x: Tensor, offsets: Tensor, half: int) -> Tensor:
    """The first or the second half of every sequence, for a step of a ring of context-parallel ranks."""
    return torch.empty(x.shape[0] // 2, *x.shape[1:], dtype=x.dtype, device=x.device)


@_kernel
def thd_read_second_half_lse(x: Tensor, offsets: Tensor, packed: bool, length: int) -> Tensor:
    return torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)


def _corrected(x: Tensor, by: Tensor, *_: Any) -> None:
    assert x.shape[1:] == by.shape[1:] or x.shape[:-1] == by.shape[:-1], f"{tuple(x.shape)} by {tuple(by.shape)}"


_KERNELS |= dict.fromkeys(("thd_out_correction", "thd_second_half_lse_correction", "thd_grad_correction"), _corrected)


# -- experts -----------------------------------------------------------------------------------------------------------


@_kernel
def fused_topk_with_score_function_fwd(
    logits: Tensor, topk: int, pre_softmax: bool, groups: Any, group_topk: Any, scale: Any, function: str,
    bias: Tensor | None, layout: int, indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert logits.dim() == 2 and topk <= logits.shape[1]
    fp32 = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    return torch.empty_like(logits), torch.empty(logits.shape, dtype=torch.bool, device=logits.device), fp32


@_kernel
def fused_topk_with_score_function_bwd(routing: Tensor, kept: Tensor, grad: Tensor, into: Tensor, *_: Any) -> None:
    assert routing.shape == kept.shape == grad.shape == into.shape


@_kernel
def fused_score_for_moe_aux_loss_fwd(*, logits: Tensor, topk: int, score_function: str, **_: Any) -> tuple[Tensor, ...]:
    fp32 = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    return fp32, torch.empty(logits.shape, dtype=torch.bool, device=logits.device), torch.empty_like(fp32)


@_kernel
def fused_score_for_moe_aux_loss_bwd(*, intermediate_output: Tensor, grad_logits: Tensor, **_: Any) -> None:
    assert intermediate_output.shape == grad_logits.shape


def _aux_loss(*, probs: Tensor, tokens_per_expert: Tensor, num_experts: int, **_: Any) -> tuple[Tensor, Tensor]:
    assert probs.shape[1] == tokens_per_expert.numel() == num_experts
    return tuple(torch.empty((), dtype=dtype, device=probs.device) for dtype in (probs.dtype, torch.float32))


_KERNELS |= {"fused_moe_aux_loss_fwd": _aux_loss, "fused_moe_aux_loss_fwd_graph_safe": _aux_loss}


@_kernel
def fused_moe_aux_loss_bwd(
    *, tokens_per_expert: Tensor, num_rows: int, num_cols: int, grad_aux_loss: Tensor, **_: Any
) -> Tensor:
    return torch.empty(num_rows, num_cols, dtype=grad_aux_loss.dtype, device=tokens_per_expert.device)


@_kernel
def fused_multi_row_padding(x: Tensor, out: Tensor, rows: Sequence[int], padded: Sequence[int]) -> None:
    assert x.shape[0] == sum(rows) and out.shape[0] == sum(padded) and x.shape[1] == out.shape[1]


@_kernel
def fused_multi_row_unpadding(x: Tensor, out: Tensor, padded: Sequence[int], rows: Sequence[int]) -> None:
    assert x.shape[0] == sum(padded) and out.shape[0] == sum(rows) and x.shape[1] == out.shape[1]


# -- optimizer ---------------------------------------------------------------------------------------------------------


@_kernel
def multi_tensor_adam(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], *_: Any) -> None:
    """lists: gradients, parameters, both moments; masters, where the parameters have some."""
    for together in zip(*lists, strict=True):
        assert len({t.shape for t in together}) == 1 and {t.device.type for t in together} == {"cuda"}


@_kernel
def multi_tensor_l2norm(
    chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], each: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    whole = torch.empty(1, dtype=torch.float32, device=overflow.device)
    return whole, torch.empty(len(lists[0]) if each else 0, dtype=torch.float32, device=overflow.device)


@_kernel
def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    assert all(one.shape == other.shape for one, other in zip(*lists, strict=True))


# -- 8 bits ------------------------------------------------------------------------------------------------------------


@_kernel
def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pinned: bool = False
) -> Any:
    """A tensor of the quantizer's class, with rows, columns and scales as transformer-engine says it allocates them."""
    return _storage().__tensor_unflatten__(
        quantizer.alloc_tensors(shape, device=device), quantizer.create_metadata(shape, dtype=dtype), tuple(shape), None
    )


@_kernel
def quantize(x: Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    return quantizer.make_empty(x.shape, dtype=x.dtype, device=x.device) if output is None else output


@_kernel
def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return torch.empty(grad.shape[-1], dtype=grad.dtype, device=grad.device), quantize(grad, quantizer)


@_kernel
def split_quantize(x: Tensor, rows: Sequence[int], quantizers: Sequence[Any], **_: Any) -> list[Any]:
    return [quantize(part, quantizer) for part, quantizer in zip(x.split(list(rows)), quantizers, strict=True)]


@_kernel
def fp8_transpose(x: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    return torch.empty(x.shape[-1], *x.shape[:-1], dtype=x.dtype, device=x.device) if out is None else out


@_kernel
def swap_first_dims(x: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.empty(x.shape[1], x.shape[0], *x.shape[2:], dtype=x.dtype, device=x.device) if out is None else out
