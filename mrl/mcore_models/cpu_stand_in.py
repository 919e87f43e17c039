"""Lets megatron-core run without a GPU. With one, `prepare()` makes only the changes that say "GPU or not" below.

megatron-core takes a GPU for granted. It creates tensors on `torch.cuda.current_device()` or "cuda". It asks for CUDA
streams, events, RNG states and memory figures. It checks tensor types by their CUDA names. `prepare()` answers these
requests with CPU objects, once per process and before megatron-core is imported. It also completes the collectives that
gloo lacks or restricts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device
from torch import Tensor

from mrl import patches
from mrl.kernels import layers, operators
from mrl.mcore_models import dispatch, elementwise
from mrl.mcore_models.platform import hide_what_does_not_load
from mrl.ops.devices import device, has_gpu

_FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "eye", "linspace", "as_tensor",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
)  # fmt: skip
_MODULES = tuple(
    f"megatron.core.{name}"
    for name in (
        "parallel_state", "models.gpt.gpt_model", "models.gpt.gpt_layer_specs", "transformer.moe.moe_layer",
        "optimizer", "distributed", "pipeline_parallel", "dist_checkpointing", "inference.contexts",
    )
)  # fmt: skip
_RANDOM = "megatron.core.tensor_parallel.random"
_ROPE = "megatron.core.models.common.embeddings.rope_utils"
_prepared = False


def prepare() -> None:
    """Makes `import megatron.core` and everything in it usable on this machine. Idempotent."""
    global _prepared
    if _prepared:
        return
    if not has_gpu():
        _replace_cuda_runtime()
        _replace_tensor_creation()
        _complete_gloo()
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns of a CUDA toolkit without a GPU
    hide_what_does_not_load()
    # megatron's notices about absent optional packages are not for the user's terminal
    with warnings.catch_warnings(action="ignore"), contextlib.nullcontext() if has_gpu() else _eager():
        for name in _MODULES:
            importlib.import_module(name)
    # 0.16.1's router leaves it undefined without transformer-engine
    vars(importlib.import_module("megatron.core.transformer.moe.moe_utils")).setdefault("te_general_gemm", None)
    _recompute_without_fp8_and_compiler()
    _turn_packed_tokens_as_others()
    dispatch.install()
    if has_gpu():
        theirs: Any = importlib.import_module("megatron.core.fusions.fused_bias_swiglu")
        _replace_swiglu(theirs.bias_swiglu_impl, theirs.weighted_bias_swiglu_impl)
    else:
        _mend_megatron()
    _prepared = True


def _eager() -> contextlib.AbstractContextManager[None]:
    """Keeps megatron's small functions as they are written. It wraps them in torch.compile as it is imported.

    On a CPU that costs a C++ compiler run per shape and saves nothing.
    """
    return patches.replaced(
        {"torch:compile": lambda model=None, **kwargs: model if model is not None else (lambda function: function)}
    )


class _Stream:
    """Stands in for a CUDA stream or event. A CPU runs everything in order, so each request is done when it returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = device()

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Stream") -> float:
        return 0.0

    def _done(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _done

    def record_event(self, event: "_Stream | None" = None) -> "_Stream":
        return event or _Stream()


def _replace_cuda_runtime() -> None:
    stream = _Stream()

    def answer(value: Any) -> Callable[..., Any]:
        """Returns a new function each time: torch.compile's tables refuse one object under two names."""
        return lambda *args, **kwargs: value

    get_rng, set_rng, seed_host = torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed
    answers: dict[str, Any] = {
        "current_device": lambda: device(), "device_count": answer(1),
        "device": lambda *a, **k: contextlib.nullcontext(),
        "Stream": _Stream, "Event": _Stream, "current_stream": answer(stream), "default_stream": answer(stream),
        "stream": lambda s: contextlib.nullcontext(),
        "get_rng_state": lambda *a, **k: get_rng(), "set_rng_state": lambda state, *a, **k: set_rng(state),
        "manual_seed": lambda seed: seed_host(seed), "manual_seed_all": lambda seed: None,  # torch.manual_seed calls it
        "memory_stats": lambda *a, **k: {}, "get_device_capability": answer((0, 0)),
    }  # fmt: skip
    answers |= {
        name: answer(None)
        for name in ("set_device", "synchronize", "empty_cache", "set_stream", "reset_peak_memory_stats")
    }
    answers |= {
        name: answer(0)
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    }
    answers["nvtx"] = types.SimpleNamespace(
        range_push=answer(None), range_pop=answer(None), range=lambda *a, **k: contextlib.nullcontext()
    )
    patches.replace({f"torch.cuda:{name}": function for name, function in answers.items()})
    patches.replace({f"torch.cuda.random:{name}": answers[name] for name in ("get_rng_state", "set_rng_state")})


def _is_cuda(where: Any) -> bool:
    return (isinstance(where, str) and where.startswith("cuda")) or (
        isinstance(where, torch.device) and where.type == "cuda"
    )


def _replace_tensor_creation() -> None:
    def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def create(*args: Any, **kwargs: Any) -> Any:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = device()
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return make(*args, **kwargs)

        return create

    # `with torch.device(...)` knows the factories by identity, from a table made at its first use: make it now
    torch.utils._device._device_constructors()
    patches.replace({f"torch:{name}": on_cpu(getattr(torch, name)) for name in _FACTORIES})
    to, type_name = torch.Tensor.to, torch.Tensor.type

    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = (device(), *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = device()
        return to(self, *args, **kwargs)

    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns a CUDA type name, because megatron's optimizers compare `t.type()` with "torch.cuda.FloatTensor" and
        the like."""
        result = type_name(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    patches.replace(
        {
            "torch:Tensor.to": move,
            "torch:Tensor.type": named,
            "torch:Tensor.cuda": lambda self, *a, **k: self,
            "torch:Tensor.pin_memory": lambda self, *a, **k: self,
            "torch:nn.Module.cuda": lambda self, *a, **k: self,
        }
    )


def _complete_gloo() -> None:
    """Makes all_gather take tensors of several sizes, by padding and slicing: gloo wants equal sizes. Expert dispatch
    under tensor parallelism has several."""
    all_gather = dist.all_gather

    @functools.wraps(all_gather)
    def gather(tensor_list: Any, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        sizes = [t.shape[0] if t.dim() else -1 for t in tensor_list]
        if async_op or len(set(sizes)) <= 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        longest = max(sizes)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        whole = [torch.empty_like(padded) for _ in tensor_list]
        all_gather(whole, padded, group=group)
        for out, got, size in zip(tensor_list, whole, sizes, strict=True):
            out.copy_(got[:size])
        return None

    patches.replace(
        {
            "torch.distributed:all_gather": gather,
            "torch.distributed.distributed_c10d:all_gather": gather,
            "torch.distributed:all_gather_into_tensor": _nothing_to_move(dist.all_gather_into_tensor),
            "torch.distributed:reduce_scatter_tensor": _nothing_to_move(dist.reduce_scatter_tensor),
        }
    )


def _nothing_to_move(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Skips a collective in place over a group of one rank.

    megatron gathers and scatters buffers in place. gloo copies them through another of the same size, even if nothing
    is to be done: 4 % of the CPU time of a step with 20 million parameters and 2,048 tokens (benchmarks/before.py).
    """

    @functools.wraps(collective)
    def run(output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group", args[-1] if args and isinstance(args[-1], dist.ProcessGroup) else None)
        in_place = output.data_ptr() == input.data_ptr() and output.numel() == input.numel()
        if in_place and not kwargs.get("async_op") and dist.get_world_size(group) == 1:
            return None
        return collective(output, input, *args, **kwargs)

    return run


def _recompute_without_fp8_and_compiler() -> None:
    """Makes megatron drop outputs and compute them again (`recompute_modules` layernorm, moe_act, mla_up_proj), GPU or
    not.

    `CheckpointWithoutOutput(fp8=False)` tests `fp8 is not None` (tensor_parallel/random.py, 0.16.1 and 0.19.2). So it
    asks transformer-engine for its FP8 state, even if that is not installed. Norms and activations have no FP8 state.

    0.19 puts the new output into the old one's storage by a C++ extension, which it compiles in the first backward
    pass. A copy, as in 0.16, needs no compiler.
    """
    patches.replace({f"{_RANDOM}:CheckpointWithoutOutput.__init__.__defaults__": (None,)})

    def share(old: torch.Tensor, new: torch.Tensor) -> None:
        with torch.no_grad():
            old.untyped_storage().resize_(new.untyped_storage().size())
            old.untyped_storage().copy_(new.untyped_storage())

    if hasattr(importlib.import_module(_RANDOM), "_get_share_storage"):
        patches.replace({f"{_RANDOM}:_get_share_storage": lambda: share})


def _turn_packed_tokens_as_others() -> None:
    """Turns packed tokens (`qkv_format` "thd") by angles that are given for each token, GPU or not.

    megatron's function (`_apply_rotary_pos_emb_thd`, 0.16.1 and 0.19.2) expects angles of positions 0, 1, 2, ... and
    cuts them by the lengths of sequences. It reads these lengths on the host twice in a layer's forward. If there are
    as many angles as the micro-batch has positions, it takes them for those of the whole row.
    """
    rope: Any = importlib.import_module(_ROPE)

    def turn(t: torch.Tensor, cu_seqlens: Any, freqs: torch.Tensor, *, cp_group: Any, **named: Any) -> torch.Tensor:
        """Turns t [T, heads, D] by freqs [T, 1, 1, D] of this rank's tokens."""
        return rope._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs, **named).squeeze(1)

    def turn_fused(t: torch.Tensor, cu_seqlens: Any, freqs: torch.Tensor, **_: Any) -> torch.Tensor:
        """Turns tokens, as one row, by transformer-engine's kernel (`apply_rope_fusion`)."""
        return rope.fused_apply_rotary_pos_emb(t.unsqueeze(1), freqs).squeeze(1)

    patches.replace({f"{_ROPE}:_apply_rotary_pos_emb_thd": turn})
    if rope.fused_apply_rotary_pos_emb is not None:  # megatron asks for both whether there is such a kernel
        patches.replace({f"{_ROPE}:fused_apply_rotary_pos_emb_thd": turn_fused})


def _mend_megatron() -> None:
    """Changes places of megatron-core that break, or are slow, without a GPU even if their CUDA calls are answered."""
    _use_cpu_functions()
    # `CudaRNGStatesTracker.fork` warns if the CPU's generator moves; here it is the GPU's too, so every dropout would
    # warn
    logging.getLogger(_RANDOM).setLevel(logging.ERROR)

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Returns numpy for a CPU tensor. `maybe_move_tensor_to_cpu` (moe_utils.py) converts CUDA tensors only, and its
        callers expect numpy."""
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    patches.replace(
        {
            # these two index torch.cuda.default_generators, which is empty without a GPU
            f"{_RANDOM}:_set_cuda_rng_state": lambda state, *a, **k: torch.set_rng_state(state),
            f"{_RANDOM}:_get_cuda_rng_state": lambda *a, **k: torch.get_rng_state(),
            "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu": to_host,
            "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu": to_host,
        }
    )


def _replace_swiglu(plain: Callable[..., Any], weighted: Callable[..., Any]) -> None:
    """Replaces megatron's SwiGLU by one kernel, and by the given functions where the kernel does not fit.

    It does not fit with an option set, nor on a CPU, but for tests of kernels and plans of a GPU (`interpreted` and
    `planned` of mrl.kernels.operators). megatron's own functions are compiled by torch, again in each run, and round
    once, at the end. Hugging Face rounds silu as well, and so does the kernel.
    """

    def fits(x: Tensor, bias: Tensor | None, options: tuple[Any, ...]) -> bool:
        return bias is None and not any(options) and operators.supports(x)

    def swiglu(x: Tensor, bias: Tensor | None = None, *options: Any) -> Tensor:
        return layers.swiglu(x) if fits(x, bias, options) else plain(x, bias, *options)

    def weighted_swiglu(x: Tensor, bias: Tensor | None, weights: Tensor, *options: Any) -> Tensor:
        if fits(x, bias, options):
            return layers.swiglu(x, weights=weights)
        return weighted(x, bias, weights, *options)

    activations = {"bias_swiglu_impl": swiglu, "weighted_bias_swiglu_impl": weighted_swiglu}
    for module in ("mlp", "moe.experts", "moe.shared_experts"):  # all that import them
        path = f"megatron.core.transformer.{module}"
        here = vars(importlib.import_module(path))
        patches.replace({f"{path}:{name}": function for name, function in activations.items() if name in here})


def _use_cpu_functions() -> None:
    """Replaces megatron's fused GPU functions by functions with few passes over memory (elementwise.py)."""
    _replace_swiglu(elementwise.swiglu, elementwise.weighted_swiglu)
    rope: Any = importlib.import_module(_ROPE)
    apply = rope._apply_rotary_pos_emb_bshd

    def turn(t: torch.Tensor, freqs: torch.Tensor, *options: Any, mscale: float = 1.0, **named: Any) -> torch.Tensor:
        """Turns t by `elementwise.rotary` if no option is set. Versions differ in the options' names and order; the
        ones that mrl does not set are false."""
        plain = freqs.shape[-1] == t.shape[-1] and mscale == 1.0 and not any(options) and not any(named.values())
        return elementwise.rotary(t, freqs) if plain else apply(t, freqs, *options, mscale=mscale, **named)

    patches.replace({f"{_ROPE}:_apply_rotary_pos_emb_bshd": turn})
