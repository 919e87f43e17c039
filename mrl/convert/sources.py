"""Opens a Hugging Face folder, a checkpoint or a run as a model to convert: its weights by Hugging Face name, and the
rest."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mrl.config.backends import OWN_KEYS
from mrl.config.command import command_of_data
from mrl.config.load import from_dict, read_yaml
from mrl.config.schema import ModelConfig
from mrl.config.sources import RAW_TEXT
from mrl.convert.adapters import SavedAdapters, merge_adapter_folder, merge_checkpoint_adapters, saved_adapters
from mrl.engine import atomic_checkpoint
from mrl.engine.fsdp.names import STATE
from mrl.engine.fsdp.stored import FSDPReader
from mrl.engine.stored_weights import mtp_tensors_of_folder, open_imported
from mrl.errors import CheckpointError, ModelError, UserError, quoted
from mrl.weights.accounting import LM_HEAD, OWN_COUNT, SCORE, check_model, copies_of, mtp_layers, shared_tensors
from mrl.weights.adapter_folder import base_of, is_adapter, merged_place
from mrl.weights.companions import companion_files
from mrl.weights.composites import SOURCE, as_stored_in
from mrl.weights.families import family_for, family_of
from mrl.weights.hf_config import GGUF, read_hf_config
from mrl.weights.json_file import read_json
from mrl.weights.mcore_weights import MARKER, check_architecture, read_description
from mrl.weights.pt_file import load_pt
from mrl.weights.quantized import check_readable
from mrl.weights.safetensors_io import INDEX, SafetensorsReader, TensorInfo, WeightReader, main_dtype, read_header_text
from mrl.weights.stacks import unstack_experts
from mrl.weights.table import Family

_READING_ERRORS = (OSError, RuntimeError, UserError)
"""Errors of reading a checkpoint whose files a run removes."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class HFFiles:
    """Describes how a Hugging Face folder spreads its tensors over files."""

    files: dict[str, list[tuple[str, TensorInfo]]]  # by file, in the order of their bytes
    metadata: dict[str, dict[str, str] | None]  # of each file's header, None where it has none
    index: str | None  # text of the index file

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: info for tensors in self.files.values() for name, info in tensors}


@dataclasses.dataclass
class Source:
    """Is a model that `mrl convert` reads, whatever format it is stored in."""

    folder: Path
    what: str  # in words, for people
    reader: WeightReader  # by Hugging Face name
    hf_config: dict[str, Any]
    family: Family
    head: str  # "lm" or "value"
    companion_folder: Path  # of config.json, tokenizer and so on
    files: HFFiles | None  # the layout of the Hugging Face folder that it comes from, where that is known
    copies: dict[str, str]
    """Names of copies in that folder (a tied head), with the original's name; `reader` may lack them."""
    chat_template: str | None = None  # instead of the tokenizer's own
    checkpoint: Path | None = None  # that `folder` is, or is a part of
    as_published: bool = False  # a Hugging Face folder, which transformers can load by itself
    skipped_tensors: list[str] = dataclasses.field(default_factory=list)  # of MTP layers, which training left out
    notes: list[str] = dataclasses.field(default_factory=list)  # what an export is to say, a line each
    end_tokens: dict[str, list[int]] | None = None  # of a run's completions: "own" and "added"
    adapters: SavedAdapters | None = None  # of a checkpoint of adapters; its `path` is what the run calls the base

    @property
    def place(self) -> Path:
        """The checkpoint, or the folder of another model."""
        return self.checkpoint or self.folder

    @property
    def mtp(self) -> int:
        """Returns how many MTP layers the reader has, beside those that are carried."""
        if OWN_COUNT in self.hf_config:
            return getattr(self.reader, "mtp", 0)  # of a checkpoint that trained them
        return mtp_layers(self.reader.tensors, self.hf_config)

    @property
    def quantised(self) -> bool:
        """Returns whether the files hold fewer bits than the bf16 that the reader gives."""
        return self.as_published and bool(self.hf_config.get("quantization_config"))

    def check(self) -> None:
        """Raises CheckpointError if a file of the checkpoint is not as it was written."""
        if self.checkpoint is not None:
            atomic_checkpoint.verify(str(self.checkpoint))

    def close(self) -> None:
        self.reader.close()

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
        if isinstance(error, _READING_ERRORS) and not self.place.exists():
            raise _removed(self.place) from error


def open_hf(path: str | Path) -> Source:
    """Opens the Hugging Face folder or hub id `path`, and accounts for every tensor of it."""
    folder = local_folder(path)
    if (folder / MARKER).is_file():
        fix = "name it in model.path to start from it, or see `mrl convert export`"
        raise ModelError(folder, why="is a checkpoint already", fix=fix)
    hf_config = read_hf_config(folder)
    family = as_stored_in(folder, family_for(hf_config))
    check_readable(hf_config.get("quantization_config"), str(folder / "config.json"))
    stored = SafetensorsReader(folder)
    files: HFFiles | None = hf_files(stored)
    reader = unstack_experts(stored, family)
    if reader.tensors is not stored.tensors:
        files = None  # what is written is not what the folder holds: it is not quantised, and has one tensor an expert
    if {SCORE, LM_HEAD} <= reader.tensors.keys():
        raise ModelError(
            folder, why=f"has two heads, {SCORE} and {LM_HEAD}, of which a checkpoint has one", fix="remove the other"
        )
    head = "value" if SCORE in reader.tensors else "lm"
    check_model(reader, family, hf_config, head=head, carried=True)
    companion_files(folder)  # refuses what a download left broken
    copies = _copies(reader.tensors, reader, family, hf_config, head)
    return Source(
        folder, "Hugging Face folder", reader, hf_config, family, head, folder, files, copies, as_published=True
    )


def _copies(
    names: Iterable[str], reader: WeightReader, family: Family, hf_config: Mapping[str, Any], head: str
) -> dict[str, str]:
    """Returns the names of copies among `names`, with the name in `reader` of the original."""
    copies = copies_of(family, hf_config, head=head, mtp=mtp_layers(reader.tensors, hf_config))
    return {name: copies[name] for name in names if name in copies and copies[name] in reader.tensors}


def local_folder(path: str | Path) -> Path:
    """Returns the folder `path`, or the cached folder of the hub id `path`, downloaded if need be."""
    if Path(path).is_dir():
        return Path(path)
    if Path(path).suffix == ".gguf":
        raise ModelError(path, why="is a GGUF file", fix=GGUF)
    from mrl.weights.hub import model_folder  # the hub's client is slow to import

    return Path(model_folder(str(path), key="HF"))


def checkpoint_folder(path: str | Path) -> Path:
    """Returns the whole checkpoint at `path`: itself, the one that a file of `POINTERS` names, or the newest in it.

    A run in progress soon has a newer one.
    """
    path = Path(path)
    if atomic_checkpoint.names_checkpoint(path):
        path = path.parent / path.read_text(encoding="utf-8").strip()
    if (path / MARKER).is_file():
        return path
    root = str(path / "checkpoints") if (path / "checkpoints").is_dir() else str(path)
    checkpoint, damaged = atomic_checkpoint.find_checkpoint(root), atomic_checkpoint.damage(root)
    if checkpoint is None:
        why = "; ".join(["holds no whole checkpoint of mrl", *damaged])
        fix = f"give one such as runs/demo/checkpoints/{atomic_checkpoint.step_name(100)}, or a run"
        raise CheckpointError(path, why=why, fix=fix)
    for line in damaged:
        print(f"passed over {line}", file=sys.stderr)
    return Path(checkpoint)


def _check_beside(companions: Path) -> None:
    """Refuses broken files besides the weights, and any that changed since `mrl convert import` wrote them."""
    found = companion_files(companions)
    if (companions / MARKER).is_file():
        files = atomic_checkpoint.validate(str(companions)).files
        for file in found:
            name = file.relative_to(companions).as_posix()
            if name in files and files[name]["size"] > atomic_checkpoint.SMALL_BYTES:
                atomic_checkpoint.check_file(str(companions), name, files[name], content=True)


def _state(folder: Path, saved: Mapping[str, Any], role: str | None) -> dict[str, Any]:
    """Returns the trainer's state in `folder`, besides the weights of `role`. saved: the engine's part."""
    if role is None:
        return saved["state"]
    state = load_pt(folder / "trainer.pt", fields=("state",), mmap=True)["state"]
    return {"model": state.get("models", {}).get(role), "end_tokens": state.get("end_tokens")}


def _check_tokenizer(state: Mapping[str, Any], companions: Path, *, given: bool) -> list[str]:
    """Refuses another tokenizer or chat template than the run's. If its folder was `given` by name, returns a note
    instead."""
    from mrl.weights.hub import model_fingerprint  # the hub's client is slow to import

    saved = (state.get("model") or {}).get("tokenizer")
    if saved is None or model_fingerprint(str(companions))["tokenizer"] == saved:
        return []
    if not given:
        raise CheckpointError(
            companions,
            why="the tokenizer or chat template there is not the one that the run had",
            fix="restore it, or give the folder with --model to take what it has now",
        )
    return [f"tokenizer and chat template: those of {companions}, which are not those that the run had"]


def hf_files(reader: WeightReader) -> HFFiles:
    """Returns how a safetensors folder is laid out: tensors in the order of their bytes."""
    files: dict[str, list[tuple[str, TensorInfo]]] = {}
    for name, info in sorted(reader.tensors.items(), key=lambda item: (item[1].file, item[1].start)):
        files.setdefault(info.file, []).append((name, info))
    metadata = {file: json.loads(read_header_text(reader.path / file)).get("__metadata__") for file in files}
    index = reader.path / INDEX
    # bytes: to read it as a text would change its line breaks
    return HFFiles(files, metadata, index.read_bytes().decode() if index.is_file() else None)


def source_as_json(source: Source) -> dict[str, Any]:
    """Returns the content of `SOURCE` for a Hugging Face folder."""
    files, copies = source.files, list(source.copies)
    if files is None:
        return {"files": None, "metadata": None, "index": None, "copies": copies}
    tensors = {file: [[name, info.dtype, list(info.shape)] for name, info in of] for file, of in files.files.items()}
    return {"files": tensors, "metadata": files.metadata, "index": files.index, "copies": copies}


def read_source_file(folder: Path) -> tuple[HFFiles | None, list[str]]:
    """Returns the content of `SOURCE`: the layout, None if it was another one than ours, and the names of copies."""
    fields = read_json(folder / SOURCE)
    if fields["files"] is None:
        return None, fields["copies"]
    files = {
        file: [(name, TensorInfo(dtype, tuple(shape), file)) for name, dtype, shape in tensors]
        for file, tensors in fields["files"].items()
    }
    return HFFiles(files, fields["metadata"], fields["index"]), fields["copies"]


def open_checkpoint(path: str | Path, *, model: str | None = None, role: str | None = None) -> Source:
    """Opens a checkpoint, imported or of a run, a folder of them, or a run. `Source.check` compares its checksums.

    model: the Hugging Face folder with config.json and tokenizer, if a run's config.yaml does not tell.

    role: whose weights, in a checkpoint of `mrl ppo`; the actor's by default.
    """
    folder = checkpoint_folder(path)
    try:
        source = _open(folder, atomic_checkpoint.validate(str(folder)), model, role)
    except _READING_ERRORS as error:
        if folder.exists():
            raise
        if folder == Path(path):
            raise _removed(folder) from error
        return open_checkpoint(path, model=model, role=role)  # its run has a newer one
    source.checkpoint = folder
    return source


def _removed(folder: Path) -> CheckpointError:
    """Returns the error on a checkpoint that was there before it was read."""
    why = "was removed while it was read: a run keeps its newest checkpoints (checkpoint.keep)"
    return CheckpointError(folder, why=why, fix="give the run or a newer one, or raise checkpoint.keep")


def _inside(folder: Path, marker: atomic_checkpoint.Marker, role: str | None) -> tuple[Path, str, str | None]:
    """Returns the folder of the weights in a checkpoint, the backend that wrote them, and their role (None for a lone
    model)."""
    inside, backend = folder, marker.backend
    if backend == atomic_checkpoint.ROLES:
        roles = load_pt(folder / "trainer.pt", fields=("roles",))["roles"]
        role = role or "actor"
        if role not in roles:
            raise CheckpointError("--role", quoted(role), f"is not in {folder}, which has {', '.join(roles)}")
        inside, backend = folder / role, roles[role]
    elif role is not None:
        raise CheckpointError("--role", quoted(role), f"has no effect: {folder} holds one model", "leave it out")
    if backend not in OWN_KEYS:
        raise CheckpointError(
            folder,
            why=f"was saved by the engine {backend!r} of another package, whose files only that engine reads",
            fix="resume the run, which writes its model to its hf folder at the end (checkpoint.export_hf)",
        )
    return inside, backend, role


def _open(folder: Path, marker: atomic_checkpoint.Marker, model: str | None, role: str | None) -> Source:
    inside, backend, role = _inside(folder, marker, role)
    imported = (folder / "config.json").is_file()
    mcore = backend == "megatron"
    saved = read_description(inside) if mcore else load_pt(inside / STATE, fields=("state",))
    adapters = saved_adapters(saved)
    companions, config, template = (
        (folder, None, None)
        if imported and model is None
        else _model_of(folder, model, role, weights=adapters is not None)
    )
    dtype = DTYPES[config.dtype if config is not None else "float32"]
    _check_beside(companions)
    hf_config = read_hf_config(companions)  # first: what is wrong with config.json is then one line
    state = {} if imported else _state(folder, saved, role)
    notes = _check_tokenizer(state, companions, given=model is not None)
    if not mcore and family_of(hf_config["model_type"]) is None:
        raise CheckpointError(
            folder,
            why=f"is of backend fsdp and a {hf_config['model_type']!r} model, for whose names there mrl has no table",
            fix="resume the run: its end writes hf/ (checkpoint.export_hf)",
        )
    family = as_stored_in(companions, family_for(hf_config))
    files, names = read_source_file(folder) if imported else (None, [])
    of_run = f"{backend} checkpoint of step {marker.step}" + (f", {role}" if role else "")
    what = "imported mcore checkpoint" if imported else of_run
    reader: WeightReader
    if adapters is not None:
        check_architecture(saved["architecture"], family, hf_config, companions)
        reader = merge_checkpoint_adapters(inside, adapters, companions, family, hf_config, dtype)
        head, what = adapters.head, f"adapters over {companions}, {what}"
        adapters = dataclasses.replace(adapters, path=model or (config.path if config else adapters.path))
    elif mcore:
        reader = open_imported(inside, family, hf_config, companions)
        head = saved["architecture"]["head"]
    else:
        reader = FSDPReader(inside, family, hf_config, dtype, companions)
        head = reader.head
    mtp = mtp_layers(reader.tensors, hf_config)
    if head == "lm" and not imported:
        names = list(shared_tensors(hf_config, mtp))
    skipped = [] if imported or mtp else mtp_tensors_of_folder(companions, family, hf_config)
    return Source(
        inside, what, reader, hf_config, family, head, companions, files,
        _copies(names, reader, family, hf_config, head), template, skipped_tensors=skipped, notes=notes,
        adapters=adapters, end_tokens=state.get("end_tokens") if head == "lm" else None,
    )  # fmt: skip


def _model_of(
    folder: Path, model: str | None, role: str | None, *, weights: bool
) -> tuple[Path, ModelConfig | None, str | None]:
    """Returns the Hugging Face folder of a run's checkpoint, the run's section about the model, and the chat template.

    weights: whether its weights are used, too.
    """
    config, template = None, None
    file = folder.parent.parent / "config.yaml"
    if file.is_file():
        plain = read_yaml(file)
        command = command_of_data(plain)
        run = from_dict(plain, command.root)
        [config] = [part.model for part in command.parts(run) if part.role == (role or "")]
        if run.data.chat_template not in (None, RAW_TEXT):
            given = Path(run.data.chat_template)
            if not given.is_file():
                why = f"data.chat_template {str(given)!r} is not there"
                raise CheckpointError(file, why=why, fix="run this from where the run was started")
            template = given.read_text(encoding="utf-8")
        adapter = Path(config.path).expanduser()
        if is_adapter(adapter):  # the run began with what it made of it
            config = dataclasses.replace(config, path=str(merged_place(adapter, file.parent / "merged")))
    path = model or (None if config is None else config.path)
    if path is None:
        raise CheckpointError(
            folder,
            why=f"does not say which model it is of, as {file} is missing",
            fix="give its Hugging Face folder with --model",
        )
    from mrl.weights.hub import model_folder

    key = "--model" if model is not None else f"{file}: model.path"
    return Path(model_folder(path, weights=weights, key=key)), config, template


def open_any(path: str | Path, *, model: str | None = None, role: str | None = None) -> Source:
    """Opens a Hugging Face folder, an adapter folder over its base (or `model`), or a path for `open_checkpoint`."""
    if atomic_checkpoint.names_checkpoint(path):
        return open_checkpoint(path, model=model, role=role)
    place = local_folder(path)
    if (place / "config.json").is_file() and not (place / MARKER).is_file():
        return open_hf(place)
    if is_adapter(place):
        return open_adapter(place, model=model)
    return open_checkpoint(place, model=model, role=role)


def open_adapter(folder: Path, *, model: str | None) -> Source:
    """Opens an adapter folder, merged into its base, in the base's dtype. model: the base, if it lies elsewhere."""
    base = local_folder(model or base_of(folder))
    with open_any(base) as plain:
        dtype = main_dtype(plain.reader.tensors)
        hf_config, family = plain.hf_config, plain.family
    reader = merge_adapter_folder(folder, str(base), family, hf_config, dtype)
    what = f"adapters over {base}"
    return Source(folder, what, reader, hf_config, family, reader.head, base, None, {})
