"""Models without an optimizer: the reference of `mrl dpo` and `mrl ppo`, teachers, a reward model."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from mrl.batch import Batch
from mrl.engine.base import Predictions
from mrl.engine.lora.identity import weights_fingerprint
from mrl.roles.dispatch import WorkerDispatch
from mrl.roles.teacher_server import TeacherServer
from mrl.weights.hub import WEIGHTS, model_fingerprint

Ask = Callable[[Batch, dict[str, Any]], Predictions]
"""Asks a frozen model about a global batch, as `WorkerDispatch.forward` does. Collective."""


@dataclasses.dataclass(frozen=True)
class FrozenModel:
    """Holds a model that no checkpoint needs to hold."""

    folder: str
    is_read: bool = True  # else a server has its weights, and the folder is of its tokenizer
    is_cached: bool = False  # what it says of all rows is computed before the first step, and written

    def fingerprint(self) -> dict[str, str]:
        """Returns `model_fingerprint`, and what tells a sample of the weights from others."""
        hashes = model_fingerprint(self.folder)
        if self.is_read and any(pathlib.Path(self.folder).glob("*.safetensors")):  # it may start from scratch
            hashes[WEIGHTS] = weights_fingerprint(self.folder)
        return hashes


def ask_role(dispatch: WorkerDispatch, role: str) -> Ask:
    """Returns what asks a role of `dispatch`."""
    return lambda batch, ctx: dispatch.forward(role, batch, ctx)


def ask_server(dispatch: WorkerDispatch, server: TeacherServer) -> Ask:
    """Returns what asks a server, through the main process.

    It gives log_probs [T] of the labels that train, and of `ctx["top"]` ids top_tokens and top_log_probs [T, top]; 0
    elsewhere.
    """

    def ask(batch: Batch, ctx: dict[str, Any]) -> Predictions:
        ids_N, log_probs_N, of_labels_N = dispatch.on_main(lambda: server.top_and_labels(batch, ctx.get("top", 0)))
        trained = batch.loss_mask.nonzero()[:, 0]
        predictions = {"log_probs": of_labels_N, "top_tokens": ids_N.long(), "top_log_probs": log_probs_N}
        return {
            name: of_N.new_zeros(batch.num_tokens, *of_N.shape[1:]).index_copy(0, trained, of_N)
            for name, of_N in predictions.items()
        }

    return ask
