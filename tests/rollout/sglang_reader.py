"""What SGLang 0.5.23 does with an entry of /update_weights_from_tensor, up to the tensors that it loads: by its
`SafeUnpickler`, `patch_torch` and `FlattenedTensorBucket`. torch is all this imports, so that another process can do it.
"""

from __future__ import annotations

import base64
import io
import pickle
from typing import Any

import torch
from torch.multiprocessing import reductions

ALLOWED = {
    ("multiprocessing.resource_sharer", "DupFd"), ("types", "SimpleNamespace"), ("torch", "Tensor"), ("torch", "Size"),
    ("torch", "uint8"), ("torch", "bfloat16"), ("torch", "float32"), ("torch", "bool"), ("torch", "int64"),
    ("torch.storage", "UntypedStorage"), ("torch.storage", "TypedStorage"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"), ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_storage_fd"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
}  # fmt: skip
"""Of the names in `SafeUnpickler.ALLOWED_GLOBALS` those that come."""


class SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise RuntimeError(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")
        return rebuild_cuda_tensor if name == "rebuild_cuda_tensor" else super().find_class(module, name)


def rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:
    """The seventh argument is the UUID of a GPU."""
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    return reductions.rebuild_cuda_tensor(*arguments[:6], uuids.index(arguments[6]), *arguments[7:])


def read(payload: str) -> list[tuple[str, str, Any]]:
    """Returns (name, dtype, values) of each tensor."""
    bucket = SafeUnpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
    found = []
    for part in bucket["metadata"]:
        assert part.numel == part.end_idx - part.start_idx
        tensor = bucket["flattened_tensor"][part.start_idx : part.end_idx].view(part.dtype).reshape(part.shape)
        found.append((part.name, str(tensor.dtype), tensor.tolist()))
    return found
