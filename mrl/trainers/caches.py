"""Has what the caches of references and teachers share: names of rows, a digest of weights, whole files."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import logging
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mrl.batch import Batch
from mrl.config.megatron_speed import precision_of
from mrl.config.schema import EngineConfig
from mrl.errors import CheckpointError, ModelError, unwritable
from mrl.weights.json_file import read_json
from mrl.weights.pt_file import read_pt, write_pt

logger = logging.getLogger(__name__)

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
    with contextlib.suppress(ModelError, KeyError):
        kept = read_json(memo)
        if kept["files"] == stats:
            return str(kept["sha256"])
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        each = zip(files, pool.map(_hash_of_file, files), strict=True)
        digest = hashlib.sha256("".join(f"{path.name} {of}\n" for path, of in each).encode()).hexdigest()
    content = json.dumps({"files": stats, "sha256": digest})
    with contextlib.suppress(OSError):  # it is for speed alone
        memo.parent.mkdir(parents=True, exist_ok=True)
        partial = memo.with_suffix(".partial")
        partial.write_text(content, encoding="utf-8")
        partial.replace(memo)
    return digest


def _hash_of_file(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def with_precision(engine: EngineConfig) -> dict[str, Any]:
    """Returns, as an entry of what numbers are made by, an engine's choice of fp8; nothing where it has none."""
    settings = precision_of(engine.megatron)
    return {"precision": settings} if settings else {}


def saved_by(
    path: pathlib.Path,
    made_by: str,
    *,
    fields: Collection[str],
    mmap: bool = False,
    say: Callable[[str], object] = logger.warning,
) -> dict[str, Any] | None:
    """Returns what a cache's file holds; None where there is none, it was made by something else, or is damaged.

    mmap: tensors stay in the file until they are read. say: is given a line on a file that is damaged.
    """
    if not path.exists():
        return None
    try:
        saved = read_pt(path, fields=("made_by", *fields), mmap=mmap)
    except CheckpointError as error:
        say(f"{path}: {error.why}, and is made anew")
        return None
    return saved if saved["made_by"] == made_by else None


def save_cache(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Writes a cache's file, at once or not at all. Raises ConfigError if the disk refuses it."""
    try:
        write_pt(path, dict(content))
    except OSError as error:
        raise unwritable(str(path.parent.parent), path, error) from error
