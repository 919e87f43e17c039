"""The reference policy of `mrl dpo`: log-probs of whole answers, by one of three ways.

With adapters that train it is the model without them. Else it is an engine of its own, or, cached, what the model or
that engine gave before the first step for every row of data.train (data.eval is few rows, and is cached too).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms.preference import REFERENCE, answer_log_probs
from mrl.batch import Batch
from mrl.config.megatron_speed import precision_of
from mrl.config.schema import EngineConfig
from mrl.engine.base import PLAIN_CTX, BaseEngine
from mrl.roles.dispatch import mesh
from mrl.trainers.common import Ranks, stopped
from mrl.trainers.signals import StopSignal

LogProbs = Mapping[str, Tensor]


def answers_by(engine: BaseEngine, batch: Batch, *, base: bool = False) -> Tensor:
    """Returns [S] float64, on every rank: an engine's log-probs of the answers of a global mini-batch, without dropout.

    base: of the model without its adapters.
    """
    loss_fn, denominator = engine.loss_fn, engine.loss_denominator
    engine.set_loss_fn(None)
    try:
        with engine.eval_mode(), engine.without_adapters() if base else contextlib.nullcontext():
            found = mesh(engine, batch, lambda share: engine.forward_backward_step(share, PLAIN_CTX, True)[0])
    finally:
        engine.set_loss_fn(loss_fn, denominator)
    return answer_log_probs(batch, found["log_probs"])


def with_reference(batch: Batch, log_probs_S: Tensor) -> Batch:
    """Returns the batch with the reference's log-probs of its answers."""
    return dataclasses.replace(batch, sequence_fields={**batch.sequence_fields, REFERENCE: log_probs_S})


def digests(batch: Batch) -> list[bytes]:
    """Returns a name for each sequence of a batch: of its tokens, of which of them train, and of its images."""
    fields = (batch.tokens, batch.labels, batch.loss_mask != 0)
    parts = [part.numpy().tobytes() for field in fields for part in field.cpu().split(batch.lengths.tolist())]
    count = batch.num_sequences
    images = [_image_bytes(inputs) for inputs in batch.multi_modal_inputs] or [b""] * count
    return [hashlib.sha256(b"".join(parts[i::count]) + images[i]).digest()[:16] for i in range(count)]


def _image_bytes(inputs: Mapping[str, Tensor]) -> bytes:
    """Returns what tells the images of a sequence from others; nothing of one without."""
    return b"".join(
        f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode()
        + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in sorted(inputs.items())
    )


def weights_digest(folder: str, memo: pathlib.Path) -> str:
    """Returns a hash of all bytes of a folder's weights, whenever and wherever they were written.

    memo: a file that keeps it beside names, sizes and times of the weights' files. They are read again where one of
    these has changed.
    """
    files = sorted(pathlib.Path(folder).resolve().glob("*.safetensors"))
    stats = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(memo.read_text(encoding="utf-8"))
        if kept["files"] == stats:
            return str(kept["sha256"])
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        each = zip(files, pool.map(_hash_of_file, files), strict=True)
        digest = hashlib.sha256("".join(f"{path.name} {of}\n" for path, of in each).encode()).hexdigest()
    memo.parent.mkdir(parents=True, exist_ok=True)
    partial = memo.with_suffix(".partial")
    partial.write_text(json.dumps({"files": stats, "sha256": digest}), encoding="utf-8")
    partial.replace(memo)
    return digest


def _hash_of_file(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def with_precision(engine: EngineConfig) -> dict[str, Any]:
    """Returns, as an entry of what numbers are made by, an engine's choice of fp8; nothing where it has none."""
    found = precision_of(engine.megatron)
    return {"precision": found} if found else {}


def saved_by(path: pathlib.Path, made_by: str, *, mmap: bool = False) -> dict[str, Any] | None:
    """Returns what torch has saved in the file; None where there is none, or it was made by something else.

    A damaged one counts as none. mmap: tensors stay in the file until they are read.
    """
    try:
        found = torch.load(path, weights_only=True, mmap=mmap)
        return found if found["made_by"] == made_by else None
    except (OSError, RuntimeError, EOFError, KeyError, ValueError, AttributeError, TypeError):
        return None
    except Exception as error:  # the unpickler's own, of a file that is no checkpoint
        if type(error).__name__ != "UnpicklingError":
            raise
        return None


def save_at_once(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Writes the file, at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(dict(content), partial)
    partial.replace(path)


def until_stopped(
    ranks: Ranks, stop: StopSignal, batches: Iterable[Batch], write: Callable[[], str | None], *, doing: str
) -> Iterator[Batch]:
    """Yields the batches of a pass before training. Raises Stopped after a signal, once what is known is written.

    write: does that on the main process, and returns where; None where nothing is known. doing: the pass, in words.
    """
    for batch in batches:
        if any(ranks.max_over_ranks(stop.requested)):
            raise stopped(ranks, stop, where=f"while {doing}", step=0, saved=ranks.on_main(write))
        yield batch


class Cache:
    """The reference's log-probs of answers, known by their tokens, in a file beside the run.

    made_by: what they depend on beside the tokens; a file that says otherwise is made anew.
    """

    write_every_s = 60.0
    """While log-probs are computed the file is written so often: a run that is killed goes on from it."""

    def __init__(self, path: pathlib.Path, made_by: Mapping[str, Any]) -> None:
        self.path, self.made_by = path, json.dumps(made_by, sort_keys=True)
        self.known: dict[bytes, float] = {}
        self._written_s = time.monotonic()

    def read(self) -> bool:
        """Reads the file. Returns whether there is one, made by the same."""
        found = saved_by(self.path, self.made_by)
        if found is None:
            return False
        names, values = found["names"].numpy(), found["log_probs"].tolist()
        self.known = {name.tobytes(): value for name, value in zip(names, values, strict=True)}
        return True

    def write(self) -> str | None:
        """Writes what is known. Returns the file; None where nothing is known."""
        if not self.known:
            return None
        names = torch.frombuffer(bytearray(b"".join(self.known)), dtype=torch.uint8).view(-1, 16)
        values = torch.tensor(list(self.known.values()), dtype=torch.float64)
        save_at_once(self.path, {"made_by": self.made_by, "names": names, "log_probs": values})
        self._written_s = time.monotonic()
        return str(self.path)

    def write_if_due(self) -> None:
        """As `write`, where the file is older than `write_every_s`."""
        if time.monotonic() - self._written_s >= self.write_every_s:
            self.write()

    def add(self, batch: Batch, log_probs_S: Tensor) -> None:
        """Adds those that are not known: in another batch a number may be rounded otherwise."""
        for name, value in zip(digests(batch), log_probs_S.tolist(), strict=True):
            self.known.setdefault(name, value)

    def lacks(self, batches: Iterator[Batch] | Sequence[Batch]) -> Iterator[Batch]:
        """Yields those of the batches that have an answer which is not known."""
        for batch in batches:
            if not self.known.keys() >= set(digests(batch)):
                yield batch

    def of(self, batch: Batch) -> Tensor:
        """Returns [S] float64. KeyError: an answer is not known."""
        return torch.tensor([self.known[name] for name in digests(batch)], dtype=torch.float64)
