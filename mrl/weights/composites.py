"""Describes models of text and more by the table of their text part, which alone is read and trained.

Their files have the text part's names under another prefix, and a layer's experts stacked, or one by one as
transformers saves them. Tensors of the other parts are carried: exports hold them unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mrl.weights.json_file import read_json
from mrl.weights.quantized import dequantise
from mrl.weights.safetensors_io import INDEX, SINGLE, SafetensorsReader, Slice, TensorInfo, WeightReader
from mrl.weights.table import Family, Stack

COMPOSITES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""The `model_type` of each composite, and that of its text part, which is the name of a table."""
_PREFIX = "model.language_model."
CARRIED = "carried"
"""The folder of carried tensors in what `mrl convert import` writes."""
SOURCE = "source.json"
"""The layout of the Hugging Face folder that `mrl convert import` read, in its output. It has `files` with names,
dtypes and shapes, `metadata` and `index` (null if it was laid out in another way than ours), and
`copies`: names of tensors that repeat another one."""


def composite(text: Family, model_type: str) -> Family:
    """Returns the table of the composite `model_type` with this text part, for files as they are published."""
    carries = (*text.carries, "model.visual.")
    return dataclasses.replace(text, model_type=model_type, stacks=_stacks(text), prefix=_PREFIX, carries=carries)


def _stacks(family: Family) -> tuple[Stack, ...]:
    return tuple(
        Stack(
            f"model.layers.{{l}}.mlp.experts.{'down_proj' if entry.kind == 'row' else 'gate_up_proj'}",
            tuple(name for name, _ in entry.hf),
            interleaved=False,
        )
        for entry in family.sparse
        if entry.of_expert
    )


def text_fields(whole: Any) -> dict[str, Any]:
    """Returns the fields of a composite's text part, with those of the whole that none of its parts knows.

    whole: transformers' config. Whether embeddings are tied is the text part's, as in AutoModelForCausalLM.
    """
    fields, known = whole.to_dict(), type(whole)().to_dict()
    more = {name: value for name, value in fields.items() if name not in known}
    text, of_whole = fields["text_config"], ("model_type", "architectures", "id2label", "label2id")
    own = {name: fields[name] for name in of_whole if name in fields}
    return more | text | own | {"dtype": text.get("dtype") or fields.get("dtype")}


def as_stored_in(folder: str | Path, family: Family) -> Family:
    """Returns `family` with the names of the model folder, if it is a composite's or its text part's.

    transformers keeps the prefix where it saves the text part of a composite alone.
    """
    names = tensor_names(folder) if family.model_type in {*COMPOSITES, *COMPOSITES.values()} else set()
    if not names:
        return family
    prefix = _PREFIX if f"{_PREFIX}embed_tokens.weight" in names else "model."
    family = dataclasses.replace(family, prefix=prefix)
    stacks = [stack for stack in _stacks(family) if family.in_files(stack.stored.format(l=0)) in names]
    return dataclasses.replace(family, stacks=tuple(stacks))


def tensor_names(folder: str | Path) -> set[str]:
    """Returns the names of tensors in a Hugging Face folder, or in the one that `mrl convert import` read."""
    place = Path(folder)
    if (place / SOURCE).is_file():
        about = read_json(place / SOURCE)
        return {name for tensors in (about["files"] or {}).values() for name, *_ in tensors} | set(about["copies"])
    if not any((place / name).is_file() for name in (SINGLE, INDEX)):
        return set()
    with SafetensorsReader(place) as reader:
        return set(reader.tensors)


class CarriedReader:
    """Reads the tensors of a model folder, Hugging Face or imported, that its family carries: a `WeightReader`.

    names: those to read in place of these.
    """

    def __init__(self, folder: str | Path, family: Family | None, names: Collection[str] = ()) -> None:
        self.path = Path(folder)
        place = self.path / CARRIED if (self.path / SOURCE).is_file() else self.path
        self._reader: WeightReader | None = None
        self.tensors: Mapping[str, TensorInfo] = {}
        carries = names or (family is not None and family.carries)
        if carries and any((place / name).is_file() for name in (SINGLE, INDEX)):
            self._reader = dequantise(SafetensorsReader(place))
            found = self._reader.tensors
            chosen = names if family is None else family.carried(found)
            self.tensors = {name: found[name] for name in found if name in chosen}

    def __call__(self, name: str) -> Slice:
        assert self._reader is not None, f"{self.path}: {name} is not carried"
        return self._reader(name)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
