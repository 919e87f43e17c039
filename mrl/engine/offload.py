"""Host memory for parameters, gradients and optimizer state that are not in use.

Many objects hold views of the same memory: megatron lays parameters and gradients into a few flat buffers, FSDP keeps
its shards in several places. So nothing is replaced: a storage is copied to host memory and shrunk to nothing, and
later grown and filled again; every view stays valid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

KINDS = ("parameters", "gradients", "optimizer")


class Offload:
    """Which state is where.

    kinds: what waits on the host between uses; of others than KINDS this knows nothing. tensors: what there is of each
    of KINDS, asked anew at each move.
    """

    def __init__(self, kinds: Sequence[str], tensors: Mapping[str, Callable[[], Iterable[Tensor]]]) -> None:
        assert set(tensors) == set(KINDS), sorted(tensors)
        self.kinds = frozenset(kinds) & frozenset(KINDS)
        self._tensors = dict(tensors)
        self._parked: dict[str, list[tuple[torch.UntypedStorage, Tensor]]] = {}
        self._users = dict.fromkeys(KINDS, 0)
        for kind in self.kinds:
            self.park(kind)

    def tensors(self, kind: str) -> Iterable[Tensor]:
        """Returns what is of `kind`, wherever it is."""
        return self._tensors[kind]()

    @contextlib.contextmanager
    def used(self, *kinds: str) -> Iterator[None]:
        """`kinds` are on the device inside; afterwards back to where they were, or to where the config wants them."""
        away = [kind for kind in kinds if kind in self._parked or kind in self.kinds]
        for kind in kinds:
            self.restore(kind)
            self._users[kind] += 1
        try:
            yield
        finally:
            for kind in kinds:
                self._users[kind] -= 1
            for kind in away:
                if not self._users[kind]:
                    self.park(kind)

    def park(self, kind: str) -> None:
        """Moves `kind` to the host. Nothing happens where it is there."""
        if kind in self._parked:
            return
        # optimizer state may be a view of the parameters (fp32 master weights are): those go with the parameters
        others = {t.untyped_storage().data_ptr() for t in self.tensors("parameters")} if kind == "optimizer" else set()
        parked: list[tuple[torch.UntypedStorage, Tensor]] = []
        for tensor in self.tensors(kind):
            storage = tensor.untyped_storage()
            if storage.size() == 0 or storage.data_ptr() in others:
                continue
            host = torch.empty(storage.size(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            host.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
            storage.resize_(0)
            parked.append((storage, host))
        self._parked[kind] = parked

    def restore(self, kind: str) -> None:
        """Moves `kind` to the device. Nothing happens where it is there."""
        for storage, host in self._parked.pop(kind, ()):
            storage.resize_(host.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(host)

    def forget(self, kind: str) -> None:
        """What waits on the host of `kind` is no longer needed: its owner has dropped the tensors."""
        if kind in self._parked:
            self._parked[kind] = []
