"""Checks in the launcher that files and folders of a config exist, before a process starts or a file is written."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import logging
import math
import os
import pathlib
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from mrl.config.checks import (
    check_replicas,
    check_replicate,
    parallel_dims,
    smallest_world,
    streamed_keys,
)
from mrl.config.command import Config, Part, TrainingCommand
from mrl.config.schema import CheckpointConfig, ModelConfig
from mrl.config.sources import FORMS, RAW_TEXT, RenderedSource, RowsConfig, sources_of
from mrl.config.urls import shown_url
from mrl.engine.checks import Sequences
from mrl.errors import ConfigError, DataError, ModelError, first_line, quoted, unwritable
from mrl.parallel import ParallelDims
from mrl.trainers import used_folder
from mrl.weights import adapter_folder
from mrl.weights.adapter_folder import is_adapter
from mrl.weights.json_file import read_json

MAX_PROCESSES = 1024
"""Processes that a layout alone, without --nproc, is given on a machine without GPUs."""

_DATA_SUFFIXES = (".jsonl", ".json", ".gz", ".zst", ".parquet", ".csv", ".txt", ".arrow")


def devices(command: TrainingCommand, config: Config) -> set[str]:
    """Returns what engines ask for, of all parts that the config has a section for."""
    return {part.engine.device for part in command.parts(config)}


def check_files(command: TrainingCommand, config: Config, *, there: bool = True) -> list[Part]:
    """Returns the models of the run. Raises a UserError if a file or folder of `config` is missing.

    there: False looks neither for weights nor for rows: a script may be made where they are not.
    """
    _check_output_dir(config.output_dir)
    rows = command.on_rows(config)
    if rows is not None:
        _check_checkpoint(rows.checkpoint)
    needed = command.needed(config)
    parts = [
        dataclasses.replace(
            part, hf=read_model_config(part.model, part.key("model"), weights=there, merges=command.merges_adapters)
        )
        for part in command.parts(config)
        if part.role in needed
    ]
    command.check_files(config)
    if rows is not None and there:
        check_data(rows.data)
    return parts


def check_used(command: TrainingCommand, config: Config) -> used_folder.ResumePoint | None:
    """Raises a UserError where what is saved in output_dir is of another run. Returns what the run goes on with."""
    _check_output_dir(config.output_dir)
    rows = command.on_rows(config)
    with quiet():  # the run warns of damaged checkpoints again
        if rows is None:
            used_folder.refuse_foreign(pathlib.Path(config.output_dir))
            return None
        lora = next((part.model.lora for part in command.parts(config) if part.optimizer is not None), None)
        return used_folder.check(rows, None if lora is None else lora.export)


def check_code(command: TrainingCommand, config: Config) -> None:
    """Loads the user's own code, as a run does when it starts. Raises ConfigError where it is none."""
    with quiet():
        command.check_code(config)


def needed_processes(parts: Sequence[Part]) -> int:
    """Returns the fewest processes that all layouts fit on."""
    return math.lcm(*(smallest_world(part.engine.parallel) * part.engine.fsdp.replicate for part in parts))


def check_layout(
    command: TrainingCommand, config: Config, parts: Sequence[Part], world_size: int, *, here: bool = True
) -> list[ParallelDims]:
    """Returns the layout of each part on `world_size` processes, checked against the batch and the model.

    here: the run is to be on this machine, whose GPUs and packages are then looked at too.
    """
    made, world_size = [], command.processes_that_train(config, world_size)
    longest, key = command.longest(config)
    sequences = Sequences(longest, key, packed=command.packing(config), generated=command.generates)
    for part in parts:
        with command.rewrite_error_keys(config, part.role):
            dims = parallel_dims(part.engine.parallel, world_size)
            check_part(part, dims, sequences, here=here)
            # after the model: a degree that it cannot have makes replicas that no batch suffices for
            check_replicas(dims, *command.smallest_batch(config, part.role), part.role)
        made.append(dims)
    _check_attention(parts)
    _check_userbuffers(parts, made)
    command.check_processes(config, parts, world_size)
    for part in command.parts_beside(config, parts):
        with command.rewrite_error_keys(config, part.role):
            beside = parallel_dims(part.engine.parallel, command.processes_beside(config))
            check_part(part, beside, dataclasses.replace(sequences, generated=True), here=here)
    return made


def position_notes(command: TrainingCommand, config: Config, parts: Sequence[Part]) -> list[str]:
    """Returns a line for each model that is made for fewer positions than the run's longest sequence may have."""
    with quiet():
        from mrl.weights.hf_config import positions_of

    longest, key = command.longest(config)
    noted: dict[str, str] = {}
    for part in parts:
        limit = positions_of(part.hf)
        if limit is not None and longest > limit:
            why = f"the model is made for {limit} positions; sequences have up to {longest} tokens ({key}); "
            why += f"make that {limit}, or stretch the positions (rope_scaling of config.json)"
            noted.setdefault(part.model.path, f"{part.key('model.path')}: {why}")
    return list(noted.values())


def _check_attention(parts: Sequence[Part]) -> None:
    """Raises ConfigError if models of a run want different kernels of attention.

    They share processes, and the environment of a process tells transformer-engine its kernels.
    """
    with_te = [part for part in parts if part.engine.backend == "megatron" and part.engine.layer_spec != "local"]
    for part in with_te[1:]:
        first, wanted = with_te[0].engine.attention, part.engine.attention
        if wanted != first:
            key = "engine.attention"
            why = f"does not go with {with_te[0].key(key)} {first}: all models of a run share its processes"
            raise ConfigError(part.key(key), wanted, why, "give both the same")


def _check_userbuffers(parts: Sequence[Part], layouts: Sequence[ParallelDims]) -> None:
    """Raises ConfigError if models of a run want userbuffers of different shapes.

    They share processes, and a process has one set of these buffers for tensor-parallel communication.
    """
    with quiet():
        from mrl.mcore_models.userbuffers import FIELD, SAME_SHAPE_FIX, BufferShape
        from mrl.weights.families import fields_of
        from mrl.weights.hf_config import normalize

        with_them: list[tuple[Part, BufferShape]] = []
        for part, dims in zip(parts, layouts, strict=True):
            if part.engine.backend != "megatron":
                continue
            shape = BufferShape.of(part.engine, fields_of(normalize(dict(part.hf)))["hidden_size"], dims)
            if shape is not None:
                with_them.append((part, shape))
    key = f"engine.megatron.{FIELD}"
    for part, shape in with_them[1:]:
        first, of_first = with_them[0]
        if shape != of_first:
            why = f"asks for buffers of {shape.describe()}, and {first.key(key)} for {of_first.describe()}"
            raise ConfigError(part.key(key), True, why, SAME_SHAPE_FIX)


def check_engines(command: TrainingCommand, config: Config) -> None:
    """Raises ConfigError if keys of an engine do not go together, before `auto` gets a number."""
    with quiet():
        from mrl.engine.registry import checks_of

        needed = command.needed(config)
        for part in command.parts(config):
            if part.role in needed:
                with command.rewrite_error_keys(config, part.role):
                    checks_of(part.engine.backend).check_config(part.model, part.engine)


def check_part(part: Part, dims: ParallelDims, sequences: Sequences, *, here: bool = True) -> None:
    """Raises a UserError where a model cannot be run in a layout, or for a config.json that the engine would refuse:

    - an unknown family or field
    - sizes that the layout cannot split
    - sequences longer than the model's positions
    - adapters without a module to match

    here: on this machine.

    These imports are the slow part of a dry run, and so the last. None of them is megatron.
    """
    check_replicate(part.engine, dims.world_size)
    with quiet():
        from mrl.engine.registry import checks_of
        from mrl.weights.companions import companion_files
        from mrl.weights.hf_config import normalize

        normalize(part.hf, where=os.path.join(part.model.path, "config.json"))  # for what it refuses
        if os.path.isdir(part.model.path):
            companion_files(pathlib.Path(part.model.path))  # which the run's export copies
        checks = checks_of(part.engine.backend)
        checks.check_config(part.model, part.engine)
        checks.check_model(part.engine, dims, part.hf, sequences)
        check = checks.check_here if here else checks.check_anywhere
        check(part.model, part.used_engine, dims, part.hf)
        if part.model.lora is not None and os.path.isdir(part.model.path):
            from mrl.engine.lora.folder import adapters

            folder = config_folder(part.model, part.key("model"))
            if any(pathlib.Path(folder).glob("*.safetensors")):  # of a hub id, the run looks
                adapters(folder, part.model.lora, part.head)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides the warnings of libraries. The run gives them again in its log."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)


def choose_nproc(asked: int | None, *, gpus: int, needed: int, here: bool = True) -> int:
    """Returns the number of processes to start: the given one, else one a GPU, else the least of the layout.

    here: they are started, on this machine. A dry run has as many as the layout takes.
    """
    if asked is None and here and not gpus and needed > MAX_PROCESSES:
        why = f"the layout needs {needed} processes, and at most {MAX_PROCESSES} are started on one machine"
        raise ConfigError("engine.parallel", why=why, fix="give smaller degrees, or start it with torchrun or srun")
    if asked is None:
        return gpus or needed
    if gpus and asked > gpus:
        raise ConfigError("--nproc", asked, f"is above the {gpus} GPUs of this machine", f"give at most {gpus}")
    return asked


def read_model_config(
    model: ModelConfig, key: str = "model", *, weights: bool = True, merges: bool = False
) -> dict[str, Any]:
    """Returns config.json of a model folder or hub id.

    - key: of the model in the config
    - weights: they must be there
    - merges: an adapter folder gives config.json of its base
    """
    folder = pathlib.Path(model.path)
    if os.path.isdir(model.path):  # of os.path: pathlib raises where a name is too long
        path = folder / "config.json"
        if is_adapter(folder):
            return read_model_config(_base_of(model, key, merges), key, weights=weights)
        if not path.is_file():
            fix = "give a Hugging Face model folder, as hf in the folder of a run"
            raise ModelError(f"{key}.path", quoted(model.path), "has no config.json", fix)
        if weights:
            _check_weights(model, folder, key)
        return read_json(path)
    if model.path.startswith((".", "/", "~")) or model.path.count("/") > 1 or os.path.exists(model.path):
        raise ModelError(
            f"{key}.path", quoted(model.path), "is no folder", "give a Hugging Face model folder or a hub id"
        )
    return read_json(_from_hub(model.path, key))


def config_folder(model: ModelConfig, key: str) -> str:
    """Returns the folder of a model's config.json, after `read_model_config`. The folder of a hub id is its download.

    It may hold nothing else.
    """
    if is_adapter(pathlib.Path(model.path)):
        return config_folder(_base_of(model, key, merges=True), key)
    return model.path if os.path.isdir(model.path) else str(_from_hub(model.path, key).parent)


def _base_of(model: ModelConfig, key: str, merges: bool) -> ModelConfig:
    """Returns the base of an adapter folder. merges: the run makes a model of the two. Raises ModelError."""
    at, adapter = (f"{key}.path", quoted(model.path)), pathlib.Path(model.path)
    if not merges:
        fix = "merge it with `mrl convert export ADAPTER OUT` and give OUT"
        raise ModelError(*at, "is an adapter and no model", fix)
    base: Any = read_json(adapter / adapter_folder.CONFIG).get(adapter_folder.BASE)
    fix = "merge it with `mrl convert export ADAPTER OUT --model BASE` and give OUT"
    named = isinstance(base, str) and base and (os.path.isdir(base) or not base.startswith((".", "/", "~")))
    if not named or is_adapter(pathlib.Path(base)):
        raise ModelError(*at, f"is an adapter over {base!r}, which is no model here", fix)
    return dataclasses.replace(model, path=base)


def _check_weights(model: ModelConfig, folder: pathlib.Path, key: str) -> None:
    imported = (folder / "mcore").is_dir() and (folder / "COMPLETE").is_file()  # by `mrl convert import`
    if model.init == "pretrained" and not imported and not any(folder.glob("*.safetensors")):
        fix = "save the model with save_pretrained, or set init to random to train from scratch"
        raise ModelError(f"{key}.path", quoted(model.path), "has no *.safetensors weights", fix)


def _from_hub(hub_id: str, key: str) -> pathlib.Path:
    """Returns config.json of a hub id, from the local cache or downloaded."""
    import huggingface_hub
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError

    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            return pathlib.Path(huggingface_hub.hf_hub_download(hub_id, "config.json", local_files_only=True))
        # One request that is not repeated: offline, the download below would retry for half a minute.
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(hub_id, "config.json"), timeout=10)
        return pathlib.Path(huggingface_hub.hf_hub_download(hub_id, "config.json"))
    except (OSError, ValueError, HTTPError) as error:
        raise ModelError(
            f"{key}.path",
            quoted(hub_id),
            f"is no folder here and cannot be read from the hub ({first_line(error)})",
            "give a model folder, or a hub id that is cached or can be downloaded",
        ) from None


def check_data(data: RowsConfig) -> None:
    streamed = streamed_keys(data)
    for key, value in paths_of(data):
        if "://" in value:
            if key in streamed:
                continue  # one process of the run looks: this machine may have no network
            fix = "give a copy on this machine, or for training set stream to true to read it meanwhile"
            raise DataError(key, quoted(shown_url(value)), "is a URL, which is not downloaded", fix)
        if _is_missing(value):
            raise DataError(key, quoted(value), "does not exist", f"give {FORMS}")
    templates = {"data.chat_template": data.chat_template}
    for key, source in sources_of(data):
        if isinstance(source, RenderedSource):
            templates[f"{key}.chat_template"] = source.chat_template
    for key, template in templates.items():
        if template not in (None, RAW_TEXT) and not os.path.isfile(template):
            raise DataError(key, quoted(template), "does not exist", "give a Jinja file, or none")


def paths_of(data: RowsConfig) -> Iterator[tuple[str, str]]:
    """Yields the paths of data.train and data.eval, with their keys."""
    for key, value in (("data.train", data.train), ("data.eval", data.eval)):
        if isinstance(value, str):
            yield key, value
    yield from ((f"{key}.path", source.path) for key, source in sources_of(data))


def is_on_this_machine(path: str) -> bool:
    """Returns whether a path names a file or folder here, or is a glob that matches some."""
    path = os.path.expanduser(path)
    return os.path.exists(path) or next(glob.iglob(path, recursive=True), None) is not None


def _is_missing(path: str) -> bool:
    """Returns whether `path` can only be a file, folder or glob, and there is none; a hub id is looked up later."""
    if is_on_this_machine(path):
        return False
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith(_DATA_SUFFIXES)
    return looks_local or any(c in path for c in "*?[") or not path


def _check_output_dir(output_dir: str) -> None:
    if not output_dir:
        raise ConfigError("output_dir", "", "is empty", "give a folder, as in runs/demo")
    folder = existing = pathlib.Path(output_dir).absolute()
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError("output_dir", quoted(output_dir), "is a file", "give a folder")
        is_used = (folder / "config.yaml").exists()  # by a run, which may go on: `used_folder` looks whose it is
        if not is_used and (held := _of_model(folder)) is not None:
            why = f"is the folder of a model (it holds {held}), whose files a run would be mixed with"
            raise ConfigError("output_dir", quoted(output_dir), why, "give a folder of its own, as in runs/demo")
        existing = next(p for p in (folder, *folder.parents) if p.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".mrl-", dir=existing))  # permissions alone do not tell: root has all of them
    except OSError as error:
        raise unwritable(output_dir, existing, error) from None


def _of_model(folder: pathlib.Path) -> str | None:
    """Returns a file that only a model's folder has, of Hugging Face, imported, of adapters or GGUF."""
    with contextlib.suppress(ModelError):  # a config.json of something else, which mrl does not touch
        if "model_type" in read_json(folder / "config.json"):
            return "config.json"
    found = [path for name in (adapter_folder.CONFIG, "*.safetensors", "*.gguf") for path in folder.glob(name)]
    return found[0].name if found else None


def _check_checkpoint(checkpoint: CheckpointConfig) -> None:
    resume, remote = checkpoint.resume, checkpoint.remote
    if resume not in ("auto", "never") and "://" not in resume and not os.path.isdir(resume):
        raise ConfigError(
            "checkpoint.resume", quoted(resume), "is no folder", "give auto, never, or the folder of a checkpoint"
        )
    if remote is None:
        return
    import fsspec

    try:
        fsspec.get_filesystem_class(fsspec.utils.get_protocol(remote))
    except (ValueError, ImportError) as error:
        raise ConfigError(
            "checkpoint.remote",
            quoted(remote),
            f"is of no known file system ({error})",
            "give an fsspec URL, as in file:///backup",
        ) from None
