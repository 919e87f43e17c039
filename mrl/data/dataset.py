"""The rows of data.train or data.eval as token sequences, one at a time, by index."""

from __future__ import annotations

import abc
import copy
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from mrl.config.ppo import PromptsConfig
from mrl.config.schema import DataConfig
from mrl.data.encode import NO_TEMPLATE, Encoded, Encoder
from mrl.data.files import BadRow
from mrl.data.formats import check_columns, detect_format, parse_row, rename_fields
from mrl.data.rows import Part, open_rows
from mrl.data.tokenizer import check_chat_template, read_chat_template
from mrl.errors import DataError, UserError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Example:
    """A row that trains: at most `max_length` ids, and 1 in `mask` for each that trains (not shifted)."""

    ids: list[int]
    mask: list[int]
    truncated: bool


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A row left out: a bad one under `on_bad_row: skip`, or a long one under `truncation: drop`."""

    outcome: Literal["skipped", "dropped"]
    why: str


class RowDataset(abc.ABC, Generic[T]):
    """Random access to rows of data.train or data.eval as a `T`, which has a flag `truncated`; holds no row in memory.

    Raises DataError on construction where the data cannot be used at all (missing, empty, no form fits, a
    conversation without a chat template). vocab_size: the model's, which no token id may reach. `load` may be called from several threads; the tokenizer is copied.
    """

    def __init__(
        self,
        config: DataConfig | PromptsConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        part: Part = "train",
        vocab_size: int | None = None,
    ) -> None:
        path = config.train if part == "train" else config.eval
        if path is None:
            raise DataError("data.eval: is null; name the rows to evaluate on")
        self.config, self.path, self.part, self.vocab_size = config, path, part, vocab_size
        check_columns(config.columns)
        tokenizer = copy.deepcopy(tokenizer)  # a fast tokenizer must not be used by two threads at once
        if config.chat_template is not None:
            tokenizer.chat_template = read_chat_template(config.chat_template)
            check_chat_template(tokenizer)
        self._lock = threading.Lock()
        self._rows = open_rows(path, split=config.split, part=part)
        self._begin(tokenizer)

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        """`file:line` of a row, or `file:row N`."""
        return self._rows.where(index)

    def fingerprint(self) -> list[dict[str, Any]]:
        """What the data is: {"name", "rows", "size", "hash"} of each file."""
        return self._rows.fingerprint()

    def load(self, index: int) -> T | Rejected:
        """The row in tokens. Raises DataError with its file and line where `on_bad_row` or `truncation` say so."""
        try:
            with self._lock:
                return self._make(index, self._row(index))
        except BadRow as e:
            why = f"{self.where(index)}: {e}"
            if self.config.on_bad_row == "skip":
                return Rejected("skipped", why)
            raise DataError(why) from e
        except UserError as e:  # the template's or tokenizer's fault, or a row that is too long: not the row's to skip
            raise type(e)(f"{self.where(index)}: {e}") from e

    @abc.abstractmethod
    def _begin(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """The rest of the construction, with a tokenizer of its own and the rows open."""

    @abc.abstractmethod
    def _make(self, index: int, row: dict[str, Any]) -> T | Rejected:
        """What the row becomes. Raises BadRow, or another UserError, without file and line."""

    def _row(self, index: int) -> dict[str, Any]:
        return rename_fields(self._rows[index], self.config.columns)

    def _check_vocabulary(self, ids: list[int]) -> None:
        if self.vocab_size is not None and max(ids, default=0) >= self.vocab_size:
            raise DataError(
                f"the tokenizer gives token {max(ids)}, and the model's config.json has vocab_size {self.vocab_size}; "
                "use the tokenizer that belongs to the model"
            )

    def _detect(self, form_of: Callable[[dict[str, Any]], str]) -> str:
        """The form of the first row that can be read."""
        for index in range(len(self)):
            try:
                row = self._row(index)
            except BadRow as e:
                if self.config.on_bad_row == "skip":
                    continue
                raise DataError(f"{self.where(index)}: {e}") from e
            try:
                return form_of(row)
            except DataError as e:
                raise DataError(f"{self.where(index)}: {e}") from None
        raise DataError(
            f"data.{self.part}: {self.path}: none of its {len(self)} rows can be read; check the first with head"
        )


class SFTDataset(RowDataset[Example]):
    """Rows that train, as `Example`s."""

    config: DataConfig

    def _begin(self, tokenizer: PreTrainedTokenizerBase) -> None:
        config = self.config
        self._encoder = Encoder(tokenizer, config.loss_on)
        self.format = config.format if config.format != "auto" else self._detect(detect_format)
        if self.format == "messages" and tokenizer.chat_template is None:
            raise DataError(f"data.{self.part}: {self.path}: {NO_TEMPLATE}")
        if self.format in ("text", "tokenized") and config.loss_on == "last":
            raise DataError(f"data.loss_on: 'last', but {self.format} rows have no turns; set assistant or all")

    def _make(self, index: int, row: dict[str, Any]) -> Example | Rejected:
        return self._fit(index, self._encoder.encode(parse_row(row, self.format)))

    def _fit(self, index: int, encoded: Encoded) -> Example | Rejected:
        """The sequence within max_length, by the truncation policy."""
        ids, mask, limit = encoded.ids, encoded.mask, self.config.max_length
        self._check_vocabulary(ids)
        too_long = len(ids) > limit
        if too_long:
            what = f"the row has {len(ids)} tokens and data.max_length is {limit}"
            match self.config.truncation:
                case "error":
                    raise DataError(f"{what}; raise data.max_length, or set data.truncation to right, left or drop")
                case "drop":
                    return Rejected("dropped", f"{self.where(index)}: {what}")
                case "right":
                    ids, mask = ids[:limit], mask[:limit]
                case "left":
                    ids, mask = ids[-limit:], mask[-limit:]
        if not any(mask[1:]):  # nothing precedes the first token, so it never trains
            if too_long and any(encoded.mask[1:]):
                raise BadRow(
                    f"has nothing to train on: truncation {self.config.truncation} to {limit} of {len(encoded.ids)} tokens "
                    "cut all that trains; raise data.max_length, or set data.truncation to drop"
                )
            raise BadRow(
                f"has nothing to train on: none of its {len(ids)} tokens trains (the first never does); remove the row"
            )
        return Example(ids, mask, too_long)
