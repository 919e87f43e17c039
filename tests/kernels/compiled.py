"""Compiles kernels for an H100 in place of launching them, in a process without TRITON_INTERPRET. It needs no GPU.

The interpreter accepts what the compiler refuses. A launch here has the arguments, sizes and warps of a real one.
"""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32", torch.bool: "*i1"}
H100 = GPUTarget("cuda", 90, 32)
MAX_SHARED = 227 * 1024  # bytes of a program


def compile_for_gpu(self, *args, grid, warmup, **kwargs):
    """Takes the place of `JITFunction.run`."""
    given = dict(zip(self.arg_names, args, strict=False)) | {n: v for n, v in kwargs.items() if n in self.arg_names}
    constants = {p.name for p in self.params if p.is_constexpr} | {n for n, v in given.items() if v is None}
    signature = {
        name: "constexpr" if name in constants
        else TYPES[given[name].dtype] if isinstance(given[name], torch.Tensor)
        else "fp32" if isinstance(given[name], float)
        else "i32"
        for name in self.arg_names
    }  # fmt: skip
    of = {(self.arg_names.index(name),): given[name] for name in constants}
    options = {name: value for name, value in kwargs.items() if name not in self.arg_names}
    made = triton.compile(ASTSource(self, signature, constexprs=of), target=H100, options=options)
    assert made.asm["cubin"] and made.metadata.shared <= MAX_SHARED
    COMPILED.append(self.__name__)


COMPILED: list[str] = []


def layers() -> None:
    from mrl.kernels import layers

    for dtype in (torch.bfloat16, torch.float32):
        for shape, centered in (((4, 16, 128), False), ((4, 1, 5120), True), ((4, 1, 16384), False)):
            x, weight = torch.zeros(shape, dtype=dtype, requires_grad=True), torch.zeros(shape[-1], dtype=dtype)
            if centered:
                weight.main_grad = torch.zeros(shape[-1])
            layers.rms_norm(x, weight.requires_grad_(), 1e-6, centered).sum().backward()
        q, k = (torch.zeros(4, heads, 128, dtype=dtype, requires_grad=True) for heads in (24, 8))
        sum(t.sum() for t in layers.rotary(q, k, *torch.zeros(2, 4, 64, dtype=dtype))).backward()
        for size, weights in ((768, torch.zeros(4, 1, requires_grad=True)), (8192, None)):
            x, up = torch.zeros(4, 2 * size, dtype=dtype, requires_grad=True), torch.zeros(4, size, dtype=dtype)
            layers.swiglu(x, weights=weights).sum().backward()
            layers.swiglu(up.requires_grad_(), up.clone()).sum().backward()


if __name__ == "__main__":
    triton.runtime.jit.JITFunction.run = compile_for_gpu
    layers()
    print(*sorted(set(COMPILED)))
