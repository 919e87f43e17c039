"""The forms of MODEL: a Hugging Face folder or hub id, a checkpoint, an adapter, or a run's directory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from mrl.config.inference import PlaceConfig
from mrl.convert.sources import Source, open_any
from mrl.engine import collective
from mrl.engine.atomic_checkpoint import LATEST, names_checkpoint
from mrl.engine.fsdp.checks import length_dependent_positions
from mrl.errors import ModelError, quoted
from mrl.weights.adapter_folder import CONFIG as ADAPTER_CONFIG
from mrl.weights.adapter_folder import is_adapter
from mrl.weights.hf_config import GGUF, positions_of
from mrl.weights.hub import model_folder
from mrl.weights.json_file import read_json
from mrl.weights.mcore_weights import FOLDER, MARKER, is_imported
from mrl.weights.safetensors_io import INDEX, SINGLE, SafetensorsReader, main_dtype
from mrl.weights.tokenizer_files import TOKENIZER_FILES

FORMS = "a Hugging Face folder or hub id, a checkpoint, an adapter folder, or the directory of a run"


def find_model(given: str, key: str = "MODEL") -> PlaceConfig:
    """Returns the place of the weights, config.json and the tokenizer of `given`. key: the user's name for it.

    A run stands for the model in its hf folder or, without one, for its newest checkpoint. Raises a UserError if there
    is no model, or one that does not make text.
    """
    path = os.path.expanduser(given)
    if os.path.isfile(path) and not names_checkpoint(path):
        raise ModelError(key, quoted(given), "is a file", GGUF if path.endswith(".gguf") else f"give {FORMS}")
    if not os.path.exists(path):
        if not given or given.startswith((".", "/", "~")) or given.count("/") > 1:
            raise ModelError(key, quoted(given), "does not exist", f"give {FORMS}")
        return _of_folder(given, model_folder(given, key=key), f"{given} of the hub")
    folder = Path(path)
    if (folder / "config.json").is_file():
        if not is_imported(path) and not any(folder.glob("*.safetensors")):
            why = "has a config.json and no *.safetensors weights"
            raise ModelError(key, quoted(given), why, "save the model there with save_pretrained")
        return _of_folder(given, path, "imported checkpoint" if is_imported(path) else "Hugging Face folder")
    if is_adapter(folder):
        return _of_source(given, folder, key)
    hf = folder / "hf"
    if (hf / "config.json").is_file() or (hf / ADAPTER_CONFIG).is_file():
        place = find_model(str(hf), key)
        return dataclasses.replace(place, given=given, what=f"the run's export {hf} ({place.what})")
    if folder.is_dir() and not any((folder / name).exists() for name in ("checkpoints", MARKER, LATEST, FOLDER)):
        raise ModelError(key, quoted(given), "holds no model", f"give {FORMS}")
    return _of_source(given, folder, key)


def _of_folder(given: str, folder: str, what: str) -> PlaceConfig:
    """Returns the place of a folder that an engine starts from by itself."""
    raw = read_json(Path(folder) / "config.json")
    dtype: Literal["bfloat16", "float32"] | None = None
    if not is_imported(folder) and any((Path(folder) / name).is_file() for name in (SINGLE, INDEX)):
        with SafetensorsReader(folder) as reader:
            dtype = _name(main_dtype(reader.tensors))
    if dtype is None and isinstance(raw, dict):
        dtype = _name(raw.get("dtype") or raw.get("torch_dtype"))
    limit, limited_by = limit_of(raw)
    return PlaceConfig(
        given=given, what=what, folder=folder, tokenizer=folder, dtype=dtype or "bfloat16", limit=limit,
        limited_by=limited_by,
    )  # fmt: skip


def _of_source(given: str, folder: Path, key: str) -> PlaceConfig:
    """Returns the place of a checkpoint of a run, or of an adapter, whose weights `weights_of` reads."""
    with open_any(folder) as source:
        folder = source.place
        if source.head != "lm":
            raise ModelError(key, quoted(given), "is a value head, which makes no text", f"give {FORMS}")
        limit, limited_by = limit_of(source.hf_config)
        beside = is_adapter(folder) and any((folder / name).is_file() for name in TOKENIZER_FILES)
        return PlaceConfig(
            given=given,
            what=source.what if is_adapter(folder) else f"{source.what} ({folder})",
            folder=str(source.companion_folder),
            tokenizer=str(folder if beside else source.companion_folder),
            source=str(folder),
            chat_template=source.chat_template,
            dtype=_name(main_dtype(source.reader.tensors)),
            limit=limit,
            limited_by=limited_by,
        )


def renew(place: PlaceConfig) -> PlaceConfig:
    """Returns `place`, or that of the run's newest checkpoint if the run has removed the one of `place` since."""
    if place.source is None or os.path.exists(place.source):
        return place
    return _of_source(place.given, Path(os.path.expanduser(place.given)), "MODEL")


def _name(dtype: Any) -> Literal["bfloat16", "float32"]:
    """Returns the choice of model.dtype nearest to the dtype of a stored model."""
    return "float32" if str(dtype).rpartition(".")[2] == "float32" else "bfloat16"


def limit_of(hf_config: Any) -> tuple[int | None, str]:
    """Returns the number of positions in config.json, None if it states none, and a name for them.

    If a rotary embedding follows the length of a sequence, they are the positions before it begins to. A sequence that
    is sampled token by token has keys of the lengths before.
    """
    if not isinstance(hf_config, dict):
        return None, ""
    following = length_dependent_positions(hf_config)
    if following is not None and following[1] is not None:
        kind, limit = following
        return limit, f'the {limit} positions up to which the model\'s rotary embedding "{kind}" is the same for all'
    limit = positions_of(hf_config)
    return limit, "" if limit is None else f"the model's {limit} positions"


@contextlib.contextmanager
def weights_of(place: PlaceConfig) -> Iterator[Source | None]:
    """Gives the source of the weights of a checkpoint or an adapter, by Hugging Face name.

    It is None if an engine reads the folder itself. Collective: the main process compares the checksums of all files
    before it ends.
    """
    if place.source is None:
        yield None
        return
    with collective.call_on_every_rank(lambda: open_any(place.source or "")) as source:
        yield source
        collective.on_main(source.check)
