"""Keeps what a library changes of its process apart from the trainer's.

In the trainer's process vLLM 0.32.0 changes:

- the seeds of torch, numpy and Python, and the current CUDA stream
- the number of torch's threads, and how float32 is multiplied
- on a CPU, LD_PRELOAD and LOCAL_WORLD_SIZE in the environment, so in every process started later
- torch.set_num_threads: it is replaced
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

import numpy
import torch

from mrl.engine.rng import Generators


class IsolatedState:
    """Keeps what one library changed in the process from everything else.

    variables: of the environment, for the library alone. defaults: likewise, but a variable that is set already outside
    stays as it is.
    """

    def __init__(
        self, device: torch.device, variables: Mapping[str, str], defaults: Mapping[str, str] | None = None
    ) -> None:
        missing = {name: value for name, value in (defaults or {}).items() if name not in os.environ}
        self._changed: dict[str, str | None] = {**variables, **missing}
        self._generators, self._numpy = Generators(0, device), numpy.random.get_state()
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Gives the process to the library while inside, and back to the trainer whatever happens."""
        with self._generators.installed(), self._environment(), self._numpy_state(), _threads(), self._current_stream():
            yield

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        outside = dict(os.environ)
        _change(self._changed)
        try:
            yield
        finally:
            now = dict(os.environ)
            names = sorted(name for name in now.keys() | outside.keys() if now.get(name) != outside.get(name))
            self._changed = {name: now.get(name) for name in names}
            _change({name: outside.get(name) for name in names})

    @contextlib.contextmanager
    def _numpy_state(self) -> Iterator[None]:
        outside = numpy.random.get_state()
        numpy.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._numpy = numpy.random.get_state()
            numpy.random.set_state(outside)

    @contextlib.contextmanager
    def _current_stream(self) -> Iterator[None]:
        """Lets each side's work begin after the work that the other has queued."""
        if self._device.type != "cuda":
            yield
            return
        outside = torch.cuda.current_stream(self._device)
        if self._stream is not None:
            self._stream.wait_stream(outside)
            torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            self._stream = torch.cuda.current_stream(self._device)
            outside.wait_stream(self._stream)
            torch.cuda.set_stream(outside)


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    """Restores torch's threads, how it multiplies float32, and the dtype of new tensors."""
    count, set_count = torch.get_num_threads(), torch.set_num_threads
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_num_threads = set_count
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)


def _change(variables: Mapping[str, str | None]) -> None:
    """Sets variables of the environment; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
