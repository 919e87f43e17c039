"""Opens any path that is given to `mrl convert`."""

from __future__ import annotations

from pathlib import Path

from mrl.convert.adapters import merge_adapter_folder
from mrl.convert.sources import Source, local_folder, open_checkpoint, open_hf
from mrl.engine.atomic_checkpoint import names_checkpoint
from mrl.weights.adapter_folder import base_of, is_adapter
from mrl.weights.mcore_weights import MARKER
from mrl.weights.safetensors_io import main_dtype


def open_any(path: str | Path, *, model: str | None = None, role: str | None = None) -> Source:
    """Opens a Hugging Face folder, an adapter folder over its base (or `model`), or a path for `open_checkpoint`."""
    if names_checkpoint(path):
        return open_checkpoint(path, model=model, role=role)
    place = local_folder(path)
    if (place / "config.json").is_file() and not (place / MARKER).is_file():
        return open_hf(place)
    if is_adapter(place):
        return open_adapter(place, model=model)
    return open_checkpoint(place, model=model, role=role)


def open_adapter(folder: Path, *, model: str | None = None) -> Source:
    """Opens an adapter folder, merged into its base, in the base's dtype. model: the base, if it lies elsewhere."""
    base = local_folder(model or base_of(folder))
    with open_any(base) as plain:
        dtype = main_dtype(plain.reader.tensors)
        hf_config, family = plain.hf_config, plain.family
    reader = merge_adapter_folder(folder, str(base), family, hf_config, dtype)
    what = f"adapters over {base}"
    return Source(folder, what, reader, hf_config, family, reader.head, base, None, {})
