"""What the caches of a reference and of teachers share: names of rows and of weights, files that are whole or not
there, and a pass over rows that a signal ends."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mrl.batch import Batch
from mrl.config.megatron_speed import precision_of
from mrl.config.schema import EngineConfig
from mrl.trainers.common import Ranks, stopped
from mrl.trainers.signals import StopSignal

_DIGEST_BYTES = 16


def digests(batch: Batch) -> list[bytes]:
    """Returns a name for each sequence of a batch: of its tokens, of which of them train, and of its images."""
    fields = (batch.tokens, batch.labels, batch.loss_mask != 0)
    parts = [part.numpy().tobytes() for field in fields for part in field.cpu().split(batch.lengths.tolist())]
    count = batch.num_sequences
    images = [_image_bytes(inputs) for inputs in batch.multi_modal_inputs] or [b""] * count
    return [hashlib.sha256(b"".join(parts[i::count]) + images[i]).digest()[:_DIGEST_BYTES] for i in range(count)]


def _image_bytes(inputs: Mapping[str, Tensor]) -> bytes:
    """Returns what tells the images of a sequence from others; nothing of one without."""
    return b"".join(
        f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode()
        + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in sorted(inputs.items())
    )


def as_tensor(names: Iterable[bytes]) -> Tensor:
    """Returns names of rows (`digests`) as torch saves them, a row each."""
    return torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8).view(-1, _DIGEST_BYTES)


def from_tensor(names: Tensor) -> list[bytes]:
    """Returns the names that `as_tensor` was given."""
    return [name.tobytes() for name in names.numpy()]


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
    content = json.dumps({"files": stats, "sha256": digest})
    _write_at_once(memo, lambda partial: partial.write_text(content, encoding="utf-8"))
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
    _write_at_once(path, lambda partial: torch.save(dict(content), partial))


def _write_at_once(path: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    write(partial)
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
