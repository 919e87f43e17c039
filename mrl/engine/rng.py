"""Keeps the states of torch's and Python's generators per engine, so that engines do not change each other's draws."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch


class Generators:
    """Holds the generators' states of one engine, seeded with `seed`."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        outside = self.states()
        torch.manual_seed(seed)
        random.seed(seed)  # a model's own code may use it
        self._inside, self._depth = self.states(), 0
        self.restore(outside)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Sets the process's generators to this engine's states inside. May be nested."""
        if self._depth:
            yield
            return
        outside = self.states()
        self.restore(self._inside)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._inside = self.states()
            self.restore(outside)

    def states(self) -> dict[str, Any]:
        """Returns the current states of the process's generators."""
        device = self.device
        states = {"device_type": device.type, "host": torch.get_rng_state(), "python": random.getstate()}
        return states | ({"device": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})

    def restore(self, states: Mapping[str, Any]) -> None:
        """Sets the process's generators to these states.

        If the type of device is another, its generator stays as it is, because neither can read the other's state.
        """
        torch.set_rng_state(states["host"])
        random.setstate(states["python"])
        if self.device.type == "cuda" and states["device_type"] == "cuda":
            torch.cuda.set_rng_state(states["device"], self.device)
