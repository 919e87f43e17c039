"""The keys of `data` that every command on rows has, and what their help says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

from mrl.config.fields import REQUIRED, key
from mrl.config.sources import (
    BUFFER_HELP,
    FORMS,
    MOST_BUFFERED,
    SHUFFLE_BUFFER,
    STREAM_HELP,
    TEMPLATE_HELP,
    TURNS_HELP,
    Share,
    Source,
    eval_of,
    markers,
    train_of,
)

TRAIN_HELP = f"training rows: {FORMS}; or a list of sources to mix (docs/data-sources.md)"
EVAL_HELP = "evaluation rows in the same forms, or a mapping of names to sources, each with its own loss"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """The source of rows and their order: keys of `data` in every command on rows."""

    train: str | tuple[Share, ...] = key(REQUIRED, f"training rows: {FORMS}", moves=True, parse=train_of(Share))
    eval: str | Mapping[str, Source] | None = key(
        None, "evaluation rows, in the same forms", may_change=True, parse=eval_of(Source)
    )
    mix_by: Literal["rows", "tokens"] = key(
        "rows", "what the weights of data.train's sources are shares of", may_change=True
    )
    split: str | None = key(
        None, "split of a `datasets` folder or hub id; default train (and test or validation for eval)"
    )
    columns: dict[str, str] = key(dict, "rename fields before a row is read, as {question: prompt, answer: completion}")
    turns: Mapping[str, str] = key(dict, TURNS_HELP, parse=markers)
    chat_template: str | None = key(None, TEMPLATE_HELP)
    packing: bool = key(
        True, "pack sequences end to end without padding (best fit under the micro-batch's token budget); false pads"
    )
    shuffle: bool = key(True, "a new order each epoch, a function of (seed, epoch)")
    on_bad_row: Literal["stop", "skip"] = key(
        "stop",
        "a row that cannot be read stops the run with file and line, or is skipped, counted and reported",
        may_change=True,
    )


def sources_of(data: RowsConfig) -> Iterator[tuple[str, Source]]:
    """Yields the sources of data.train and data.eval, with their keys. One that is a plain path is none."""
    if not isinstance(data.train, str):
        for i, share in enumerate(data.train):
            yield f"data.train[{i}]", share
    if isinstance(data.eval, Mapping):
        for name, source in data.eval.items():
            yield f"data.eval.{name}", source


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamedRowsConfig(RowsConfig):
    """Rows that may be read while training, and conversations with a system message."""

    stream: bool = key(False, STREAM_HELP)
    shuffle_buffer: int | None = key(None, BUFFER_HELP, minimum=0, maximum=MOST_BUFFERED)
    system: str | None = key(None, "text of a system message before conversations that have none")

    @property
    def resolved_shuffle_buffer(self) -> int:
        """The number of rows that are shuffled together, 0 without shuffling."""
        if not self.shuffle:
            return 0
        return SHUFFLE_BUFFER if self.shuffle_buffer is None else self.shuffle_buffer
