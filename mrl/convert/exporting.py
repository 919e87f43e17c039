"""Exports the weights of a checkpoint or run as a Hugging Face folder (`mrl convert export`).

Files, their order and their index are those of the model's original Hugging Face folder, if it had the same tensors.
The config.json, tokenizer, chat template and generation config are copied from it. End tokens of the run are added.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import mrl
from mrl.convert.adapters import MergedReader
from mrl.convert.sources import HFFiles, Source, open_adapter, open_checkpoint
from mrl.convert.workspace import Progress, Workspace, check_free, file_versions, silent, write_tensors
from mrl.engine.lora.folder import name_base, read_adapter, write_adapter
from mrl.errors import CheckpointError
from mrl.weights.accounting import account, count_key
from mrl.weights.adapter_folder import WEIGHTS, is_adapter, merged_place
from mrl.weights.companions import copy_companions
from mrl.weights.rules import expected_hf_names, value_head_config
from mrl.weights.safetensors_io import (
    INDEX,
    Slice,
    index_text,
    lay_out,
    main_dtype,
    parse_size,
    split_into_shards,
    tensor_bytes,
)
from mrl.weights.tokenizer_files import add_end_tokens, write_chat_template
from mrl.words import shorten_list

_METADATA = {"format": "pt"}


@dataclasses.dataclass(frozen=True)
class ExportResult:
    """Is the outcome of an export."""

    out: Path
    what: str  # the source, in words
    tensors: int  # written
    files: int  # of weights
    bytes: int  # of weights
    notes: list[str]  # what the model has lost, a line each
    place: Path  # of the source: of a run the checkpoint that was read


def export_hf(
    path: str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    role: str | None = None,
    max_shard_size: str | int | None = None,
    progress: Progress = silent,
) -> ExportResult:
    """Converts the checkpoint, run or adapter at `path` into the Hugging Face folder `out`, which appears when it is
    whole.

    model, role: as in `open_any`. max_shard_size: bytes or "5GB", for files of another size than in the source. Raises
    CheckpointError or ModelError if the checkpoint is damaged or does not fit its config.json; nothing is left of `out`
    then.
    """
    check_free(Path(out))
    limit = None if max_shard_size is None else parse_size(max_shard_size, "--max-shard-size")
    place = Path(path)
    opened = open_adapter(place, model=model) if is_adapter(place) else open_checkpoint(path, model=model, role=role)
    with opened as source:
        files = _files(source, limit)
        _account(source, files)
        shards = {file: dict(tensors) for file, tensors in files.files.items()}
        needed = {file: sum(tensor_bytes(info) for info in tensors.values()) for file, tensors in shards.items()}
        total = sum(needed.values())
        source.check()
        advance = progress(total)

        def read(name: str) -> Slice:
            return source.reader(source.copies.get(name, name))

        with Workspace(out, _plan(source, files), needed) as work:
            makers = {
                file: functools.partial(write_tensors, lay_out(tensors, files.metadata[file]), tensors, read, advance)
                for file, tensors in shards.items()
            }
            work.write_all(makers, advance)
            with work.finishing() as folder:
                _finish(folder, source, files)
        tensors, notes = len(files.tensors), _notes(source)
        return ExportResult(Path(out), source.what, tensors, len(shards), total, notes, source.place)


def write_merged_copy(adapter: Path, root: Path) -> str:
    """Returns a folder below `root` with the base and its adapter folder as one model. It is made once."""
    read_adapter(adapter)  # for what it refuses
    out = merged_place(adapter, root)
    if not out.exists():
        root.mkdir(parents=True, exist_ok=True)
        export_hf(adapter, out)
    return str(out)


def export_adapter(
    path: str | Path, out: str | Path, *, model: str | None = None, role: str | None = None
) -> ExportResult:
    """Writes the adapters of the checkpoint or run at `path` as the folder `out`, for peft to load over the base.

    The folder appears when it is whole. model, role: as in `open_checkpoint`. Raises CheckpointError if there are none,
    or the checkpoint is damaged, and ModelError if the disk is full.
    """
    check_free(Path(out))
    with open_checkpoint(path, model=model, role=role) as source:
        adapters, reader = source.adapters, source.reader
        if adapters is None or not isinstance(reader, MergedReader):
            raise CheckpointError(
                "--adapter", why=f"{source.folder} holds a whole model and no adapters", fix="leave it out"
            )
        source.check()
        tensors = reader.adapter
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        plan = {"command": "export --adapter", "mrl": mrl.__version__, "folder": str(source.folder.resolve())}
        with Workspace(out, plan, {WEIGHTS: size}) as work, work.finishing() as folder:
            write_adapter(folder, adapters.lora, str(source.companion_folder), tensors.items(), head=adapters.head)
            name_base(folder, adapters.path)
            _write_template(folder, source)
        return ExportResult(Path(out), source.what, len(tensors), 1, size, [], source.place)


def _files(source: Source, limit: int | None) -> HFFiles:
    """Returns the files to write: those of the Hugging Face folder that was imported, else cut by size."""
    known, tensors = source.files, dict(source.reader.tensors)
    tensors |= {name: tensors[of] for name, of in source.copies.items()}
    if known is not None and limit is None and known.tensors.keys() <= tensors.keys():
        return known
    shards = split_into_shards(tensors, limit or parse_size("5GB"))
    index = None
    if len(shards) > 1:
        index = index_text({name: file for file, names in shards.items() for name in names}, tensors)
    files = {file: list(of_file.items()) for file, of_file in shards.items()}
    return HFFiles(files, dict.fromkeys(shards, _METADATA), index)


def _account(source: Source, files: HFFiles) -> None:
    """Checks that every tensor of the model is written, once, in its shape, and nothing else."""
    expected = expected_hf_names(source.family, source.hf_config, head=source.head, mtp=source.mtp)
    copies = {name: expected[of] for name, of in source.copies.items()}
    written = sum(len(tensors) for tensors in files.files.values())
    assert written == len(files.tensors), f"{source.folder}: {written} tensors planned under {len(files.tensors)} names"
    carried = source.family.carried(files.tensors)
    account(files.tensors, expected | copies, where=str(source.folder), may_have=carried)


def _notes(source: Source) -> list[str]:
    if not source.skipped_tensors:
        return source.notes
    return [
        *source.notes,
        f"{count_key(source.hf_config)} is 0 in config.json: the layers of {source.companion_folder} that predict "
        f"further tokens ({shorten_list(source.skipped_tensors, 1)}) were not trained, and are not here",
    ]


def _plan(source: Source, files: HFFiles) -> dict[str, Any]:
    layout = json.dumps({file: [[n, i.dtype, i.shape] for n, i in of] for file, of in files.files.items()})
    weights = source.folder / "mcore" if (source.folder / "mcore").is_dir() else source.folder
    return {
        "command": "export", "mrl": mrl.__version__, "folder": str(source.folder.resolve()),
        "files": hashlib.sha256(layout.encode()).hexdigest(),
        "source": file_versions(path for path in weights.iterdir() if path.is_file()),
    }  # fmt: skip


def _finish(folder: Path, source: Source, files: HFFiles) -> None:
    # what is written is not quantised, whatever training began with
    changes: dict[str, Any] = {"quantization_config": None}
    if source.skipped_tensors:
        changes[count_key(source.hf_config)] = 0
    if source.head == "value":
        changes |= value_head_config(source.hf_config)
    imported = (source.folder / "config.json").is_file()  # what a run saved has the run's dtype
    dtype = None if imported and source.files is not None else main_dtype(files.tensors)
    copy_companions(source.companion_folder, folder, dtype=dtype, changes=changes)
    if is_adapter(source.folder):
        copy_companions(source.folder, folder)  # the tokenizer and chat template that it was trained with
    _write_template(folder, source)
    if files.index is not None:
        (folder / INDEX).write_bytes(files.index.encode())


def _write_template(folder: Path, source: Source) -> None:
    """Writes the run's chat template, and the end tokens that it adds."""
    if source.chat_template is not None:
        write_chat_template(folder, source.chat_template)
    if source.end_tokens is not None:
        add_end_tokens(folder, source.companion_folder, **source.end_tokens)
