"""What both ends of CUDA IPC see of a GPU, in memory of the host."""

from __future__ import annotations

import itertools
import secrets
import time
import types

import pytest
import torch
from torch.multiprocessing import reductions

from mrl.engine import links

GPU = "GPU-0"


def stand_in(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Links' buffers are parts of one block of cudaMalloc, under one handle. Other processes see what is written when
    the stream has been waited for, 50 ms later. torch's own Python pickles tensors and maps them."""
    written, block = torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    start, taken = written.data_ptr(), itertools.count(512, 512)
    handle = secrets.token_bytes(64)  # torch keeps what it has mapped, by handle and offset
    reduce_tensor = reductions.reduce_tensor

    def share(storage):
        return 0, handle, storage.nbytes(), storage.data_ptr() - start, b"counter", 0, b"event", False

    def map_it(device, handle, size, offset, *rest):
        assert device == 0
        return block.untyped_storage()[offset : offset + size]

    def make(link, turn, size):
        at = next(taken)
        return torch.empty(0, dtype=torch.uint8).set_(written.untyped_storage()[at : at + size])

    def reduce(tensor):
        with monkeypatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "device", torch.device("cuda", 0))
            return reduce_tensor(tensor)

    def wait():
        time.sleep(0.05)
        block.copy_(written)

    monkeypatch.setattr(links.Link, "_make", make)
    monkeypatch.setattr(reductions, "reduce_tensor", reduce)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", map_it)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", lambda *args, **kwargs: None)
    for name, value in {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "_lazy_init": lambda: None,
        "set_device": lambda device: None, "synchronize": lambda device: wait(), "ipc_collect": lambda: None,
        "get_device_properties": lambda device: types.SimpleNamespace(uuid=GPU),
        "current_stream": lambda device: types.SimpleNamespace(synchronize=wait),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return torch.device("cuda")
