"""What a library changes of the process that it runs in, kept apart from the trainer's.

vLLM 0.32.0 in the trainer's process seeds torch, numpy and Python, makes a CUDA stream of its own the current one, sets
the number of torch's threads and how float32 is multiplied, and (on a CPU) puts LD_PRELOAD and LOCAL_WORLD_SIZE into
the environment, which every process that the trainer starts would inherit, and replaces torch.set_num_threads.
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

    variables: of the environment, for the library alone; one that is set already outside of it stays as it is where
    `defaults` names it.
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
        """The process is the library's inside, and the trainer's again afterwards, whatever happens."""
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
        """Each side's work begins after what the other has queued."""
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
    """torch's threads, how it multiplies float32, and the dtype of new tensors, as they were."""
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
    """Sets variables of the environment; None takes one out."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
