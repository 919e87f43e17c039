"""`mrl.rollout.vllm_worker.Worker` that tells a test which bytes came to vLLM's loader."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from mrl.rollout import vllm_worker


def digest(tensor: torch.Tensor) -> list[Any]:
    """Of a tensor: its dtype, its shape and a hash of its bytes."""
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(content).hexdigest()]


class Worker(vllm_worker.Worker):
    def note(self) -> None:
        """From now on what comes is noted."""
        self.noted: list[list[Any]] = []
        model = self.weight_transfer_engine.model
        load = type(model).load_weights

        def noting(weights):
            pairs = list(weights)
            self.noted += [[name, *digest(tensor)] for name, tensor in pairs]
            return load(model, iter(pairs))

        model.load_weights = noting

    def what_was_noted(self) -> list[list[Any]]:
        del self.weight_transfer_engine.model.load_weights
        return self.noted
