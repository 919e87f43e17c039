"""The tensors of a model's files and the state of its transformers module, for families without a table in mrl.

transformers' conversion mapping, read in both directions, gives the names. It also converts: files hold experts one by
one, and the module holds them in one tensor. Every tensor of the files is accounted for, as with a table. Memory holds
the tensors of one conversion at a time.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from mrl.errors import ModelError
from mrl.weights.accounting import SCORE, account, equal_tensors, follows_from_config
from mrl.weights.algebra import Shape
from mrl.weights.safetensors_io import DTYPES, SafetensorsReader, TensorInfo


@dataclasses.dataclass(frozen=True)
class FolderNames:
    """Holds a folder's names for the tensors of a model, and the tensors that the model does not have.

    Tensors without a name here have the one that transformers writes.
    """

    whole: Mapping[str, str] = dataclasses.field(default_factory=dict)  # parameter or buffer -> its one tensor
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # name that transformers writes -> the folder's
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)  # tied tensor -> the tensor that it equals
    carried: Mapping[str, TensorInfo] = dataclasses.field(default_factory=dict)  # the model's class ignores these


class ModelFiles:
    """Knows the files of a model that transformers builds. hf: it, on the meta device. head: "lm" or "value".

    shapes: of every tensor in the files that transformers would write, by name, in model order. names: those of the
    model's own folder; tensors are written under them.
    """

    def __init__(self, hf: nn.Module, head: str) -> None:
        self.hf, self.head, self.names = hf, head, FolderNames()
        # `revert_weight_conversion` does the same for a model that was not loaded (transformers 5.23,
        # core_model_loading.py): a PrefixChange would add a prefix that the files may not have.
        hf._weight_conversions = [
            conversion
            for conversion in get_model_conversion_mapping(hf, add_legacy=False)
            if not isinstance(conversion, PrefixChange)
        ]
        whole = hf.state_dict(keep_vars=True)
        kept = {id(p): name for name, p in (*hf.named_parameters(), *hf.named_buffers())}
        self.state = {name: t for name, t in whole.items() if kept[id(t)] == name}
        self.copies = {name: kept[id(t)] for name, t in whole.items() if kept[id(t)] != name}
        # of tied tensors transformers saves one, and not always the first
        tied = hf.all_tied_weights_keys
        self._saved = {of: name for name, of in self.copies.items() if of in tied and name not in tied}
        output = hf.get_output_embeddings()
        self.score = next((n for n, p in hf.named_parameters() if head == "value" and p is output.weight), None)
        meta = {name: torch.empty(t.shape, device="meta", dtype=t.dtype) for name, t in self.state.items()}
        self._names: dict[str, list[str]] = {}
        self.shapes: dict[str, Shape] = {}
        for group in self.groups():
            made = dict(self.written({name: meta[name] for name in group}))
            self.shapes |= {name: tuple(t.shape) for name, t in made.items()}
            for name in group:
                self._names[name] = list(made)
        self._meta = {name: meta[self.copies.get(name, name)] for name in whole}

    def groups(self) -> list[list[str]]:
        """Returns the names of parameters and buffers, grouped by the conversion that writes them."""
        reverse = [conversion.reverse_transform() for conversion in self.hf._weight_conversions[::-1]]
        converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
        groups: dict[str, list[str]] = {}
        for name in self.state:
            renamed, pattern = apply_converters(name, converters)
            alone = pattern is None or name in self.names.whole
            groups.setdefault(f"={name}" if alone else renamed, []).append(name)
        return list(groups.values())

    def written(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields (file name, tensor) of one of `groups`. Raises ModelError if transformers cannot convert it."""
        if self.score is not None and self.score in tensors:
            yield SCORE, tensors[self.score]
            return
        if tensors.keys() <= self.names.whole.keys():
            yield from ((self.names.whole[name], tensor) for name, tensor in tensors.items())
            return
        try:
            made = revert_weight_conversion(self.hf, {self._saved.get(n, n): t for n, t in tensors.items()})
            yield from ((self.names.parts.get(name, name), tensor) for name, tensor in made.items())
        except Exception as error:  # transformers has no common class for what its conversions raise
            raise ModelError(self._refused(list(tensors), error)) from error

    def _refused(self, names: Sequence[str], error: BaseException) -> str:
        return (
            f"config.json: model_type {self.hf.config.model_type!r}: transformers does not convert {names[0]} "
            f"({str(error)[:200]}), so that backend fsdp cannot carry it; use another model"
        )

    @contextlib.contextmanager
    def opened(self, path: str, *, trained: bool) -> Iterator[StoredFolder]:
        """Gives the weights of the folder `path`, all accounted for. trained: a missing value head starts at zero."""
        with SafetensorsReader(path) as reader:
            yield StoredFolder(self, reader, may_lack=[SCORE] if self.head == "value" and trained else [])


class StoredFolder:
    """Reads a Hugging Face folder's weights by the module's names. Raises ModelError with all differences."""

    def __init__(self, files: ModelFiles, reader: SafetensorsReader, *, may_lack: Sequence[str]) -> None:
        self.files, self.reader = files, reader
        mapping = get_model_conversion_mapping(files.hf)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        prefix = files.hf.base_model_prefix
        for key in sorted(reader.tensors, key=dot_natural_key):
            if files.score is not None and key == SCORE:
                self._sources[files.score] = [(key, None)]
                continue
            name, pattern = rename_source_key(key, renamings, self._converters, prefix, files._meta)
            for plain in (key, key.removeprefix("text_model.")):  # transformers knows this prefix of emu3's not
                if name not in files._meta and plain in files._meta:
                    name, pattern = plain, None
            if name in files._meta and name != files.score:
                self._sources.setdefault(name, []).append((key, pattern))
        self._by_others = dict(self._made_with_others())
        self.names, absent = self._account(may_lack)
        self._zeros = {files.score} if absent else set()

    def _made_with_others(self) -> Iterator[tuple[str, str]]:
        """Yields (state, name of another state), if the conversion of the other makes both."""
        for name, sources in self._sources.items():
            if sources[0][1] is not None and len(self._converter(sources[0][1]).target_patterns) > 1:
                for made in self._convert(name, lambda key: torch.empty(self.reader.tensors[key].shape, device="meta")):
                    if made != name:
                        yield made, name

    def _account(self, may_lack: Sequence[str]) -> tuple[FolderNames, list[str]]:
        """Compares the folder's tensors with the model's. Returns the folder's names, and those of `may_lack` that are
        absent."""
        files, found, expected = self.files, dict(self.reader.tensors), dict(self.files.shapes)
        copies = self._copies()
        whole: dict[str, str] = {}
        parts: dict[str, str] = {}
        for name, sources in self._sources.items():
            keys, written = [key for key, _ in sources], files._names[name]
            if sources[0][1] is not None:
                parts |= _behind_prefixes(written, keys)
            elif len(keys) == 1:
                whole[name] = keys[0]
                for lost in written:
                    expected.pop(lost, None)
        for name, key in whole.items():
            expected[key] = tuple(files.state[name].shape)
            if not files.state[name].is_floating_point() and DTYPES.get(found[key].dtype) == files.state[name].dtype:
                found[key] = dataclasses.replace(found[key], dtype="F32")  # a buffer of whole numbers is read as it is
        found |= {name: found.pop(key) for name, key in parts.items()}
        unread = set(copies)
        if files.head == "value":
            output = {files.score} & files._meta.keys()  # the output layer that a value head replaces
            unread |= {key for key in found if {key, key.removesuffix("bias") + "weight"} & output}
        left = [key for key in found if key not in expected and key not in unread]
        carried = self._carried(left)
        absent = account(found, expected, where=str(self.reader.path), may_lack=may_lack, may_have=unread | carried)
        return FolderNames(whole, parts, copies, {key: found[key] for key in left}), absent

    def _carried(self, keys: Sequence[str]) -> set[str]:
        """Returns those of `keys` that an export holds unchanged. The model reads none of `keys`."""
        taken = {key for sources in self._sources.values() for key, _ in sources}  # two names of one are no carrying
        free = [key for key in keys if key not in taken]
        known = _known_to(self.files.hf, free) | {key for key in free if follows_from_config(key)}
        others = [key for key in free if key not in known]
        return known | self._of_text_and_more(others) if others else known

    def _of_text_and_more(self, keys: Sequence[str]) -> set[str]:
        """Returns those of `keys` that the folder's class has, if the model is its text part."""
        config = AutoConfig.from_pretrained(self.reader.path, trust_remote_code=False)
        kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
        if kind is None or isinstance(self.files.hf, kind):
            return set()
        with torch.device("meta"):
            more = kind._from_config(config)
        return _known_to(more, keys)

    def _copies(self) -> dict[str, str]:
        """Returns the keys of tied tensors, each with the key of its original.

        Raises ModelError unless both have the same bits.
        """
        copies = {}
        for name, of in self.files.copies.items():
            for key, pattern in self._sources.pop(name, ()):
                if of not in self._sources:
                    self._sources[of] = [(key, pattern)]
                    continue
                (source, _), *_ = self._sources[of]
                if not equal_tensors(self.reader, key, source):
                    raise ModelError(
                        self.reader.path,
                        why=f"{key} differs from {source} though config.json ties them",
                        fix=f"set tie_word_embeddings to false or remove {key}",
                    )
                copies[key] = source
        return copies

    def __call__(self, name: str, start: int, stop: int) -> Tensor:
        """Reads rows `start` to `stop` of dimension 0 of a parameter or buffer, and no more than a conversion takes."""
        shape = self.files.state[name].shape
        if name in self._zeros:
            return torch.zeros(stop - start, *shape[1:])
        first = self._by_others.get(name, name)
        ((key, pattern), *_) = self._sources[first]
        if pattern is None:
            return self.reader(key)[start:stop] if shape else self.reader(key)[()]
        return self._convert(first, lambda key: self.reader(key)[()])[name][start:stop]

    def _converter(self, pattern: str | None) -> WeightConverter:
        return next(entry for entry in self._converters if pattern in entry.source_patterns)

    def _convert(self, name: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Converts the tensors of the files that go to `name`. Returns the results by name."""
        sources = self._sources[name]
        converter = copy.deepcopy(self._converter(sources[0][1]))
        for key, pattern in sources:
            converter.add_tensor(name, key, pattern, lambda key=key: read(key))
        try:
            made = converter.convert(name, model=self.files.hf, config=self.files.hf.config)
        except Exception as error:  # as in `written`
            raise ModelError(self.files._refused([name], error)) from error
        return {to: found[0] if isinstance(found, list) else found for to, found in made.items()}


def _known_to(hf: nn.Module, keys: Iterable[str]) -> set[str]:
    """Returns the tensors of a folder that the class of `hf` loads or declares to ignore."""
    mapping, meta = get_model_conversion_mapping(hf), hf.state_dict()
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    ignored = [re.compile(pattern) for pattern in hf._keys_to_ignore_on_load_unexpected or ()]
    known = set()
    for key in keys:
        name, _ = rename_source_key(key, renamings, converters, hf.base_model_prefix, meta)
        if name in meta or any(pattern.search(key) for pattern in ignored):
            known.add(key)
    return known


def _behind_prefixes(names: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """Returns name -> key if `names` and `keys` differ in a prefix alone; else {}."""
    of_names, of_keys = os.path.commonprefix(names), os.path.commonprefix(keys)
    by_rest = {key.removeprefix(of_keys): key for key in keys}
    if by_rest.keys() != {name.removeprefix(of_names) for name in names}:
        return {}
    return {name: by_rest[name.removeprefix(of_names)] for name in names}
