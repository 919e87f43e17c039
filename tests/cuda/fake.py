"""A process without a GPU that computes on "cuda" tensors which have no memory: shapes, dtypes and devices are real.

torch's FakeTensorMode runs every operation on shapes alone. On a CPU build of torch it lacks a device guard for
"cuda", which some C++ gives it (guard.cpp); what Python asks of torch.cuda is answered here. Import this
before mrl or megatron-core, in a process of its own (worker.py): nothing of it can be undone.

    install()                        once
    with Fake() as fake:             fake.syncs, fake.memory: what the code inside asked the host to wait for, and took
        ...
"""

# ruff: noqa: E402  the guard is loaded before torch

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.cuda import guard

HERE = str(Path(__file__).parent)
if "pytest" not in sys.modules:  # pytest imports this for the type of a result, and its own tests compile
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what megatron compiles for a GPU runs as it is written
_guard = ctypes.CDLL(str(guard.build()), mode=ctypes.RTLD_GLOBAL)

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from mrl.engine.peak_bytes import PeakBytes
from mrl.kernels import operators
from tests.cuda.order import Unordered

GPU = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30
)

CUDNN = (9, 20, 0)


def cudnn_number() -> int:
    """Returns cuDNN's version as it says it itself."""
    major, minor, patch = CUDNN
    return 10_000 * major + 100 * minor + patch


# -- what torch.cuda answers -------------------------------------------------------------------------------------------


class Stream:
    """A stream or an event: what was asked of it is done."""

    _made = 0
    current: Stream
    """Of this thread."""

    def __init__(self, *_: Any, **__: Any) -> None:
        Stream._made += 1
        self.stream_id = self.cuda_stream = Stream._made
        self.device, self.device_index, self.device_type = torch.device("cuda", 0), 0, 1

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        waits("synchronize")

    def _done(self, *_: Any) -> None:
        return None

    record = wait = wait_stream = wait_event = _done

    def record_event(self, event: Any = None) -> "Stream":
        return event or Stream()


class _Nothing:
    """A context manager that does nothing, for `torch.cuda.device(...)`."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *_: object) -> None:
        return None


_active: list["Fake"] = []
_rng = torch.zeros(16, dtype=torch.uint8)


def _random_state(*_: Any, **__: Any) -> torch.Tensor:
    if Graph.capturing:
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")
    return _rng


class _Generator:
    def get_state(self) -> torch.Tensor:
        return _rng

    def set_state(self, _: torch.Tensor) -> None:
        return None

    def manual_seed(self, _: int) -> "_Generator":
        return self

    def initial_seed(self) -> int:
        return 0


def _caller() -> Any:
    """The frame that asked, past torch and these tests."""
    frame = sys._getframe(1)
    while frame.f_back and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename.startswith(HERE)):
        frame = frame.f_back
    return frame


class Graph:
    """A CUDA graph: what was run while it was captured, which is nothing here but the places that must not wait."""

    capturing = False
    """Whether one is being captured: the host must wait for nothing then."""
    overrides = False
    """Whether nodes of autograd that are on the default stream go to that of a capture."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.captured, self.replayed = False, 0

    def replay(self) -> None:
        assert self.captured, "nothing was captured"
        self.replayed += 1
        for fake in _active:
            fake.replays += 1


class Capture:
    """`with torch.cuda.graph(graph, pool=..., capture_error_mode=...)`."""

    def __init__(self, graph: Graph, *, pool: Any, capture_error_mode: str) -> None:
        assert pool == POOL and capture_error_mode in ("global", "thread_local", "relaxed")
        self.graph = graph

    def __enter__(self) -> None:
        waits("torch.cuda.synchronize")  # as torch does before
        Graph.capturing, self.before, Stream.current = True, Stream.current, Stream()

    def __exit__(self, kind: Any, *_: object) -> None:
        Graph.capturing = False
        self.graph.captured = kind is None
        if self.graph.captured:  # else torch raises before it sets the stream back
            Stream.current = self.before


POOL = "a pool of graphs"


ROOTS = (("site-packages/", ""), ("/te/transformer_engine/", "transformer_engine/"), ("/mrl/", "mrl/"))
"""Where code lies, and what of that is in the name of a line."""


def waits(what: str) -> None:
    """Counts a wait of the host for the GPU, under the line of the code that asked. Raises what CUDA does inside of a
    capture."""
    if Graph.capturing:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
    if not _active:
        return
    frame = _caller()
    file = frame.f_code.co_filename
    at = max((file.rfind(root) + len(root) - len(kept) for root, kept in ROOTS if root in file), default=0)
    short = file[at:]
    where = f"{short} {frame.f_code.co_name} {what}"
    _active[-1].syncs[where] = _active[-1].syncs.get(where, 0) + 1


def install(capability: tuple[int, int] = (9, 0)) -> None:
    """torch says that there is a GPU of this compute capability, in this process, from now on."""
    _guard.install()
    operators.CAN_COMPILE = True  # no kernel is compiled for tensors without memory
    cuda = torch.cuda
    stream = Stream.current = Stream()

    def answer(value: Any) -> Callable[..., Any]:
        """Returns a new function each time: torch.compile's tables refuse one object under two names."""
        return lambda *args, **kwargs: value

    GPU.major, GPU.minor = capability
    answers: dict[str, Any] = {
        "is_available": answer(True), "is_initialized": answer(True), "device_count": answer(8),
        "current_device": answer(0), "get_device_name": answer(GPU.name), "get_device_properties": answer(GPU),
        "get_device_capability": answer(capability), "Stream": Stream, "Event": Stream, "device": _Nothing,
        "current_stream": lambda *_: Stream.current, "default_stream": answer(stream),
        "set_stream": lambda stream: setattr(Stream, "current", stream),
        "stream": lambda _: contextlib.nullcontext(), "memory_stats": answer({}),
        "synchronize": lambda *_: waits("torch.cuda.synchronize"), "get_rng_state": _random_state,
        "default_generators": tuple(_Generator() for _ in range(8)), "is_bf16_supported": answer(True),
        "CUDAGraph": Graph, "graph": Capture, "graph_pool_handle": answer(POOL),
        "is_current_stream_capturing": lambda: Graph.capturing,
    }  # fmt: skip
    nothing = ("init", "_lazy_init", "set_device", "empty_cache", "reset_peak_memory_stats")
    answers |= {name: answer(None) for name in (*nothing, "set_rng_state", "manual_seed", "manual_seed_all")}
    figures = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    answers |= {name: answer(0) for name in figures}
    for name, value in answers.items():
        setattr(cuda, name, value)
    torch.backends.cudnn.version = answer(cudnn_number())
    random: Any = sys.modules["torch.cuda.random"]
    random.get_rng_state, random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda.nvtx = types.SimpleNamespace(
        range_push=answer(None), range_pop=answer(None), range=lambda *a, **k: contextlib.nullcontext()
    )
    dist._coalescing_manager = dist.distributed_c10d._coalescing_manager = _one_by_one
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)
    torch.nn.Module.to = _module_to
    torch.UntypedStorage.device = property(_device_of_storage)
    torch.autograd.graph.set_override_stale_capture_stream = lambda enabled: setattr(Graph, "overrides", enabled)
    torch.autograd._engine_run_backward = _watched_backward(torch.autograd.graph._engine_run_backward)
    del fake_tensor.FakeTensor.tolist  # it asks for each number, which would say nothing of whose they are


@contextlib.contextmanager
def _one_by_one(*_: Any, **__: Any) -> Iterator[Any]:
    """Coalesced collectives as single ones, which fake tensors know."""
    yield types.SimpleNamespace(wait=lambda: None)


def _watched_backward(run: Callable[..., Any]) -> Callable[..., Any]:
    """torch takes a function mode off while it runs what the mode was asked about, `backward` too: a recomputed forward
    would go unwatched."""

    def backward(*args: Any, **kwargs: Any) -> Any:
        if Graph.capturing and not Graph.overrides:  # DDP keeps nodes that were made before
            raise RuntimeError("AccumulateGrad has a stale reference to the default stream (stream 0)")
        if not _active:
            return run(*args, **kwargs)
        with _active[-1].functions:
            return run(*args, **kwargs)

    return backward


_device_of_any_storage = torch.UntypedStorage.device


def _device_of_storage(storage: torch.UntypedStorage) -> torch.device:
    """Returns the device of a storage. Those of fakes are all on "meta": the ones that are counted are on "cuda"."""
    found = _device_of_any_storage.__get__(storage)
    counted = _active[-1].memory._storages if found.type == "meta" and _active else ()
    return torch.device("cuda", 0) if storage._cdata in counted else found


def _module_to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """`Module.to`, which torch does by swapping tensors that fakes cannot swap: by new parameters with what was noted
    on the old ones."""
    wanted = torch.device(kwargs.get("device", args[0] if args else None))
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.device.type != wanted.type:
                moved = torch.nn.Parameter(parameter.detach().to(wanted), parameter.requires_grad)
                vars(moved).update({k: v for k, v in vars(parameter).items() if k not in vars(moved)})
                part._parameters[name] = moved
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type != wanted.type:
                part._buffers[name] = buffer.to(wanted)
    return module


# -- processes ---------------------------------------------------------------------------------------------------------


def join_world(rank: int, world_size: int) -> None:
    """This process is one rank of a world in which nobody else runs: collectives do nothing to fake tensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank % 8))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    new_group = dist.new_group

    def fake_group(ranks: Any = None, *_: Any, **__: Any) -> Any:
        return new_group(ranks, backend="fake")

    def gather_objects(out: list, value: Any, group: Any = None) -> None:
        out[:] = [value] * len(out)

    dist.new_group = dist.distributed_c10d.new_group = fake_group
    dist.all_gather_object = dist.distributed_c10d.all_gather_object = gather_objects

    def broadcast_objects(objects: list, src: int = 0, group: Any = None, **_: Any) -> None:
        if objects == [None] and _active:
            objects[:] = [_active[-1].given.told(_caller().f_code.co_name)]

    dist.broadcast_object_list = dist.distributed_c10d.broadcast_object_list = broadcast_objects


# -- what is watched ---------------------------------------------------------------------------------------------------


_READS = {
    getattr(torch.Tensor, name)
    for name in ("item", "__bool__", "__float__", "__int__", "__index__", "tolist", "numpy", "nonzero", "masked_select")
} | {torch.nonzero, torch.masked_select}


class Given:
    """What the host reads from fake CUDA tensors. A subclass knows more (run.py: of pipelines and experts)."""

    def selected(self, mask: torch.Tensor) -> int:
        """How many places of a mask are set."""
        raise NotImplementedError("a mask's places are counted, and nothing says how many there are")

    def told(self, function: str) -> Any:
        """What another rank hands to the caller `function`."""
        raise NotImplementedError(f"{function} waits for another rank's words")

    def number(self, tensor: torch.Tensor, function: str) -> Any:
        """What a tensor of one element is for the caller `function`."""
        return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1

    def numbers(self, tensor: torch.Tensor, function: str) -> Any:
        """What `tolist` or `numpy` gives, for the caller `function`."""
        raise NotImplementedError(f"{function} reads a tensor of {tuple(tensor.shape)}, and nothing says what is in it")


class _Functions(TorchFunctionMode):
    """`device=0` means cuda:0; nothing is pinned; what the host reads is counted and given."""

    def __init__(self, given: Given) -> None:
        super().__init__()
        self.given = given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.is_pinned:
            return True
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], torch.device("cuda", args[1]), *args[2:])
        if func is torch.Tensor.cuda:
            if args[0].device.type == "cpu" and _blocks(args, kwargs):
                waits("to_gpu")
            return args[0].to("cuda:0")
        if func is torch.Tensor.copy_ and _blocks(args, kwargs):
            there, here = args[0].device.type, (args[1] if len(args) > 1 else kwargs["src"]).device.type
            if {there, here} == {"cpu", "cuda"}:
                waits("cpu" if there == "cpu" else "to_gpu")
        if func in (torch.tensor, torch.as_tensor) and _has_tensors(args[0]):
            args = (self._numbers(args[0]), *args[1:])
        if func in (torch.tensor, torch.as_tensor) and _from_host(args[0], kwargs.get("device")):
            device = kwargs.pop("device")  # data of the host goes through a tensor of the host
            waits("to_gpu")
            return func(*args, **kwargs).to(device)
        if func is torch.tensor and isinstance(args[0], list) and all(type(v) is int for v in args[0]):
            made = func(*args, **kwargs)
            made.numbers = list(args[0])  # the host has them: they need not be given
            return made
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].device.type == "cuda":
            from mrl.engine.megatron.meta_run import attention

            return attention(*args, **kwargs)
        if args and isinstance(args[0], torch.Tensor):
            tensor = args[0]
            if tensor.device.type == "cuda":
                if func is torch.equal:
                    waits("equal")
                    return True
                if func in _READS:
                    return self._read(func, tensor, args, kwargs)
                if func is torch.Tensor.cpu or (
                    func is torch.Tensor.to and _device_of(args, kwargs) == "cpu" and _blocks(args, kwargs)
                ):
                    waits("cpu")
            elif func is torch.Tensor.to and _device_of(args, kwargs) == "cuda" and _blocks(args, kwargs):
                waits("to_gpu")  # torch waits for the copy, and so for all that was asked of the stream before
            elif func in _READS and isinstance(tensor, fake_tensor.FakeTensor):
                return self._value(func, tensor, args)
        return func(*args, **kwargs)

    def _numbers(self, value: Any) -> Any:
        """A list of tensors is read number by number."""
        if isinstance(value, list | tuple):
            return [self._numbers(v) for v in value]
        return self._read(torch.Tensor.item, value, (), {}) if isinstance(value, torch.Tensor) else value

    def _read(self, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
        waits(func.__name__)
        return self._value(func, tensor, args)

    def _value(self, func: Any, tensor: torch.Tensor, args: Any) -> Any:
        name = func.__name__
        if name == "tolist" and hasattr(tensor, "numbers"):
            return list(tensor.numbers)
        if name in ("masked_select", "nonzero"):
            count = self.given.selected(args[1] if name == "masked_select" else tensor)
            if name == "nonzero":
                return torch.zeros(count, tensor.dim(), dtype=torch.int64, device=tensor.device)
            return tensor.broadcast_to(args[1].shape).flatten()[:count].clone()
        caller = _caller().f_code.co_name
        return self.given.numbers(tensor, caller) if name in ("tolist", "numpy") else self.given.number(tensor, caller)


def _from_host(data: Any, device: Any) -> bool:
    """Whether a tensor of this data on this device is made by a copy from the host."""
    there = isinstance(data, torch.Tensor) and data.device.type == "cuda"
    return torch.device(device or "cpu").type == "cuda" and not there


def _has_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) or _has_tensors(v) for v in value)


def _device_of(args: Any, kwargs: Any) -> str | None:
    for value in (*args[1:2], kwargs.get("device")):
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, str):
            return torch.device(value).type
        if isinstance(value, torch.Tensor):
            return value.device.type
    return None


def _blocks(args: Any, kwargs: Any) -> bool:
    """Whether the host waits for a copy by `to`, `cuda` or `copy_`: `non_blocking` is the first bool of each."""
    given = [value for value in args[1:] if isinstance(value, bool)]
    return not (given[0] if given else kwargs.get("non_blocking", False))


class Fake:
    """Tensors made inside have no memory; what is on "cuda" is counted."""

    def __init__(self, given: Given | None = None) -> None:
        self.syncs: dict[str, int] = {}
        self.replays = 0  # of CUDA graphs
        self.memory = PeakBytes("cuda", block=512)  # as CUDA's caching allocator rounds
        self.order = Unordered()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.given = given or Given()
        self.functions = _Functions(self.given)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Fake":
        _active.append(self)
        for mode in (self.mode, self.memory, self.order, self.functions):
            self._stack.enter_context(mode)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)
        _active.remove(self)
