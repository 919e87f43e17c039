"""Imports a Hugging Face folder as an mcore distributed checkpoint that any layout loads (`mrl convert import`).

    OUT/
        mcore/            the weights, as in the checkpoints of the Megatron engine
        engine.pt         architecture; no optimizer, no layout
        source.json       how the Hugging Face folder was laid out, for an export that gives the same files
        carried/          tensors that no engine reads, if there are any
        config.json, tokenizer, chat template, ...   the folder's own, unchanged: OUT can be a model.path
        COMPLETE          size and checksum of each file, these too

Rows go from file to file in blocks. Memory holds what a block needs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mrl
from mrl.convert.sources import Source, open_hf, source_as_json
from mrl.convert.workspace import FileSummary, Progress, Workspace, check_free, file_versions, silent, write_tensors
from mrl.engine import atomic_checkpoint
from mrl.engine.torch_dist.data_files import Item, ItemFile, extra_state_keys, saved_bytes
from mrl.errors import ModelError
from mrl.weights.accounting import EMBEDDING
from mrl.weights.checksums import crc32_of
from mrl.weights.companions import copy_companions
from mrl.weights.composites import CARRIED, SOURCE
from mrl.weights.families import fields_of
from mrl.weights.mcore_weights import (
    DESCRIPTION,
    FOLDER,
    architecture,
    row_blocks,
    stored_dtypes,
    stored_key,
    stored_shapes,
)
from mrl.weights.rules import Rule, expected_hf_names, whole_rules
from mrl.weights.safetensors_io import DTYPES, SINGLE, lay_out, split_by_bytes, tensor_bytes
from mrl.words import shorten_list

FILE_BYTES = 2**29
"""Size that a data file grows to. A killed conversion writes its unfinished files a second time."""


_CARRIED_FILE = f"{CARRIED}/{SINGLE}"


@dataclasses.dataclass(frozen=True)
class ImportResult:
    """Is the outcome of an import."""

    out: Path
    tensors: int  # of the Hugging Face folder, all read
    parameters: int  # of the checkpoint
    bytes: int  # of weights
    notes: list[str]  # what of the folder is not in the checkpoint as it was, a line each


@dataclasses.dataclass(frozen=True)
class _Part:
    """Is a part of the tensor `key` to write: an expert's, or the whole."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    rule: Rule

    @property
    def bytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


def import_hf(
    source: str | Path,
    out: str | Path,
    *,
    file_bytes: int = FILE_BYTES,
    progress: Progress = silent,
) -> ImportResult:
    """Converts the Hugging Face folder `source` into the checkpoint folder `out`, which appears when it is whole.

    progress: gets the bytes in all and returns a progress callback for bytes written. Raises ModelError before anything
    is written if the folder is damaged, is not what its config.json says, or holds what cannot be converted.
    """
    check_free(Path(out))
    with open_hf(source) as model:
        fields_of(dict(model.hf_config))  # what the Megatron engine cannot compute is refused by its name
        rules = whole_rules(model.family, model.hf_config, head=model.head, mtp=model.mtp)
        parts = list(_parts(rules, model))
        groups = _group(parts, file_bytes)
        needed = {file: sum(part.bytes for part in group) for file, group in groups.items()}
        carried = {name: model.reader.tensors[name] for name in sorted(model.family.carried(model.reader.tensors))}
        if carried:
            needed[_CARRIED_FILE] = sum(map(tensor_bytes, carried.values()))
        total = sum(needed.values())
        advance = progress(total)
        plan = {"command": "import", "mrl": mrl.__version__, "file_bytes": file_bytes, "source": _fingerprint(model)}
        with Workspace(out, plan, needed) as work:
            makers = {file: functools.partial(_write, group, model, advance) for file, group in groups.items()}
            if carried:
                write = functools.partial(write_tensors, lay_out(carried), carried, model.reader, advance)
                makers[_CARRIED_FILE] = write
            shapes = stored_shapes(rules.values())
            done = work.write_all(makers, advance)
            if _fingerprint(model) != plan["source"]:
                raise ModelError(source, why="changed while it was converted", fix="run the same command again")
            with work.finishing() as folder:
                tensors = {part.key: (part.dtype, shapes[part.key]) for part in parts}
                _finish(folder, model, done, tensors)
        return ImportResult(Path(out), len(model.reader.tensors), len(shapes), total, _notes(model))


def _parts(rules: Mapping[str, Rule], model: Source) -> Iterator[_Part]:
    """Yields the parts to write, in model order. All parts of a tensor have one dtype, which holds each source
    exactly."""
    dtypes = stored_dtypes(rules.values(), model.family, model.reader.tensors)
    for rule in rules.values():
        key, shape = stored_key(rule), rule.shape()
        lead = () if rule.expert is None else (rule.expert,)
        sizes = shape if rule.expert is None else (1, *shape)
        yield _Part(key, (*lead, *(0 for _ in shape)), sizes, dtypes[key], rule)


def _group(parts: list[_Part], file_bytes: int) -> dict[str, list[_Part]]:
    """Returns the parts of each data file."""
    groups = split_by_bytes(parts, lambda part: part.bytes, file_bytes)
    return {f"{FOLDER}/__0_{i}.distcp": group for i, group in enumerate(groups)}


def _write(parts: list[_Part], model: Source, progress: Callable[[int], None], path: Path) -> FileSummary:
    file = ItemFile(path)
    try:
        items = [
            file.tensor(part.key, part.offsets, part.sizes, part.dtype, _blocks(part, model, progress))
            for part in parts
        ]
        file.close()
    except BaseException:
        file.abort()
        raise
    return {"size": file.size, "crc32": file.crc32, "items": [dataclasses.astuple(item) for item in items]}


def _blocks(part: _Part, model: Source, progress: Callable[[int], None]) -> Iterator[Tensor]:
    for block in row_blocks(part.rule, model.reader):
        yield block.to(part.dtype)
        progress(block.numel() * part.dtype.itemsize)


def _finish(
    folder: Path,
    model: Source,
    done: Mapping[str, FileSummary],
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> None:
    """Writes the small files, COMPLETE last."""
    from mrl.engine.torch_dist.boxes import write_metadata  # which imports torch.distributed.checkpoint

    items = {
        Path(file).name: [Item(i[0], _tuple(i[1]), _tuple(i[2]), i[3], i[4]) for i in summary["items"]]
        for file, summary in done.items()
        if file != _CARRIED_FILE
    }
    extra, last = extra_state_keys({key: shape for key, (_, shape) in tensors.items()}), f"__0_{len(items)}.distcp"
    objects = ItemFile(folder / FOLDER / last)
    items[last] = [objects.add_empty(key) for key in extra]
    objects.close()
    small = [f"{FOLDER}/{name}" for name in (last, *write_metadata(folder / FOLDER, tensors, items, extra))]
    (folder / DESCRIPTION).write_bytes(saved_bytes(_description(model)))
    (folder / SOURCE).write_text(json.dumps(source_as_json(model)), encoding="utf-8")
    # the weights here are not quantised
    beside = copy_companions(model.companion_folder, folder, changes={"quantization_config": None})
    files = {file: {"size": summary["size"], "crc32": summary["crc32"]} for file, summary in done.items()}
    for name in [*small, DESCRIPTION, SOURCE, *beside]:
        files[name] = {"size": (folder / name).stat().st_size, "crc32": crc32_of(folder / name)}
    atomic_checkpoint.write_marker(str(folder), files, step=0, serial=1, backend="megatron")


def _tuple(values: Any) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _description(model: Source) -> dict[str, Any]:
    """Returns `engine.pt` as the Megatron engine writes it. It has no layout, so no rank takes random numbers from
    it."""
    weights = DTYPES[model.reader.tensors[model.family.in_files(EMBEDDING)].dtype]
    about = architecture(model.family, model.hf_config) | {
        "head": model.head, "dtype": str(weights).removeprefix("torch."), "layer_spec": "local",
    }  # fmt: skip
    return {"schedule_step": 0, "layout": {}, "architecture": about, "optimizer_steps": None, "state": {}}


def _fingerprint(model: Source) -> dict[str, Any]:
    """Returns a fingerprint that tells this source from any other, and from itself after a change."""
    config = hashlib.sha256((model.folder / "config.json").read_bytes()).hexdigest()
    files = file_versions(model.folder.glob("*.safetensors"))
    return {"folder": str(model.folder.resolve()), "config": config, "files": files}


def _notes(model: Source) -> list[str]:
    """Returns lines on parts of the folder that the checkpoint does not hold as they were."""
    notes = []
    if model.copies:
        notes.append(
            f"{shorten_list(list(model.copies))}: not stored, being "
            f"{shorten_list(sorted(set(model.copies.values())))} again; an export has them"
        )
    if model.quantised:
        method = model.hf_config["quantization_config"].get("quant_method")
        notes.append(
            f"quantised weights ({method}): read as bf16, and not quantised in the checkpoint nor in what is exported "
            "from it"
        )
    expected = expected_hf_names(model.family, model.hf_config, head=model.head, mtp=model.mtp)
    stored = {*expected, *model.copies, *model.family.carried(model.reader.tensors)}
    follow = [name for name in model.reader.tensors if name not in stored]
    if follow:
        notes.append(f"{shorten_list(follow)}: not stored, as it follows from the rest")
    return notes
