"""`mrl.rollout.vllm_worker.Worker` that tells a test which bytes came to vLLM's loader."""

from __future__ import annotations

from typing import Any

from mrl.rollout import vllm_worker
from tests.rollout.digest import digest


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
