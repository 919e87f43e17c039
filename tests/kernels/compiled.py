"""Compiles kernels for an H100 in place of launching them, in a process without TRITON_INTERPRET. It needs no GPU.

The interpreter accepts what the compiler refuses. A launch here has the arguments, sizes and warps of a real one.
"""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}
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
        for wide in (dtype, torch.float32):  # as the decoder calls them
            heads = torch.zeros(4, 8, 5, 128, dtype=dtype)[:, :, :-1]
            layers.rms_norm_without_gradient(heads, torch.zeros(4, 128, dtype=wide), 1e-6)
            layers.rotary(heads[:, :, :-1], heads[:, :, -1:], *torch.zeros(2, 4, 8, 128, dtype=wide))
        for size, weights in ((768, torch.zeros(4, 1, requires_grad=True)), (8192, None)):
            x, up = torch.zeros(4, 2 * size, dtype=dtype, requires_grad=True), torch.zeros(4, size, dtype=dtype)
            layers.swiglu(x, weights=weights).sum().backward()
            layers.swiglu(up.requires_grad_(), up.clone()).sum().backward()


def head() -> None:
    from mrl.kernels.head import head_gradient_, head_sums

    for dtype in (torch.bfloat16, torch.float32):
        for labels, columns, softcap, entropy in ((1, 32768, 0.0, None), (3, 700, 30.0, torch.zeros(4))):
            z, ids = torch.zeros(4, columns, dtype=dtype), torch.zeros(4, labels, dtype=torch.int64)
            head_sums(z, ids, 0, [1.0, softcap, 0.7], entropy is not None, labels == 1)
            head_gradient_(z, ids, torch.zeros(4), torch.zeros(4, labels), entropy, entropy, 0, [1.0, softcap, 0.7])


def draw() -> None:
    from mrl.kernels.head import draw

    keys, chosen, wide = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.bool), torch.ones(4)
    draw(torch.zeros(4, 151936, dtype=torch.bfloat16), 0, None, None, None, None)
    draw(torch.zeros(4, 700), 1, keys, chosen, wide, wide)


def routes() -> None:
    from mrl.kernels import routes

    for experts, chosen in ((32, 4), (128, 8), (384, 8)):
        rows, choices, _ = routes.find_routes(torch.zeros(5, experts, dtype=torch.bool), chosen)
        for dtype in (torch.bfloat16, torch.float32):
            routes.sum_rows(routes.copy_rows(torch.zeros(5, 2048, dtype=dtype), choices, chosen), rows)


if __name__ == "__main__":
    triton.runtime.jit.JITFunction.run = compile_for_gpu
    layers()
    head()
    draw()
    routes()
    print(*sorted(set(COMPILED)))
