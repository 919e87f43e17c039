"""The rows of data.train or data.eval as token sequences, one at a time, by index."""

from __future__ import annotations

import copy
import dataclasses
import threading
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from mrl.config.schema import DataConfig
from mrl.data.encode import NO_TEMPLATE, Encoded, Encoder
from mrl.data.files import BadRow
from mrl.data.formats import check_columns, detect_format, parse_row, rename_fields
from mrl.data.rows import Part, open_rows
from mrl.data.tokenizer import check_chat_template, read_chat_template
from mrl.errors import DataError, UserError


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


class SFTDataset:
    """Random access to tokenized rows; holds no row in memory.

    Raises DataError on construction where the data cannot be used at all (missing, empty, no format fits, a
    conversation without a chat template). vocab_size: the model's, which no token id may reach. `load` may be called from several threads; the tokenizer is copied.
    """

    def __init__(
        self,
        config: DataConfig,
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
        self._encoder = Encoder(tokenizer, config.loss_on)
        self.format = config.format if config.format != "auto" else self._detect()
        if self.format == "messages" and tokenizer.chat_template is None:
            raise DataError(f"data.{part}: {path}: {NO_TEMPLATE}")
        if self.format in ("text", "tokenized") and config.loss_on == "last":
            raise DataError(f"data.loss_on: 'last', but {self.format} rows have no turns; set assistant or all")

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        """`file:line` of a row, or `file:row N`."""
        return self._rows.where(index)

    def fingerprint(self) -> list[dict[str, Any]]:
        """What the data is: {"name", "rows", "size", "hash"} of each file."""
        return self._rows.fingerprint()

    def load(self, index: int) -> Example | Rejected:
        """The row in tokens. Raises DataError with its file and line where `on_bad_row` or `truncation` say so."""
        try:
            with self._lock:
                encoded = self._encoder.encode(parse_row(self._row(index), self.format))
                return self._fit(index, encoded)
        except BadRow as e:
            why = f"{self.where(index)}: {e}"
            if self.config.on_bad_row == "skip":
                return Rejected("skipped", why)
            raise DataError(why) from e
        except UserError as e:  # the template's or tokenizer's fault, or a row that is too long: not the row's to skip
            raise type(e)(f"{self.where(index)}: {e}") from e

    def _row(self, index: int) -> dict[str, Any]:
        return rename_fields(self._rows[index], self.config.columns)

    def _fit(self, index: int, encoded: Encoded) -> Example | Rejected:
        """The sequence within max_length, by the truncation policy."""
        ids, mask, limit = encoded.ids, encoded.mask, self.config.max_length
        if self.vocab_size is not None and max(ids, default=0) >= self.vocab_size:
            raise DataError(
                f"the tokenizer gives token {max(ids)}, and the model's config.json has vocab_size {self.vocab_size}; "
                "use the tokenizer that belongs to the model"
            )
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

    def _detect(self) -> str:
        """The format of the first row that can be read."""
        for index in range(len(self)):
            try:
                row = self._row(index)
            except BadRow as e:
                if self.config.on_bad_row == "skip":
                    continue
                raise DataError(f"{self.where(index)}: {e}") from e
            try:
                return detect_format(row)
            except DataError as e:
                raise DataError(f"{self.where(index)}: {e}") from None
        raise DataError(
            f"data.{self.part}: {self.path}: none of its {len(self)} rows can be read; check the first with head"
        )
