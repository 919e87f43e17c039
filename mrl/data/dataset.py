"""The rows of data.train or data.eval as token sequences, one at a time, by index."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mrl.config.dpo import PreferenceDataConfig
from mrl.config.keys import join_names
from mrl.config.ppo import PromptsConfig
from mrl.config.rm import ScoredDataConfig
from mrl.config.schema import DataConfig
from mrl.config.sources import LossOn
from mrl.config.urls import shown_url
from mrl.data.dialogue import looks_like_dialogue, split_turns
from mrl.data.encode import NO_TEMPLATE, Encoder, check_system
from mrl.data.files import BadRow, row_error
from mrl.data.formats import (
    Chat,
    Pair,
    Question,
    Text,
    Tokens,
    check_columns,
    detect_format,
    parse_row,
    rename_fields,
    row_weight,
)
from mrl.data.left_out import left_out
from mrl.data.rows import Part, Rows, open_rows, open_stream
from mrl.data.splits import NamedFiles
from mrl.data.streamed import MAX_INDEX, Cursor, Exchange, Order, StreamedRows, one_process_exchange
from mrl.data.tokenizer import use_chat_template
from mrl.data.vision import ImageRow, Vision, check_text_alone
from mrl.errors import DataError, UserError, show


class TrackedRow(dict[str, Any]):
    """A row whose fields are read by name. `row | {...}` is a row that notes them in the same place."""

    def __init__(self, row: dict[str, Any], read: set[str] | None = None) -> None:
        super().__init__(row)
        self.read: set[str] = set() if read is None else read

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __or__(self, other: Any) -> TrackedRow:  # type: ignore[override]  # rows have one type of key
        return TrackedRow({**dict(self.items()), **other}, self.read)


class LoadedRow(Protocol):
    """A row in tokens."""

    @property
    def truncated(self) -> bool: ...


AnyRowsConfig = DataConfig | PromptsConfig | PreferenceDataConfig | ScoredDataConfig
T = TypeVar("T", bound=LoadedRow)
Made = TypeVar("Made")

ROWS_WITH_NOTES = 64
"""The first rows, which are rendered with and without each field at the start."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A row that trains."""

    ids: list[int]  # at most `max_length`
    mask: Sequence[float]  # the weight of each id in the loss, 0 where it does not train (not shifted)
    truncated: bool
    multi_modal_inputs: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """What its images are to the model, as `Batch` has it of one sequence."""
    teacher: int = 0  # the number of the one that it learns from


@dataclasses.dataclass(frozen=True)
class RejectedRow:
    """A row left out: a bad one under `on_bad_row: skip`, or a long one under `truncation: drop`."""

    outcome: Literal["skipped", "dropped"]
    why: str


class RowDataset(Generic[T]):
    """Gives random access to rows of data.train or data.eval, each a `T` with a flag `truncated`; holds no row in
    memory.

    Streamed rows are not counted, and only the last ones (`take`) can be loaded.

    Raises DataError on construction if the data cannot be used at all (missing, empty, no form fits, a conversation
    without a chat template). vocab_size: the model's; token ids are below it. `load` may be called from several
    threads; the tokenizer is copied.
    """

    split_is_of: Part = "train"  # the rows that data.split is of; the others have the defaults

    def __init__(
        self,
        config: AnyRowsConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        part: Part = "train",
        vocab_size: int | None = None,
        exchange: Exchange = one_process_exchange,
    ) -> None:
        path = config.train if part == "train" else config.eval
        if path is None:
            raise DataError("data.eval", why="is null", fix="name the rows to evaluate on")
        assert isinstance(path, str), f"data.{part} is {path}, and a dataset is of one path"
        self.config, self.part, self.vocab_size = config, part, vocab_size
        self.path = shown_url(path)
        check_columns(config.columns)
        tokenizer = copy.deepcopy(tokenizer)  # a fast tokenizer must not be used by two threads at once
        if config.chat_template is not None:
            use_chat_template(tokenizer, config.chat_template)
        self._has_template = tokenizer.chat_template is not None
        self._lock = threading.Lock()
        self._rows: Rows | StreamedRows
        self._exchange: Exchange
        if part == "train" and not isinstance(config, PromptsConfig) and config.stream:
            buffer = config.resolved_shuffle_buffer
            self._rows = open_stream(path, split=config.split, buffer=buffer, exchange=exchange)
            self._exchange = exchange
        else:
            self._exchange = one_process_exchange  # every process reads all rows itself
            split = config.split if part == self.split_is_of else None
            self._rows = open_rows(path, split=split, part=part)
        self._begin(tokenizer)

    def __len__(self) -> int:
        assert isinstance(self._rows, Rows), "the number of rows that are streamed is not known"
        return len(self._rows)

    @property
    def is_streamed(self) -> bool:
        """Whether rows are read while training, so that their number is not known."""
        return isinstance(self._rows, StreamedRows)

    @property
    def size(self) -> str:
        """The number of rows in words."""
        return "streamed rows" if self.is_streamed else f"{len(self)} rows"

    @property
    def indices(self) -> int:
        """One more than the largest index of a row."""
        return MAX_INDEX if self.is_streamed else len(self)

    def take(self, at: Cursor, order: Order) -> tuple[int, Cursor]:
        """Returns the index of a streamed row, and the position after it; see `StreamedRows.take`."""
        assert isinstance(self._rows, StreamedRows), "rows are not streamed"
        return self._rows.take(at, order)

    def end_after(self, epochs: float | None) -> None:
        """Ends the reading ahead of streamed rows after these passes; None for no end."""
        if isinstance(self._rows, StreamedRows):
            self._rows.epochs = epochs

    def leave_out(self, why: str) -> None:
        """Notes a row that this rank leaves out; if rows are streamed, `agree` compares them. why: begins with its file
        and line."""
        self._exchange.leave_out(why)

    def agree(self, error: UserError | None) -> None:
        """Raises the error of this rank. If rows are streamed, ranks wait for each other's calls (`Exchange.agree`).
        Then an error of one is raised on all, and so is an error if ranks have left out different rows."""
        self._exchange.agree(error)

    def agree_on(self, make: Callable[[], Made]) -> Made:
        """Returns what `make` does, or raises its error as `agree` does."""
        made, wrong = None, None
        try:
            made = make()
        except UserError as error:
            wrong = error
        self.agree(wrong)
        assert made is not None, "an error is raised by those who agree on it"
        return made

    def close(self) -> None:
        """Ends reading ahead of rows that are streamed."""
        if isinstance(self._rows, StreamedRows):
            self._rows.close()

    def where(self, index: int) -> str:
        """Returns `file:line` of a row, or `file:row N`."""
        return self._rows.where(index)

    def tokens_of(self, item: T) -> int:
        """Returns the tokens of a row, trained or not; of rows that can be mixed."""
        raise AssertionError(f"rows of a {type(self).__name__} are not mixed")

    def encoders(self) -> list[Encoder]:
        """Returns the encoders of rows that are conversations; none if no turns are generated."""
        return []

    @property
    def named_files(self) -> list[NamedFiles]:
        """The files of the rows, by the path that stands for them."""
        return [self._rows.named]

    def fingerprint(self) -> list[dict[str, Any]]:
        """Identifies the data by {"name", "rows", "size", "hash"} of each file."""
        return self._rows.fingerprint()

    def load(self, index: int) -> T | RejectedRow:
        """Returns the row in tokens. Raises DataError with file and line where `on_bad_row` or `truncation` say so."""
        try:
            with self._lock:
                return self._make(index, self._row(index))
        except BadRow as e:
            if self.config.on_bad_row == "skip":
                return RejectedRow("skipped", f"{self.where(index)}: {e}")
            raise row_error(self.where(index), e) from e
        except UserError as e:  # the template's or tokenizer's fault, or a row that is too long: not the row's to skip
            raise type(e)(self.where(index), why=str(e)) from e

    @staticmethod
    def _form_of(row: dict[str, Any]) -> str:
        """Returns the form that a row has by its fields. Raises DataError."""
        raise NotImplementedError

    def _begin(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Ends the construction, with a tokenizer of its own and the rows open."""
        raise NotImplementedError

    def _make(self, index: int, row: dict[str, Any]) -> T | RejectedRow:
        """Returns the example that a row becomes. Raises BadRow, or another UserError, without file and line."""
        raise NotImplementedError

    def _contents(self, row: dict[str, Any]) -> Sequence[Any]:
        """Returns the conversations and texts of a row. Raises BadRow."""
        raise NotImplementedError

    def _left_out(self, chats: list[tuple[str, Chat]]) -> list[str]:
        """Returns the lines of `left_out` on conversations, each with its place."""
        raise NotImplementedError

    def template_notes(self) -> list[str]:
        """Returns a line for each field of the first rows that the chat template leaves out. Raises DataError."""
        chats: list[tuple[str, Chat]] = []
        for index in itertools.islice(self._rows.head(), ROWS_WITH_NOTES):
            try:
                contents = self._contents(self._row(index))
            except UserError:
                continue  # its own reading says so
            chats += [(self.where(index), one.chat) for one in contents if isinstance(one, Chat | Question | Pair)]
        return self._left_out(chats)

    def _row(self, index: int) -> dict[str, Any]:
        return split_turns(rename_fields(self._rows[index], self.config.columns), self.config.turns)

    def _check_vocabulary(self, ids: list[int]) -> None:
        if self.vocab_size is not None and max(ids, default=0) >= self.vocab_size:
            raise DataError(
                f"the tokenizer gives token {max(ids)}, and the model's config.json has vocab_size {self.vocab_size}; "
                "use the tokenizer that belongs to the model"
            )

    def detected_form(self) -> str:
        """Returns the form of the first readable row; data.format auto goes by it."""
        row, where = self.first_row()
        try:
            return self._form_of(row)
        except DataError as e:
            raise DataError(where, why=str(e)) from None

    def first_rows(self) -> list[tuple[dict[str, Any], str]]:
        """Returns `first_row` of each source."""
        return [self.first_row()]

    def notes(self) -> list[str]:
        """Returns lines on the first rows of each source, for people. Raises as `first_row`."""
        return [*self.unread_fields(), *self._dialogue(), *self.template_notes()]

    def read_first(self) -> None:
        """Reads the first rows of each source as a run does. Raises DataError where one of them stops it."""
        for index in itertools.islice(self._rows.head(), ROWS_WITH_NOTES):
            self.load(index)

    def _dialogue(self) -> list[str]:
        """Returns a line if a text holds a whole conversation: the chat template makes one turn of it."""
        row, where = self.first_row()
        field = looks_like_dialogue(row) if self._has_template else None
        if field is None:
            return []
        return [
            f"{where}: {field} looks like a conversation in one text, and the chat template makes one turn of it; "
            "data.turns makes messages of such texts, data.chat_template=none takes them as they are"
        ]

    def unread_fields(self) -> list[str]:
        """Returns a line on the fields that nothing reads, of the first row of each source. Raises as `first_row`."""
        index, row = self.agree_on(self._first_row)
        noted = TrackedRow(row)
        try:
            self._make(index, noted)
        except UserError:  # which is said where the row is used
            return []
        unread = [name for name in row if name not in noted.read and not name.endswith("_unused")]
        return [f"{self.where(index)}: nothing reads its fields {join_names(unread)}"] if unread else []

    def first_row(self) -> tuple[dict[str, Any], str]:
        """Returns the first row that can be read, and its `file:line`. Raises DataError where there is none, and what
        `agree` raises."""
        index, row = self.agree_on(self._first_row)
        return row, self.where(index)

    def _first_row(self) -> tuple[int, dict[str, Any]]:
        tried = []
        for index in self._rows.head():
            tried.append(index)
            try:
                return index, self._row(index)
            except BadRow as e:
                if self.config.on_bad_row == "stop":
                    raise row_error(self.where(index), e) from e
                self.leave_out(f"{self.where(index)}: {e}")
        size = f"first {len(tried)} rows" if self.is_streamed else self.size
        why = f"{self.path}: none of its {size} can be read"
        raise DataError(f"data.{self.part}", why=why, fix="check the first with head")


class EncodedRows(RowDataset[T]):
    """Reads rows whose tokens an `Encoder` makes."""

    config: DataConfig | PreferenceDataConfig | ScoredDataConfig
    _vision: Vision | None = None  # of the model if it reads images

    def _make_encoder(self, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn, *, as_rendered: bool = False) -> None:
        """Makes the encoder, and finds the format of the rows."""
        if self._vision is not None and self.config.chat_template is None:
            self._vision.give_template(tokenizer)
        self._encoder = Encoder(tokenizer, loss_on, self.config.system, as_rendered=as_rendered)
        self.format = self.config.format if self.config.format != "auto" else self.detected_form()

    def _encoded(self, index: int, content: Chat | Pair | Text | Tokens) -> ImageRow:
        """Returns a row in tokens with its images. Raises BadRow, and DataError for a model that reads text alone."""
        if self._vision is None:
            check_text_alone(content)
            return ImageRow(self._encoder.encode(content), {})
        images = content.images if isinstance(content, Chat) else ()
        return self._vision.expand(self._encoder.encode(content), images, self._rows.folder(index))

    def _left_out(self, chats: list[tuple[str, Chat]]) -> list[str]:
        return left_out(self._encoder, chats)


class SFTDataset(EncodedRows[Example]):
    """Reads rows that train, as `Example`s.

    vision: of the model if it reads images. teachers: names of all but the first; None without any teacher. Then no
    field of a row names one.
    """

    config: DataConfig

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        part: Part = "train",
        vocab_size: int | None = None,
        vision: Vision | None = None,
        teachers: Sequence[str] | None = None,
        exchange: Exchange = one_process_exchange,
    ) -> None:
        self._teachers = None if teachers is None else list(teachers)
        self._vision = copy.deepcopy(vision)  # it has a tokenizer too
        super().__init__(config, tokenizer, part=part, vocab_size=vocab_size, exchange=exchange)

    def _begin(self, tokenizer: PreTrainedTokenizerBase) -> None:
        config = self.config
        self._make_encoder(tokenizer, config.loss_on)
        if self.format == "messages" and tokenizer.chat_template is None:
            raise DataError(f"data.{self.part}", why=f"{self.path}: {NO_TEMPLATE}")
        if self.format in ("text", "tokenized"):
            if config.loss_on not in ("assistant", "all"):
                why = f"{show(config.loss_on)}, but {self.format} rows have no turns"
                raise DataError("data.loss_on", why=why.replace('"', "'"), fix="set assistant or all")
            if config.system is not None:
                why = f"is set, but {self.format} rows have no turns"
                raise DataError("data.system", why=why, fix="leave it out")
        check_system(config.system, tokenizer)

    def _make(self, index: int, row: dict[str, Any]) -> Example | RejectedRow:
        content, weight = parse_row(row, self.format), row_weight(row)
        fitted = self._fit(index, self._encoded(index, content))
        if isinstance(fitted, RejectedRow):
            return fitted
        if self._teachers is not None:
            teacher = teacher_of(row, self.config.teacher, self._teachers, "teacher.others")
            fitted = dataclasses.replace(fitted, teacher=teacher)
        return fitted if weight == 1 else dataclasses.replace(fitted, mask=[weight * w for w in fitted.mask])

    _form_of = staticmethod(detect_format)

    def encoders(self) -> list[Encoder]:
        trains = isinstance(self.config.loss_on, str) or "assistant" in self.config.loss_on
        return [self._encoder] if trains and self.format not in ("text", "tokenized") else []

    def _contents(self, row: dict[str, Any]) -> Sequence[Any]:
        return [parse_row(row, self.format)]

    def tokens_of(self, item: Example) -> int:
        return len(item.ids)

    def too_long(self, tokens: int) -> str:
        """Returns the message on a row with too many tokens, for data.truncation error."""
        return (
            f"the row has {tokens} tokens and data.max_length is {self.config.max_length}; raise data.max_length, or "
            "set data.truncation to right, left or drop"
        )

    def _fit(self, index: int, row: ImageRow) -> Example | RejectedRow:
        """Returns the sequence within max_length, by the truncation policy."""
        encoded = row.encoded
        ids, mask, limit = encoded.ids, encoded.mask, self.config.max_length
        self._check_vocabulary(ids)
        too_long = len(ids) > limit
        if too_long:
            match self.config.truncation:
                case "error":
                    raise DataError(self.too_long(len(ids)))
                case "drop":
                    return RejectedRow("dropped", f"{self.where(index)}: {self.too_long(len(ids))}")
                case "right":
                    ids, mask = ids[:limit], mask[:limit]
                case "left":
                    ids, mask = ids[-limit:], mask[-limit:]
        if self._vision is not None and self._vision.count(ids[:-1]) != self._vision.count(encoded.ids):
            raise BadRow(
                f"has an image at its end, or one that data.truncation cuts ({len(encoded.ids)} tokens to {limit}); "
                "raise data.max_length, or put the image before an answer"
            )
        if not any(mask[1:]):
            raise BadRow(
                f"has nothing to train on: of its {len(encoded.ids)} tokens {len(ids)} are kept and none trains (the "
                "first never does); raise data.max_length, or remove the row"
            )
        return Example(ids, mask, too_long, row.inputs)


def teacher_of(row: dict[str, Any], of_source: str | None, teachers: Sequence[str], key: str) -> int:
    """Returns the number of a row's teacher, 0 for the first. Raises BadRow.

    of_source: the one of rows that name none. teachers: names of all but the first, given in `key`.
    """
    name = of_source if row.get("teacher") is None else row["teacher"]
    if name is None:
        return 0
    if name not in teachers:
        fix = "give one that it has, or rename the field with data.columns={teacher: teacher_unused}"
        raise BadRow(f"teacher is {name!r:.40}, which {key} has not; {fix}")
    return 1 + teachers.index(name)
