"""A tiny model, its reference, and the work of a layout on it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mrl.algorithms.sft import sft_loss
from mrl.batch import Batch
from mrl.check import reference
from mrl.check.bounds import BOUNDS
from mrl.check.measure import Numbers, Store, Work
from mrl.config.schema import OptimizerConfig
from tests.engine import tiny

OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, schedule="constant")


@dataclasses.dataclass(frozen=True)
class Checked:
    """A model whose reference is made."""

    folder: str
    batch: Batch
    store: str

    def work(self, *, backend: str = "megatron", **parallel: Any) -> Work:
        config = tiny.role(self.folder, backend=backend, size=2, optimizer=OPTIMIZER, parallel=parallel)
        return Work(
            config=config, batch=self.batch, loss_fn=sft_loss, denominator="tokens", temperature=1.0, adapter=None,
            reference=self.store, bounds=BOUNDS["float32"],
        )  # fmt: skip


def make(place: Path, family: str = "llama", **fields: Any) -> Checked:
    folder = tiny.make_model(str(place / "model"), family, **{"layers": 4, **fields})
    batch = tiny.uneven_batch(sequences=8)
    model = reference.load(folder)
    start = reference.weights_of(model)
    made = reference.run(model, tiny.examples_of(batch), optimizer=OPTIMIZER, rates=[OPTIMIZER.lr])
    store = place / "reference"
    store.mkdir()
    numbers = Numbers(made.loss, made.grad_norm, made.log_probs)
    Store(store).write(numbers, start=start, gradients=made.gradients, weights=made.weights)
    return Checked(folder, batch, str(store))
