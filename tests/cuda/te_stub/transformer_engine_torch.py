"""The names of transformer-engine's C++ extension for torch, so that its Python modules can be imported and built where
the extension cannot be: every name that begins with a capital is an enumeration, every other one a function that
refuses to be called, or is one of `KERNELS`."""

from __future__ import annotations

from typing import Any

import torch

from tests.cuda import fake


class _Member(int):
    """A member of an enumeration of which any name is one."""

    def __new__(cls, owner: str, name: str, number: int) -> "_Member":
        made = super().__new__(cls, number)
        made.owner, made.name = owner, name
        return made

    def __repr__(self) -> str:
        return f"{self.owner}.{self.name}"

    @property
    def value(self) -> int:
        return int(self)

    def __hash__(self) -> int:
        return hash((self.owner, self.name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Member) and (self.owner, self.name) == (other.owner, other.name)


class _Enumeration(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = cls._members[name] = _Member(cls.__name__, name, len(cls._members))
        setattr(cls, name, member)
        return member

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _Member) and value.owner == cls.__name__

    @property
    def __members__(cls) -> dict[str, _Member]:
        return dict(cls._members)


def _numbered(name: str, *members: str) -> Any:
    """An enumeration whose members have the numbers that the C++ gives them, which lists are indexed with."""
    made: Any = _Enumeration(name, (), {"_members": {}})
    for member in members:
        getattr(made, member)
    return made


KERNELS: dict[str, Any] = {}
"""What some of the functions do here: those of te_kernels.py, once they are installed."""

_GEMMS = [f"GEMM{i}_{of}" for i in (1, 2, 3) for of in ("INPUT", "WEIGHT", "OUTPUT")]
_GRADS = [f"GRAD_{of}{i}" for i in (1, 2, 3) for of in ("OUTPUT", "INPUT")]
FP8FwdTensors = _numbered("FP8FwdTensors", *_GEMMS)
FP8BwdTensors = _numbered("FP8BwdTensors", *_GRADS)

# What its modules ask as they are imported or built.


def get_cudnn_version() -> int:
    return fake.cudnn_number()


def get_cublasLt_version() -> int:  # noqa: N802  its name
    return 130100


def get_num_cublas_streams() -> int:
    return 4


def device_supports_multicast(*_: Any) -> bool:
    return True


def ubuf_built_with_mpi() -> bool:
    return False


def get_stream_priority_range() -> tuple[int, int]:
    return 0, -5


CommOverlapType = _numbered("CommOverlapType", "RS", "AG")


class CommOverlapHelper:
    """What buffers are made over: all processes, and this one's tensor-parallel group."""

    def __init__(self, world: Any, domain: Any) -> None:
        self.ranks = torch.distributed.get_process_group_ranks(domain)


class CommOverlap:
    """A buffer that takes tensors of its own shape alone, and of its element size (comm_gemm_overlap.cpp)."""

    def __init__(
        self, shape: Any, dtype: torch.dtype, helper: CommOverlapHelper, tp: int, *, comm_type: Any, use_cublasmp: bool,
        **_: Any,
    ) -> None:  # fmt: skip
        assert len(helper.ranks) == tp and shape[0] % tp == 0 and not use_cublasmp
        self.tp, self.kind, self.buffer = tp, comm_type, torch.empty(*shape, dtype=dtype, device="cuda")

    def is_fp8_ubuf(self) -> bool:
        return self.buffer.element_size() == 1

    def with_cublasmp(self) -> bool:
        return False

    def copy_into_buffer(self, tensor: Any, local_chunk: bool = False) -> None:
        assert tensor.element_size() == self.buffer.element_size()
        expected = self.buffer.numel() // (self.tp if local_chunk else 1)
        assert tensor.numel() == expected, f"{tuple(tensor.shape)} for a buffer of {tuple(self.buffer.shape)}"

    def get_buffer(self, local_chunk: bool = False, shape: Any = None) -> Any:
        rows = self.buffer[: len(self.buffer) // self.tp] if local_chunk else self.buffer
        return rows if shape is None else rows.view(shape)


class CommOverlapP2P(CommOverlap):
    """As above, in a ring of tensor-parallel ranks."""

    def __init__(self, shape: Any, dtype: Any, helper: Any, tp: int, comm_type: Any, **rest: Any) -> None:
        super().__init__(shape, dtype, helper, tp, comm_type=comm_type, **rest)
        if comm_type == CommOverlapType.RS:  # what comes in is added at the end
            self.incoming = torch.empty(shape[0] // tp * (tp - 1), shape[1], dtype=dtype, device="cuda")


def is_non_tn_fp8_gemm_supported(*_: Any) -> bool:
    return False


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name[0].isupper():
        value: Any = _Enumeration(name, (), {"_members": {}})
    else:

        def value(*args: Any, **kwargs: Any) -> Any:
            if name in KERNELS:
                return KERNELS[name](*args, **kwargs)
            raise NotImplementedError(f"transformer_engine_torch.{name} is a name alone here")

    globals()[name] = value
    return value
