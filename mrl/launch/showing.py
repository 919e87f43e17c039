"""`mrl data show` at work: reads the config and its rows as a run does, and builds no engine."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pkgutil
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from mrl.config.checks import streamed_keys
from mrl.config.command import RowsRunConfig, TrainingCommand, command_of_data, record
from mrl.config.keys import value_at, walk_keys
from mrl.config.load import apply_override, load_config, read_yaml
from mrl.config.rm import FORMAT_OF
from mrl.errors import ConfigError, DataError, ModelError
from mrl.launch import preflight
from mrl.words import pluralize

if TYPE_CHECKING:
    from mrl.config.sources import Share
    from mrl.data.show import ShownSequence

SAMPLE = 256
"""Rows whose lengths are looked at without --count, or as many as are shown."""


def run(
    path: str, overrides: Sequence[str], *, rows: int, count: bool, part: Literal["train", "eval"], by_token: bool,
    coloured: bool, echo: Callable[[str], None], of: str | None = None,
) -> None:  # fmt: skip
    """Prints the sequences that rows of the config file `path` become.

    rows: the number of rows to show with their tokens. of: the command of the config; None finds it by its keys.
    """
    raw = read_yaml(path)
    for override in overrides:
        apply_override(raw, override)
    command: TrainingCommand[Any] = command_of_data(raw) if of is None else record(of)
    stand_ins = _stand_ins(raw, command)
    config = load_config(path, [*(f"{key}={value}" for key, value in stand_ins.items()), *overrides], command.root)
    echo(f"read as a config of mrl {command.name}" + (" (--as for another)" if of is None else ""))
    if command.task is None:
        why = f"knows no rows of `mrl {command.name}`"
        raise ConfigError("mrl data show", why=why, fix="give the config of a command that trains on rows")
    if count and part == "train" and (streamed := streamed_keys(config.data)):
        why = f"reads every row, and those of {streamed[0]} are streamed: their number is not known"
        raise ConfigError("--count", why=why, fix="leave it out: lengths are of the first rows, of more with --rows")
    with preflight.quiet():
        preflight.check_data(config.data)
        limit, readable = _without_limit(config)
        task, tokenizer, sets = _sets(command, readable, part)
    shown = [OpenRows(command, readable, task, tokenizer, rows, part, name, limit) for name, rows in sets.items()]
    for number, read in enumerate(shown):
        for line in ["", *read.lines(rows=rows, count=count, by_token=by_token, coloured=coloured)][number == 0 :]:
            echo(line)
    for read in shown:
        if read.too_long:
            raise read.refusal()


def _without_limit(config: Any) -> tuple[int | None, Any]:
    """Returns the limit beyond which a row stops a run, and the config without it, whose rows are all read.

    The limit is None where such rows are cut or dropped.
    """
    if config.data.truncation != "error":
        return None, config
    name = _limit_of(config.data)
    data = dataclasses.replace(config.data, **{name: sys.maxsize})
    return getattr(config.data, name), dataclasses.replace(config, data=data)


def _limit_of(data: Any) -> str:
    return "max_prompt_length" if hasattr(data, "max_prompt_length") else "max_length"


def notes(command: TrainingCommand[Any], config: Any) -> list[str]:
    """Returns lines on the first rows of data.train and data.eval, for a dry run. Raises UserError for unusable rows.

    Rows that are not on this machine are skipped.
    """
    from mrl.data.mixture import notes_of_rows

    model = next(iter(command.parts(config))).model
    if command.task is None or not os.path.isdir(model.path):
        return []
    with preflight.quiet():
        try:
            train, evaluation = _sets_here(command, config, "train"), _sets_here(command, config, "eval")
            found = notes_of_rows(train.get(""), evaluation)
            sets = (*train.values(), *evaluation.values())
            for rows in sets:
                rows.read_first()
            command.check_rows(config, [row for rows in sets for row in rows.first_rows()])
        except ModelError as error:  # a folder may have its tokenizer when the run starts
            return [f"no row was read: {error}"]
    return found


def _sets_here(command: TrainingCommand[Any], config: Any, part: Literal["train", "eval"]) -> dict[str, Any]:
    """Returns the rows of data.train or data.eval; none where some of them are not on this machine."""
    paths = [path for key, path in preflight.paths_of(config.data) if key.startswith(f"data.{part}")]
    is_here = bool(paths) and all(preflight.is_on_this_machine(path) for path in paths)
    return _sets(command, config, part)[2] if is_here else {}


def _stand_ins(raw: Mapping[str, Any], command: TrainingCommand[Any]) -> dict[str, Any]:
    """Returns values for keys that the config lacks. A run needs them, but reading its rows does not."""
    sizes = (value_at(raw, "rollout.samples_per_prompt"), value_at(raw, "algorithm.mini_batch_size"))
    form = str(value_at(raw, "data.format"))
    values = {
        "output_dir": ".",
        "train.global_batch_size": math.lcm(8, *(size for size in sizes if type(size) is int and size > 0)),
        "algorithm.name": "grpo",
        "loss.name": {of: loss for loss, of in FORMAT_OF.items()}.get(form, "bradley_terry"),
    }
    keys = {key.path: key for key in walk_keys(command.root, sections=True)}
    lacking = [path for path in values if path in keys and keys[path].required and value_at(raw, path) is None]
    found = {path: values[path] for path in lacking}
    scores = ("rewards", "reward.model.path", "rollout.environment", "algorithm.distill")
    rewarded = "rewards" in keys and value_at(raw, "algorithm.name") != "opd"
    if rewarded and not any(value_at(raw, key) for key in scores):
        found["rewards"] = "{functions: [{name: length, maximum: 1}]}"
    return found


def _sets(
    command: TrainingCommand[Any], config: Any, part: Literal["train", "eval"]
) -> tuple[Any, Any, dict[str, Any]]:
    """Returns the task, the tokenizer, and the rows of data.train or of each set of data.eval."""
    from mrl.data.mixture import eval_rows, train_rows
    from mrl.data.tokenizer import load_tokenizer
    from mrl.weights.hf_config import read_hf_config
    from mrl.weights.hub import model_folder

    assert command.task is not None
    task = pkgutil.resolve_name(command.task)(config)
    model = next(iter(command.parts(config))).model
    folder = model_folder(model.path, weights=False)
    tokenizer_alone = os.path.isdir(folder) and not os.path.exists(os.path.join(folder, "config.json"))
    hf_config = {} if tokenizer_alone else read_hf_config(folder)
    tokenizer = load_tokenizer(folder, model.trust_remote_code, config.data.chat_template)
    make = lambda data: task.of_data(data).dataset(tokenizer, folder, hf_config, part)  # noqa: E731
    if part == "eval" and config.data.eval is not None:
        return task, tokenizer, eval_rows(config.data, make)
    return task, tokenizer, {"": train_rows(config.data, make) if part == "train" else make(config.data)}


@dataclasses.dataclass(frozen=True)
class Row:
    """A row that is used."""

    place: str  # its file and line
    item: Any
    source: str = ""  # of a mixture


@dataclasses.dataclass
class SequenceCounts:
    """Sequences of the rows that were looked at; `str` counts them. prompts: whether a policy answers them."""

    prompts: bool
    rows: int = 0
    trained: int = 0  # tokens that train
    lengths: list[int] = dataclasses.field(default_factory=list)

    def add(self, sequences: Sequence[ShownSequence]) -> None:
        self.rows += 1
        self.trained += sum(sequence.trained for sequence in sequences)
        self.lengths += [len(sequence.ids_T) for sequence in sequences]

    def __str__(self) -> str:
        tokens = sum(self.lengths)
        if self.prompts:
            return f"{pluralize(len(self.lengths), 'prompt')} of {pluralize(tokens, 'token')}, of which none trains"
        share = f"{100 * self.trained / tokens:.1f} %"
        of = pluralize(len(self.lengths), "sequence")
        return f"{of}, {pluralize(tokens, 'token')}, {self.trained:,} train ({share})"


@dataclasses.dataclass(frozen=True)
class OpenRows:
    """The rows of a config, open for reading."""

    command: TrainingCommand[Any]
    config: RowsRunConfig
    task: Any
    tokenizer: Any
    dataset: Any
    part: Literal["train", "eval"]
    name: str = ""  # of a set of data.eval, where there are several
    limit: int | None = None  # tokens beyond which a row stops a run
    too_long: list[str] = dataclasses.field(default_factory=list)  # the places of such rows that were looked at

    @property
    def key(self) -> str:
        return f"data.{self.part}.{self.name}".rstrip(".")

    @property
    def shares(self) -> Sequence[Share]:
        """The sources of a mixture; () where there is one path alone."""
        return getattr(self.dataset, "shares", ())

    def lines(self, *, rows: int, count: bool, by_token: bool, coloured: bool) -> Iterator[str]:
        """Yields what is printed."""
        from mrl.data.show import sequences_of, summary
        from mrl.data.stream import Report

        kind = getattr(self.dataset, "format", None)
        form = "" if kind is None else f" of the format {kind}"
        number = "streamed rows" if self.dataset.is_streamed else pluralize(len(self.dataset), "row")
        yield f"{self.key}: {self.dataset.path}: {number}{form}"
        yield from self.dataset.notes()
        report, titles = Report(), ["", *(share.title for share in self.shares)]
        seen = {title: SequenceCounts(self.command.generates) for title in titles}
        for row in itertools.islice(self._rows(Report()), rows):
            yield ""
            yield from self._row(row, by_token, coloured)
        every = self._rows(report)
        if count and self.shares:  # in the order of the files
            every = self._loaded(range(len(self.dataset)), report)
        for row in itertools.islice(every, None if count else max(rows, SAMPLE)):
            sequences = sequences_of(row.item)
            for name in {"", row.source}:
                seen[name].add(sequences)
            if self._is_too_long(sequences):
                self.too_long.append(row.place)
        whole = seen.pop("")
        if not whole.rows:
            raise report.no_rows_left(self.dataset)
        yield ""
        seen_rows = whole.rows + report.skipped + report.dropped
        is_all = count or not (self.dataset.is_streamed or self.shares or seen_rows < len(self.dataset))
        used = pluralize(whole.rows, "row that is used", "rows that are used")
        yield f"{'all rows' if is_all else f'the first {used}'}: {whole}"
        for name, of_source in seen.items():
            yield f"  {name}: {pluralize(of_source.rows, 'row')}, {of_source}"
        yield f"tokens of a sequence: {summary(whole.lengths)}"
        counts = report.counts if self.limit is None else {**report.counts, "too long": len(self.too_long)}
        listed = ", ".join(f"{what}: {number:,}" for what, number in counts.items())
        yield f"rows used: {whole.rows - len(self.too_long):,}, {listed}"
        yield from (f"  {note}" for note in report.notes)

    def _is_too_long(self, sequences: Sequence[ShownSequence]) -> bool:
        return self.limit is not None and max(len(sequence.ids_T) for sequence in sequences) > self.limit

    def refusal(self) -> DataError:
        """Returns what a run says of the rows that are too long."""
        name = _limit_of(self.config.data)
        [cuts] = [key.annotation for key in walk_keys(self.command.root) if key.path == "data.truncation"]
        rows = pluralize(len(self.too_long), "row that was read is", "rows that were read are")
        why = f"{rows} longer than data.{name} {self.limit}, as {self.too_long[0]}, and a run stops there"
        fix = f"raise it, or set data.truncation to {' or '.join(typing.get_args(cuts)[1:])}"
        return DataError(self.key, why=why, fix=fix)

    def _rows(self, report: Any) -> Iterator[Row]:
        """Yields each used row once, and fills the report.

        Rows of data.train come in the order of the run's first epoch. A mixture yields as many rows as its sources
        have. Streamed rows yield one pass over each source.
        """
        from mrl.data.stream import NOTES_PER_BATCH, row_order

        if not self.shares and not self.dataset.is_streamed:
            shuffle = self.part == "train" and self.config.data.shuffle
            yield from self._loaded(row_order(self.config.seed, 0, len(self.dataset), shuffle).tolist(), report)
            return
        source = self.task.source(self.dataset)
        for number, taken in enumerate(source.walk(), start=1):
            report.skipped = taken.progress.skipped
            report.dropped = taken.progress.dropped
            report.truncated = taken.progress.truncated
            report.notes += taken.notes[: NOTES_PER_BATCH - len(report.notes)]
            yield self._at(taken.rows[0], taken.items[0])
            if self.dataset.is_streamed:
                is_over = all(read.epoch for read in taken.progress.sources or [taken.progress])
            else:
                is_over = number + report.skipped + report.dropped >= len(self.dataset)
            if is_over or (source.mixer is not None and source.mixer.all_sources_over(taken.progress.sources)):
                return

    def _loaded(self, rows: Iterable[int], report: Any) -> Iterator[Row]:
        for row in rows:
            item = report.count(self.dataset, row)
            if item is not None:
                yield self._at(row, item)

    def _at(self, row: int, item: Any) -> Row:
        source = self.shares[self.dataset.find(row)[0]].title if self.shares else ""
        return Row(self.dataset.where(row), item, source)

    def _row(self, row: Row, by_token: bool, coloured: bool) -> Iterator[str]:
        from mrl.data.show import sequences_of, text_lines, token_lines

        sequences = sequences_of(row.item)
        cut = "; truncated" if row.item.truncated else "; too long" if self._is_too_long(sequences) else ""
        for sequence in sequences:
            name = f"{sequence.name}: " if sequence.name else ""
            source = f"{row.source}: " if row.source else ""
            note = f", {sequence.note}" if sequence.note else ""
            tokens = pluralize(len(sequence.ids_T), "token")
            trained = "a prompt" if self.command.generates else f"{sequence.trained:,} train"
            yield f"{source}{row.place}: {name}{tokens}, {trained}{note}{cut}"
            shown = token_lines if by_token else text_lines
            for line in shown(self.tokenizer, sequence, coloured=coloured):
                yield f"  {line}".rstrip()
