"""Writes weights for inference servers: for each weight sync a folder of safetensors files that they share.

Each folder gets a new name, so no server reads cached files of another one. Folders are kept for as long as a server
may have to go back to them.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Iterator

import safetensors.torch
import torch
from torch import Tensor

from mrl.config.ppo import ServerConfig
from mrl.errors import ServerError
from mrl.weights.safetensors_io import INDEX

_FOLDER = re.compile(r"\d{8}-[0-9a-f]{8}")

Shapes = dict[str, tuple[int, ...]]


def weights_dir(config: ServerConfig, output_dir: str) -> str:
    """Returns the folder of a run's weights alone: below `weights_dir` if it is set, else in `output_dir`."""
    output_dir = os.path.abspath(output_dir)
    if config.weights_dir is None:
        return os.path.join(output_dir, "rollout_weights")
    run = hashlib.sha256(output_dir.encode()).hexdigest()[:12]
    return os.path.join(os.path.abspath(os.path.expanduser(config.weights_dir)), run)


class WeightFolders:
    """Folders below `root`, which belongs to one run: what an earlier start left there is removed.

    On one process only.
    """

    def __init__(self, root: str, *, bucket_mb: int) -> None:
        self.root = pathlib.Path(root).absolute()
        self._bucket_bytes = bucket_mb * 2**20
        self._count = 0
        self.keep_only(None)

    def write(self, weights: Iterator[tuple[str, Tensor]]) -> tuple[pathlib.Path, Shapes]:
        """Returns a new folder with all of `weights`, and their shapes.

        Holds one bucket of them in memory (or one tensor, if it is larger). If the folder cannot be written, `weights`
        is still read to its end, because other ranks are in it too. Then ServerError says why.
        """
        folder, stream = self.new(), DrainedStream(weights)
        writer = _Writer(folder, self._bucket_bytes)
        try:
            for name, tensor in stream:
                writer.add(name, tensor)
            writer.close()
        except OSError as why:
            if stream.broken:  # the other ranks are not at its end, and never will be
                raise
            stream.read_the_rest()
            shutil.rmtree(folder, ignore_errors=True)
            raise self.unwritable(why) from why
        return folder, writer.shapes

    def new(self) -> pathlib.Path:
        """Returns a folder that is not there yet, with a new name."""
        self._count += 1
        return self.root / f"{self._count:08d}-{secrets.token_hex(4)}"

    def unwritable(self, why: OSError) -> ServerError:
        return ServerError(
            f"rollout.server.weights_dir: {self.root} cannot be written ({why}); it needs room for two copies of "
            "the weights"
        )

    def keep_only(self, *folders: pathlib.Path | None) -> None:
        """Removes all other folders."""
        if self.root.is_dir():
            for other in self.root.iterdir():
                if _FOLDER.fullmatch(other.name) and other not in folders:
                    shutil.rmtree(other)


class _Writer:
    """Safetensors files of a bucket each, and their index."""

    def __init__(self, folder: pathlib.Path, bucket_bytes: int) -> None:
        self.folder, self._limit = folder, bucket_bytes
        self.shapes: Shapes = {}
        self._bucket: dict[str, Tensor] = {}
        self._size = 0
        self._files: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        assert name not in self.shapes, f"{name} came twice"
        size = tensor.numel() * tensor.element_size()
        if self._bucket and self._size + size > self._limit:
            self._flush()
        # A copy: the stream may use its buffer again, and safetensors refuses tensors that share memory.
        self._bucket[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        self._size += size
        self.shapes[name] = tuple(tensor.shape)

    def _flush(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = f"model-{len(set(self._files.values())) + 1:05d}.safetensors"
        try:
            safetensors.torch.save_file(self._bucket, self.folder / file, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:  # a full disk, as it says it
            raise OSError(str(error)) from error
        self._files |= dict.fromkeys(self._bucket, file)
        self._bucket, self._size = {}, 0

    def close(self) -> None:
        self._flush()
        index = {"metadata": {}, "weight_map": self._files}
        (self.folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


class DrainedStream:
    """A stream of weights that is read to its end whatever happens to its reader: other ranks take part in it.

    broken: it failed itself.
    """

    def __init__(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._weights, self.broken = weights, False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        try:
            return next(self._weights)
        except StopIteration:
            raise
        except BaseException:
            self.broken = True
            raise

    def read_the_rest(self) -> None:
        for _ in self:
            pass
