"""Registers Triton kernels as torch operators, and says which tensors they take.

An operator has two parts. `outputs`, torch alone, allocates its results; fake tensors and torch.compile need no more.
The launcher, in a module that imports triton, fills them. That module is imported at the first launch.

    rms_norm = operators.operator("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", LAUNCHERS, outputs)

Autograd does not see inside an operator, so a `torch.autograd.Function` calls one in each direction.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mrl.kernels import compiler

LIBRARY = torch.library.Library("mrl", "FRAGMENT")
_as_cuda: str | None = None  # a type of devices whose tensors kernels take as they do those of CUDA


MISSING = compiler.c_compiler()[1] if importlib.util.find_spec("triton") is not None else "no package triton"
CAN_COMPILE = not MISSING


def notes() -> list[str]:
    """Returns a line for the user of a GPU whose kernels cannot be compiled."""
    if CAN_COMPILE:
        return []
    return [f"kernels: torch's own run, which are slower, because there is {MISSING}; mrl doctor says more"]


def uses_triton(x: Tensor) -> bool:
    """Returns whether this package computes `x`: on CUDA if Triton can compile, or inside the contexts below."""
    return x.is_cuda and CAN_COMPILE or _as_cuda is not None and x.device.type == _as_cuda


def supports(x: Tensor) -> bool:
    """Returns whether kernels compute with the numbers of `x`: they do so in fp32, so not with fp64."""
    return x.dtype in (torch.float32, torch.bfloat16, torch.float16) and uses_triton(x)


def interpreted(on: bool = True) -> contextlib.AbstractContextManager[None]:
    """Runs the kernels on CPU tensors by Triton's interpreter, inside the context; torch's code if not `on`. For tests.

    TRITON_INTERPRET=1 must be set before anything imports triton, whose own functions become kernels there.
    """
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before triton is imported"
    return _taken_as_cuda("cpu" if on else None)


def planned(on: bool = True) -> contextlib.AbstractContextManager[None]:
    """Takes tensors without memory as a GPU's, inside the context: operators make their outputs and launch nothing."""
    return _taken_as_cuda("meta" if on else None)


@contextlib.contextmanager
def _taken_as_cuda(device_type: str | None) -> Iterator[None]:
    global _as_cuda
    before, _as_cuda = _as_cuda, device_type
    try:
        yield
    finally:
        _as_cuda = before


def define(schema: str, functions: Mapping[str, Callable[..., Any]], outputs: Callable[..., Any]) -> Any:
    """Defines an operator of torch.ops.mrl and returns it.

    schema: as `torch.library.Library.define` takes it. functions: for CPU and CUDA tensors. outputs: called with the
    arguments, allocates the results.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    for device, function in functions.items():
        LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"mrl::{name}", outputs, lib=LIBRARY)
    return getattr(torch.ops.mrl, name).default


def operator(schema: str, launchers: str, outputs: Callable[..., Any]) -> Any:
    """Defines the operator of a kernel, as `define` does. Callers give all arguments by position.

    launchers: the module with a function of the operator's name, which is called with the arguments and then the
    outputs. outputs: allocates a tensor, a tuple of tensors, or nothing (None) if the operator writes into its
    arguments.
    """
    name = schema.partition("(")[0]

    @functools.cache
    def launcher() -> Callable[..., None]:
        return getattr(importlib.import_module(launchers), name)

    def run(*args: Any) -> Any:
        made = outputs(*args)
        results = () if made is None else made if isinstance(made, tuple) else (made,)
        launcher()(*args, *results)
        return made

    return define(schema, {"CUDA": run, "CPU": run}, outputs)
