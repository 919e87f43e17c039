"""Offloads parameters, gradients and optimizer state to host memory while they are not in use.

Many objects hold views of the same memory: megatron lays parameters and gradients into a few flat buffers, FSDP keeps
its shards in several places. So no tensor is replaced. A storage is copied to host memory and resized to nothing, and
later resized and filled again. Every view stays valid.

Copies run in the current stream, behind all of its work. The host waits for those to the host, whose memory on the
device is freed.

`engine.offload: [activations]` moves activations to host memory until the backward pass reads them. Both engines have
it: the FSDP engine for each block, the Megatron engine for a chunk's layers and for each MTP layer. Autograd's hooks on
saved tensors do it, so it works with every layer spec, layout and kernel. Tensors come back with the values, shape and
strides that they were saved with. With recomputation only inputs are saved, and these are moved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

KINDS = ("parameters", "gradients", "optimizer")

BLOCK = 2**26
"""Bytes of a block of host memory. torch's allocator rounds pinned memory up to powers of two (8.1 GB would take 16).
Blocks of this size lose nothing by that, with any PYTORCH_CUDA_ALLOC_CONF. It keeps a freed block for the next one, and
waits for copies out of it."""

ALIGNMENT = 512
"""Storages start at multiples of so many bytes in their blocks, as in the device's allocator."""


class Offload:
    """Tracks the state on the device, and moves it to the host and back.

    kinds: state for the host between uses; kinds outside KINDS are ignored. tensors: returns the tensors of each of
    KINDS, called at each move. spent: kinds with only zeros so far (see `spend`). drop_copies: frees values derived
    from a kind, such as graphs of it, to be made again when needed. It is called whenever the kind leaves the device.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        tensors: Mapping[str, Callable[[], Iterable[Tensor]]],
        *,
        spent: Sequence[str] = (),
        drop_copies: Mapping[str, Callable[[], None]] = MappingProxyType({}),
    ) -> None:
        self.kinds = frozenset(kinds) & frozenset(KINDS)
        self._tensors = dict(tensors)
        self._parked: dict[str, _HostStorages] = {}
        self._users = dict.fromkeys(KINDS, 0)
        self._spent = set(spent)
        self._drop_copies = dict(drop_copies)
        for kind in KINDS:
            if kind in self.kinds:
                self.park(kind)

    @contextlib.contextmanager
    def used(self, *kinds: str) -> Iterator[None]:
        """Keeps `kinds` on the device inside. Afterwards each goes back to its place before, or to the config's.

        If there is no memory for one of them, those before it go back and the error is raised.
        """
        away = [kind for kind in kinds if kind in self._parked or kind in self.kinds]
        taken: list[str] = []
        try:
            for kind in kinds:
                self.restore(kind)
                self._spent.discard(kind)
                self._users[kind] += 1
                taken.append(kind)
            yield
        finally:
            for kind in taken:
                self._users[kind] -= 1
            with contextlib.ExitStack() as each:  # if one raises, the others are still parked
                for kind in reversed(away):
                    if not self._users[kind]:
                        each.callback(self.park, kind)

    def spend(self, kind: str) -> None:
        """Marks the content of `kind` as unneeded: until it is `used` again it is dropped instead of being parked.

        It comes back as zeros.
        """
        self._spent.add(kind)

    def park(self, kind: str) -> None:
        """Moves `kind` to the host. It does nothing if the kind is there."""
        if kind in self._parked:
            return
        if kind in self._drop_copies:
            self._drop_copies[kind]()
        storages = self._storages(kind)
        sizes = [storage.size() for storage in storages]
        if kind in self._spent:
            self._parked[kind] = _HostStorages(storages, sizes, blocks=None)
            _shrink(storages)
            return
        if not storages:
            self._parked[kind] = _HostStorages([], [], blocks=[])
            return
        device = storages[0].device
        count = -(-sum(map(_aligned, sizes)) // BLOCK)
        pinned = device.type == "cuda"
        blocks = [torch.empty(BLOCK, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]
        for there, here in _pairs(storages, sizes, blocks):
            there.copy_(here, non_blocking=True)
        if pinned:
            torch.cuda.current_stream(device).synchronize()
        self._parked[kind] = _HostStorages(storages, sizes, blocks)
        _shrink(storages)

    def restore(self, kind: str) -> None:
        """Moves `kind` to the device.

        It does nothing if the kind is on the device. If there is no memory for it, it stays on the host and the error
        is raised.
        """
        parked = self._parked.get(kind)
        if parked is None:
            return
        try:
            for storage, size in zip(parked.storages, parked.sizes, strict=True):
                storage.resize_(size)
            if parked.blocks is None:
                for storage in parked.storages:
                    _bytes(storage).zero_()
            else:
                for there, here in _pairs(parked.storages, parked.sizes, parked.blocks):
                    here.copy_(there, non_blocking=True)
        except BaseException:
            _shrink(parked.storages)
            raise
        del self._parked[kind]

    def forget(self, kind: str) -> None:
        """Frees the host memory of `kind`, because its owner has dropped the tensors."""
        if kind in self._parked:
            self._parked[kind] = _HostStorages([], [], blocks=[])

    def _storages(self, kind: str) -> list[torch.UntypedStorage]:
        """Returns the storages of a kind that have memory on the device, each once.

        Optimizer state may be a view of the parameters (fp32 master weights are). Such views go with the parameters.
        """
        others = {_identity(t) for t in self._tensors["parameters"]()} if kind == "optimizer" else set()
        storages = {_identity(t): t.untyped_storage() for t in self._tensors[kind]()}
        return [storage for key, storage in storages.items() if key not in others and storage.size()]


@dataclasses.dataclass
class _HostStorages:
    """Holds the storages of a kind that is on the host."""

    storages: list[torch.UntypedStorage]
    sizes: list[int]  # bytes of each on the device
    blocks: list[Tensor] | None  # host memory with them, end to end; None if they were dropped


Pair = tuple[Tensor, Tensor]
"""The same number of bytes on the host and on the device, for a copy."""


def _pairs(storages: Sequence[torch.UntypedStorage], sizes: Sequence[int], blocks: Sequence[Tensor]) -> Iterator[Pair]:
    """Yields the storages' bytes and their positions in `blocks`, end to end. A storage may lie in several blocks."""
    place = 0
    for storage, size in zip(storages, sizes, strict=True):
        device, start = _bytes(storage), 0
        while start < size:
            block, offset = divmod(place + start, BLOCK)
            length = min(size - start, BLOCK - offset)
            yield blocks[block][offset : offset + length], device[start : start + length]
            start += length
        place += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Returns a [size] uint8 view of the whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _identity(tensor: Tensor) -> int:
    """Returns a key that is equal for tensors with one storage, on the device or not."""
    return tensor.untyped_storage()._cdata


def _shrink(storages: Iterable[torch.UntypedStorage]) -> None:
    for storage in storages:
        storage.resize_(0)


PLAIN = (Tensor, nn.Parameter, FakeTensor)
"""Tensors with their values in their storage. Other subclasses have them elsewhere: transformer-engine's 8-bit copies
of weights have scales too, and would come back as tensors of the dtype that they stand for."""


class ActivationOffload:
    """Copies saved activations to the host, and back when the backward pass needs them.

    Weights stay on the device, and so do their 8-bit copies. on_host: bytes that are on the host now. most: their
    maximum so far.
    """

    def __init__(self) -> None:
        self.on_host = self.most = 0

    def wrap(self, module: nn.Module) -> None:
        """Has the forward of `module` save to the host."""
        module.forward = functools.partial(self._forward, module, module.forward)

    def _forward(self, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with self.of(module):
            return forward(*args, **kwargs)

    @contextlib.contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:
        """Moves saved tensors to the host inside, except weights of `module`. Nested modules work too."""
        whole = (p for p in module.parameters() if not isinstance(p, DTensor))
        weights = {p.untyped_storage()._cdata for p in whole}
        pack = functools.partial(self.pack, weights)
        with torch.autograd.graph.saved_tensors_hooks(pack, self.unpack):
            yield

    def pack(self, weights: set[int], tensor: Tensor) -> Tensor | HostTensor:
        """Returns the object that autograd keeps instead of `tensor`."""
        if type(tensor) not in PLAIN or tensor.untyped_storage()._cdata in weights:
            return tensor
        return HostTensor(self, tensor)

    def unpack(self, kept: Tensor | HostTensor) -> Tensor:
        return kept.tensor() if isinstance(kept, HostTensor) else kept


class HostTensor:
    """Holds a tensor's copy on the host, or only its sizes if the tensor is on the meta device."""

    def __init__(self, offload: ActivationOffload, tensor: Tensor) -> None:
        self.offload, self.device, self.dtype = offload, tensor.device, tensor.dtype
        self.size, self.stride = tensor.size(), tensor.stride()
        once = _once(tensor)
        self.bytes = once.numel() * once.element_size()
        self.host: Tensor | None = None
        if not tensor.is_meta:
            self.host = torch.empty(once.size(), dtype=self.dtype, pin_memory=tensor.is_cuda)
            # copies between contiguous pinned memory run in the order of the stream, so the host does not wait
            self.host.copy_(once.contiguous(), non_blocking=True)
        offload.on_host += self.bytes
        offload.most = max(offload.most, offload.on_host)

    def tensor(self) -> Tensor:
        """Returns a new copy on the device, laid out as the tensor was: kernels may add otherwise for others."""
        new = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        if self.host is not None:
            once = _once(new)
            there = self.host if once.is_contiguous() else self.host.to(self.device, non_blocking=True)
            once.copy_(there, non_blocking=True)
        return new

    def __del__(self) -> None:
        self.offload.on_host -= self.bytes


def _once(tensor: Tensor) -> Tensor:
    """Returns a view that has each element of an expanded tensor once."""
    for dim, (size, stride) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
        tensor = tensor.narrow(dim, 0, 1) if size > 1 and stride == 0 else tensor
    return tensor
