"""The keys of `data` that every command on rows has, and the sources of rows.

`data.train` may be a list of sources, and `data.eval` a mapping:

    data:
      train:
        - {path: math.jsonl, weight: 0.7, epochs: 3}
        - {path: openai/gsm8k:main, weight: 0.3, columns: {question: prompt, answer: completion}}
      eval: {math: math-test.jsonl, gsm8k: {path: openai/gsm8k:main, columns: {question: prompt, answer: completion}}}

A source takes from `data` what it does not give itself.
"""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar

from mrl.config.build import build_section
from mrl.config.fields import REQUIRED, key
from mrl.config.keys import value_kind
from mrl.errors import ConfigError, MistakeCollector

Role = Literal["system", "developer", "user", "assistant", "tool", "function", "ipython"]
LossOn = Literal["assistant", "last", "all"] | tuple[Role, ...]
"""What trains of a conversation."""

FORMS = ".jsonl[.gz|.zst], .parquet, a folder or glob of them, a saved `datasets` folder, or a hub id"
NAME = r"[\w.-]+"
STREAM_HELP = (
    "read the rows while training, in order, from a URL (https, hf, or another of fsspec), a hub id or local files. "
    "Nothing is copied, and train.steps is needed (docs/data-streams.md)"
)
BUFFER_HELP = "with stream: rows that are shuffled together in memory. 0 keeps the order of the files; null is 10000"
PROMPT_END_HELP = (
    'for pairs of whole texts without a prompt: the text that ends the prompt, as in "\\n\\nAssistant:". Its last '
    "occurrence in the common beginning of chosen and rejected counts"
)
TURNS_HELP = (
    'for conversations in one text: the text that begins a turn, by role, as in {user: "\\n\\nHuman:", assistant: '
    '"\\n\\nAssistant:"}. Such texts become messages'
)
RAW_TEXT = "none"
TEMPLATE_HELP = "file with a Jinja chat template that replaces the tokenizer's. none is raw text without a template"
SHUFFLE_BUFFER, MOST_BUFFERED = 10_000, 10_000_000


def own_markers(raw: Any, path: str) -> dict[str, str] | None:
    """Returns the same as `markers`; None if a source has the same as `data`."""
    return None if raw is None else markers(raw, path)


def markers(raw: Any, path: str) -> dict[str, str]:
    """Returns the markers of turns in `data.turns`, by role; {} if it has none."""
    if raw is None or raw == {}:
        return {}
    roles = set(raw) if isinstance(raw, Mapping) else set()
    texts = [text for text in raw.values() if isinstance(text, str) and text.strip()] if roles else []
    if not {"user", "assistant"} <= roles <= set(typing.get_args(Role)) or len(set(texts)) < len(raw):
        fix = 'give a text of its own to user, assistant and others, as {user: "\\n\\nHuman:", assistant: "\\n\\nAI:"}'
        raise ConfigError(path, raw, "does not mark the turns of each role", fix)
    return dict(raw)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Rows at one path, and how they are read; null is as `data` has it."""

    in_words: ClassVar[str] = "paths or mappings"  # for messages: what a list of sources may hold
    path: str = key(REQUIRED, FORMS)
    columns: dict[str, str] | None = key(None, "rename fields before a row is read")
    turns: Mapping[str, str] | None = key(None, "what begins a turn in texts, by role", parse=own_markers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RenderedSource(Source):
    """Rows of conversations. Only the part of a run that reads them renders them."""

    chat_template: str | None = key(None, "file with a Jinja chat template, or none")
    system: str | None = key(None, "text of a system message before conversations that have none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share(Source):
    """Rows at one path, and their share of a mixture."""

    name: str | None = key(None, "its name in metrics and messages; default the last part of its path")
    weight: float | None = key(
        None, "its share of the mixture: weight over the sum of weights. null for all sources: their numbers of rows",
        above=0,
    )  # fmt: skip
    epochs: float | None = key(
        None, "passes over its rows; after them the other sources continue without it", above=0, maximum=1e6
    )
    split: str | None = key(None, "split of a `datasets` folder or hub id")

    @property
    def title(self) -> str:
        """Its name, or one made of the path; "" if none can be made."""
        if self.name is not None:
            return self.name
        path = self.path.partition("?")[0] if "://" in self.path else self.path
        last = os.path.basename(path.rstrip("/"))
        for suffix in (".gz", ".zst", ".jsonl", ".json", ".parquet"):
            last = last.removesuffix(suffix)
        return re.sub(r"[^\w.-]+", "_", last) if re.search(r"\w", last) else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamedShare(Share):
    """Rows at one path, their share of a mixture, and whether they are read while training."""

    stream: bool | None = key(None, STREAM_HELP)
    shuffle_buffer: int | None = key(None, BUFFER_HELP, minimum=0, maximum=MOST_BUFFERED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTSource(RenderedSource):
    """A source of `mrl sft`."""

    format: Literal["auto", "messages", "prompt_completion", "alpaca", "text", "tokenized"] | None = key(
        None, "form of a row"
    )
    loss_on: LossOn | None = key(None, "tokens that train")
    teacher: str | None = key(None, "name in teacher.others of the teacher of its rows")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceSource(RenderedSource):
    """A source of `mrl dpo`."""

    format: Literal["auto", "preference", "unpaired"] | None = key(None, "form of a row")
    prompt_end: str | None = key(None, PROMPT_END_HELP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredSource(RenderedSource):
    """A source of `mrl rm`."""

    format: Literal["auto", "preference", "graded", "steps"] | None = key(None, "form of a row")
    prompt_end: str | None = key(None, PROMPT_END_HELP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTShare(SFTSource, StreamedShare):
    """A source of data.train of `mrl sft`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceShare(PreferenceSource, StreamedShare):
    """A source of data.train of `mrl dpo`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredShare(ScoredSource, StreamedShare):
    """A source of data.train of `mrl rm`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptShare(Share):
    """A source of data.train of `mrl ppo`, whose chat template and system text sampler and reward model have too."""

    teacher: str | None = key(None, "name in reference.others of the teacher of its rows")


S = TypeVar("S", bound=Share)
E = TypeVar("E", bound=Source)


def train_of(of: type[S]) -> Callable[[Any, str], str | tuple[S, ...]]:
    """Returns what reads data.train, whose sources are of the class `of`."""

    def parse(raw: Any, path: str) -> str | tuple[S, ...]:
        if isinstance(raw, str):
            return raw
        if raw is None:
            why, fix = "is missing and has no default", f"give text, or a list of sources (training rows: {FORMS})"
            raise ConfigError(path, why=why, fix=fix)
        if not isinstance(raw, list | tuple):
            fix = "give text, or a list of sources, as in [{path: a.jsonl, weight: 0.7}, {path: b.jsonl, weight: 0.3}]"
            raise ConfigError(path, raw, f"is {value_kind(raw)}", fix)
        if not raw:
            raise ConfigError(path, [], "names no source", "give a path, or a list of sources")
        sources = []
        with MistakeCollector() as mistakes:
            for i, entry in enumerate(raw):
                with mistakes.noted():
                    sources.append(_source(of, entry, f"{path}[{i}]"))
        _check_shares(tuple(sources), path)
        return tuple(sources)

    return parse


def eval_of(of: type[E]) -> Callable[[Any, str], str | dict[str, E] | None]:
    """Returns what reads data.eval, whose sources are of the class `of`."""

    def parse(raw: Any, path: str) -> str | dict[str, E] | None:
        if raw is None or isinstance(raw, str):
            return raw
        if not isinstance(raw, Mapping) or not raw:
            fix = "give text, a mapping of names to sources, as in {math: math.jsonl}, or null"
            raise ConfigError(path, raw, "names no source", fix)
        sources = {}
        with MistakeCollector() as mistakes:
            for name, entry in raw.items():
                with mistakes.noted():
                    _check_name(name, path)
                    sources[name] = _source(of, entry, f"{path}.{name}")
        return sources

    return parse


def _source(of: type[E], raw: Any, path: str) -> E:
    source: E = build_section(of, {"path": raw} if isinstance(raw, str) else raw, path, of)
    if getattr(source, "loss_on", None) == ():
        raise ConfigError(f"{path}.loss_on", [], "names no role", "give roles, as in [assistant, tool], or all")
    return source


def _check_name(name: Any, path: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise ConfigError(path, name, "is no name for metrics", "give letters, digits, _, - and . alone")


def _check_shares(sources: tuple[S, ...], path: str) -> None:
    """Raises ConfigError if names do not tell sources apart, or if only some sources have weights."""
    titles = [source.title for source in sources]
    for i, (source, title) in enumerate(zip(sources, titles, strict=True)):
        if not title:
            why = f"is missing, and none can be made of path {source.path!r}"
            raise ConfigError(f"{path}[{i}].name", why=why, fix="give one, as in name: math")
        _check_name(title, f"{path}[{i}].name")
        if title in titles[:i]:
            raise ConfigError(f"{path}[{i}].name", title, "is taken", "give each source a name of its own")
        if (source.weight is None) != (sources[0].weight is None):
            lacks = i if source.weight is None else 0
            why = "is missing, and another source has one"
            raise ConfigError(f"{path}[{lacks}].weight", why=why, fix="give a weight to all sources, or to none")


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
