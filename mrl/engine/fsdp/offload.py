"""Parameters, gradients and optimizer state that wait in host memory between uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from mrl.engine.fsdp.model import Model
from mrl.engine.fsdp.optim import Optimizer

HOST = torch.device("cpu")


class Offload:
    """Brings state to the device for a use and puts back what the config says; uses may be nested.

    kinds: of "parameters", "gradients", "optimizer": what waits on the host. Moved parameters take their gradients
    along, so "gradients" alone leaves the parameters where they are.
    """

    def __init__(self, kinds: Sequence[str], model: Model, optimizer: Optimizer | None, device: torch.device) -> None:
        self.kinds, self.model, self.optimizer, self.device = frozenset(kinds), model, optimizer, device
        self._uses = 0
        self._put_back()

    @contextlib.contextmanager
    def used(self, *, gradients: bool = False, optimizer: bool = False) -> Iterator[None]:
        """Parameters, and what else is asked for, are on the device inside."""
        self.move_parameters(self.device)
        if gradients:
            self.move_gradients(self.device)
        if optimizer and self.optimizer is not None:
            self.optimizer.move(self.device)
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            if self._uses == 0:
                self._put_back()

    def _put_back(self) -> None:
        if "gradients" in self.kinds:
            self.move_gradients(HOST)
        if "parameters" in self.kinds:
            self.move_parameters(HOST)
        if "optimizer" in self.kinds and self.optimizer is not None:
            self.optimizer.move(HOST)

    def move_parameters(self, device: torch.device) -> None:
        if any(p.device.type != device.type for p in self.model.parameters().values()):
            self.model.module.to(device)

    def move_gradients(self, device: torch.device) -> None:
        for parameter in self.model.parameters().values():
            if parameter.grad is not None and parameter.grad.device.type != device.type:
                parameter.grad.data = parameter.grad.data.to(device)
