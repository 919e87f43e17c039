"""The reference policy of `mrl dpo`: log-probs of whole answers, by one of three ways.

With adapters that train it is the model without them. Else it is an engine of its own. Cached, it is what the model or
that engine gave before the first step, for every row of data.train and data.eval.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms.preference import REFERENCE, answer_log_probs
from mrl.batch import Batch
from mrl.engine.base import PLAIN_CTX
from mrl.roles.dispatch import WorkerDispatch
from mrl.trainers.caches import as_tensor, digests, from_tensor, save_cache, saved_by
from mrl.words import pluralize


def answers_by(dispatch: WorkerDispatch, role: str, batch: Batch) -> Tensor:
    """Returns [S] float64, on every rank: a role's log-probs of the answers of a global mini-batch, without dropout."""
    return answer_log_probs(batch, dispatch.forward(role, batch, PLAIN_CTX)["log_probs"])


def with_reference(batch: Batch, log_probs_S: Tensor) -> Batch:
    """Returns the batch with the reference's log-probs of its answers."""
    return dataclasses.replace(batch, sequence_fields={**batch.sequence_fields, REFERENCE: log_probs_S})


class AnswerCache:
    """The reference's log-probs of answers, known by their tokens, in a file beside the run.

    made_by: what they depend on beside the tokens; a file that says otherwise is made anew.
    """

    write_every_s = 60.0
    """While log-probs are computed the file is written so often: a run that is killed goes on from it."""

    def __init__(self, path: pathlib.Path, made_by: Mapping[str, Any]) -> None:
        self.path, self.made_by = path, json.dumps(made_by, sort_keys=True)
        self.known: dict[bytes, float] = {}
        self.has_others = False
        self._written_s = time.monotonic()

    @property
    def counted(self) -> str:
        """How many answers are known, in words; empty for none."""
        return pluralize(len(self.known), "answer") if self.known else ""

    @property
    def place(self) -> pathlib.Path:
        """The file."""
        return self.path

    def read(self) -> bool:
        """Reads the file. Returns whether there is one, made by the same."""
        saved = saved_by(self.path, self.made_by, fields=("names", "log_probs"))
        if saved is None:
            self.has_others = self.path.exists()
            return False
        self.known = dict(zip(from_tensor(saved["names"]), saved["log_probs"].tolist(), strict=True))
        return True

    def write(self) -> str | None:
        """Writes what is known. Returns the file; None where nothing is known."""
        if not self.known:
            return None
        values = torch.tensor(list(self.known.values()), dtype=torch.float64)
        save_cache(self.path, {"made_by": self.made_by, "names": as_tensor(self.known), "log_probs": values})
        self._written_s = time.monotonic()
        return str(self.path)

    def write_if_due(self) -> None:
        """Writes as `write` does if the file is older than `write_every_s`."""
        if time.monotonic() - self._written_s >= self.write_every_s:
            self.write()

    def keep(self, dispatch: WorkerDispatch, batch: Batch, log_probs_S: Tensor) -> None:
        """Adds log-probs on every rank, and writes the file on the main process if that is due. Collective."""
        self.add(batch, log_probs_S)
        dispatch.on_main(self.write_if_due)

    def add(self, batch: Batch, log_probs_S: Tensor) -> None:
        """Adds those that are not known: in another batch a number may be rounded otherwise."""
        for name, value in zip(digests(batch), log_probs_S.tolist(), strict=True):
            self.known.setdefault(name, value)

    def lacks(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the batches with an unknown answer."""
        for batch in batches:
            if not self.known.keys() >= set(digests(batch)):
                yield batch

    def of(self, batch: Batch) -> Tensor:
        """Returns [S] float64. KeyError: an answer is not known."""
        return torch.tensor([self.known[name] for name in digests(batch)], dtype=torch.float64)
