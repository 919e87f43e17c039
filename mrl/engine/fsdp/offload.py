"""Parameters, gradients and optimizer state that wait in host memory between uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mrl.engine.fsdp.model import Model
from mrl.engine.fsdp.optim import Optimizer

HOST = torch.device("cpu")


class Offload:
    """Brings state to the device for a use and puts back what the config says; uses may be nested.

    kinds: of "parameters", "gradients", "optimizer": what waits on the host. A gradient must lie where its parameter
    does, so one that waits is set aside here, off its parameter.
    """

    def __init__(self, kinds: Sequence[str], model: Model, optimizer: Optimizer | None, device: torch.device) -> None:
        self.kinds, self.model, self.optimizer, self.device = frozenset(kinds), model, optimizer, device
        self._aside: dict[str, Tensor] = {}
        self._uses = 0
        self._put_back()

    @contextlib.contextmanager
    def used(self, *, gradients: bool = False, optimizer: bool = False) -> Iterator[None]:
        """Parameters, and what else is asked for, are on the device inside."""
        self._move_parameters(self.device)
        if gradients:
            self._restore_gradients()
        if optimizer and self.optimizer is not None:
            self.optimizer.move(self.device)
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            if self._uses == 0:
                self._put_back()

    def move(self, device: torch.device, *, model: bool, optimizer: bool) -> None:
        """Moves the model (parameters and gradients) and the optimizer's state, whatever the config says."""
        if model and device == self.device:
            self._move_parameters(device)
            self._restore_gradients()
        elif model:
            self._set_gradients_aside(device)
            self._move_parameters(device)
        if optimizer and self.optimizer is not None:
            self.optimizer.move(device)

    def forget_gradients(self) -> None:
        """Drops gradients, wherever they wait."""
        self._aside.clear()
        for parameter in self.model.parameters().values():
            parameter.grad = None

    def _put_back(self) -> None:
        if "gradients" in self.kinds:
            self._set_gradients_aside(HOST)
        elif "parameters" in self.kinds:
            self._set_gradients_aside(self.device)
        if "parameters" in self.kinds:
            self._move_parameters(HOST)
        if "optimizer" in self.kinds and self.optimizer is not None:
            self.optimizer.move(HOST)

    def _move_parameters(self, device: torch.device) -> None:
        if any(p.device.type != device.type for p in self.model.parameters().values()):
            self.model.module.to(device)

    def _set_gradients_aside(self, device: torch.device) -> None:
        for name, parameter in self.model.parameters().items():
            if parameter.grad is not None:
                self._aside[name] = parameter.grad.to(device)
                parameter.grad = None

    def _restore_gradients(self) -> None:
        for name, parameter in self.model.parameters().items():
            if name in self._aside:
                parameter.grad = self._aside.pop(name).to(self.device)
