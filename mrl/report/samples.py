"""Rollouts to page through: some of a run's saved samples, with their tokens as text."""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import math
import os
import pathlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.report.runs import CONFIG, EXPORT, SAMPLES, read_settings

SERIES = ("step", "eval", "baseline")
"""The names that files begin with (docs/samples.md): samples before a step, held-out ones, greedy ones."""

MAX_FILES = 12
"""Files of a series that are read: evenly spaced, the first and the last among them."""

MOST_TOKENS, MOST_CHARACTERS = 4000, 20_000
"""Tokens of a sample with their numbers, and characters of a text, that a page has."""

TOKENS_OF_PAGE = 600_000
"""Tokens of a run with their numbers that a page has: with long samples it has fewer of them. A token takes about 20
bytes there."""

_NAME = re.compile(rf"({'|'.join(SERIES)})_(\d{{8,}})\.jsonl(\.gz)?")
_PLAIN = ("row", "index", "sample", "reward", "rewards", "environment", "prompt", "completion", "finished", "cut_by",
          "turns", "response_length", "advantage", "conversation")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SampleFile:
    """A file of samples/."""

    path: pathlib.Path
    series: str
    step: int


@dataclasses.dataclass(frozen=True)
class Samples:
    """The part of a run's rollouts that a page shows."""

    files: Sequence[Mapping[str, Any]]  # {series, step, of, samples}; of: how many samples the file has
    notes: Sequence[str]


class SampleReader:
    """Reads samples/ of a run."""

    def __init__(self, run: pathlib.Path) -> None:
        self._folder = run / SAMPLES
        self._texts = TokenTexts(run)

    def read(self, most: int) -> Samples:
        """Returns at most `most` samples, of files all along the run: whole groups of prompts, as far as they fit."""
        files = sample_files(self._folder)
        series: dict[str, list[SampleFile]] = {}
        for file in files:
            series.setdefault(file.series, []).append(file)
        if not most or not series:
            return Samples([], [f"--samples 0 left out the {len(files)} files of samples/"] if files else [])
        shown, notes = [], []
        for name, of_series in series.items():
            chosen, each = self._share(of_series, max(1, most // len(series)), TOKENS_OF_PAGE // len(series))
            read = [self._file(file, each) for file in chosen]
            shown += [entry for entry, _ in read]
            count = sum(len(entry["samples"]) for entry, _ in read)
            notes.append(
                f"{name}: {count} samples of {len(chosen)} of {len(of_series)} files; the first {each} of each at "
                "most, and whole groups where they fit"
            )
            notes += [problem for _, problems in read for problem in problems]
        if self._texts.problem is not None and any("ids" in s for f in shown for s in f["samples"]):
            notes.append(self._texts.problem)
        return Samples(shown, [*notes, f"--samples N puts up to N of a run on the page; here it was {most}"])

    def _share(self, files: Sequence[SampleFile], samples: int, tokens: int) -> tuple[list[SampleFile], int]:
        """Returns which files of a series to read, and how many samples of each. tokens: about as many of all."""
        rows, _ = read_rows(files[-1].path)
        group = max(collections.Counter(repr(row.get("index")) for row in rows).values(), default=1)
        lengths = [len(row["tokens"]) for row in rows if isinstance(row.get("tokens"), list)]
        if lengths:
            samples = min(samples, max(1, tokens // min(math.ceil(sum(lengths) / len(lengths)), MOST_TOKENS)))
        each = max(min(group, samples), samples // MAX_FILES)
        chosen = pick_evenly(files, min(MAX_FILES, max(1, samples // each)))
        return chosen, samples // len(chosen)

    def _file(self, file: SampleFile, most: int) -> tuple[Mapping[str, Any], list[str]]:
        rows, broken = read_rows(file.path)
        samples = [self._sample(row) for row in first_groups(rows, most)]
        entry = {"series": file.series, "step": file.step, "of": len(rows), "samples": samples}
        return entry, [f"{file.path.name}: {text}" for text in broken]

    def _sample(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a sample for the page: its shortened texts, and its tokens after the prompt.

        A token has its id or text, mask, log-prob and, if it was saved, its advantage.
        """
        sample = {name: _shortened(row[name]) for name in _PLAIN if row.get(name) is not None}
        if 1 not in (row.get("mask") or []):
            return sample
        tokens, mask, log_probs = row["tokens"], row["mask"], row["log_probs"]
        start = mask.index(1)
        stop = min(len(tokens), start + MOST_TOKENS)
        if stop < len(tokens):
            sample["tokens_left_out"] = len(tokens) - stop
        sample["ids"], sample["mask"] = tokens[start:stop], mask[start:stop]
        sample["log_probs"] = [_rounded(x) for x in log_probs[start:stop]]
        if row.get("advantages") is not None:
            sample["advantages"] = [_rounded(x) for x in row["advantages"][start:stop]]
        texts = self._texts.of(tokens[start:stop])
        if texts is not None:
            sample["texts"] = texts
        return sample


def sample_files(folder: pathlib.Path) -> list[SampleFile]:
    """Returns the files of a folder of samples, by step. If one is there twice, the uncompressed one is taken."""
    files: dict[tuple[str, int], SampleFile] = {}
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    for name in names:  # x.jsonl comes before x.jsonl.gz
        match = _NAME.fullmatch(name)
        if match is not None:
            file = SampleFile(folder / name, match[1], int(match[2]))
            files.setdefault((file.series, file.step), file)
    return sorted(files.values(), key=lambda file: (SERIES.index(file.series), file.step))


def pick_evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Returns at most `most` of them at even distances, the last always, the first where there are two."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def read_rows(path: pathlib.Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the samples of a file, and what was wrong with it.

    It is for people: unlike a replay (`mrl.rollout.samples`) it takes files without tokens. Lines that it cannot read
    are left out, and said.
    """
    rows: list[dict[str, Any]] = []
    broken = 0
    problems = []
    try:
        for line in _lines(path):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                broken += 1
    except (OSError, EOFError, zlib.error) as error:
        problems.append(f"cannot be read beyond {len(rows)} samples ({error})")
    if broken:
        problems.append(f"lines that are no sample, and left out: {broken}")
    return rows, problems


def _lines(path: pathlib.Path) -> Iterator[bytes]:
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        yield from (line for line in file if line.strip())


def first_groups(rows: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Returns the samples of the first prompts, as many whole groups as fit. The first group may be cut."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(repr(row.get("index")), []).append(row)
    samples: list[dict[str, Any]] = []
    for group in groups.values():
        if samples and len(samples) + len(group) > most:
            break
        samples += group[:most]
    return samples


def _rounded(value: float) -> float | None:
    """Returns a number in four digits, for a colour and a tooltip."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _shortened(value: Any) -> Any:
    """Returns a value whose long texts lost their middle."""
    if isinstance(value, str):
        left = len(value) - MOST_CHARACTERS
        if left <= 0:
            return value
        half = MOST_CHARACTERS // 2
        return f"{value[:half]}\n[... {left:,} characters left out ...]\n{value[-half:]}"
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# ------------------------------------------------------------------------------------------------------- tokens as text


TOKENIZER = "tokenizer.json"
MODEL_KEYS = ("actor.model.path", "model.path")
WINDOW = 4
"""Tokens before one that are decoded with it: what a token adds may depend on them."""


class TokenTexts:
    """The tokenizer of a run's export, or else of its first model if that is a folder here.

    No code of a model is run, and nothing is fetched: a tokenizer without tokenizer.json is none.
    """

    problem: str | None = None  # why there are no texts, for the page

    def __init__(self, run: pathlib.Path) -> None:
        self._run = run
        self._tokenizer: Any = None
        self._looked = False

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """Returns the text that each token adds; None without a tokenizer.

        A token that begins a character adds "". The token that ends the character has it.
        """
        if not self._looked:
            self._looked = True
            self._tokenizer = self._load()
        return None if self._tokenizer is None else _pieces(self._tokenizer, list(ids))

    def _load(self) -> Any:
        keys = read_settings(self._run / CONFIG).keys
        named = [str(keys[name]) for name in MODEL_KEYS if keys.get(name)]
        folders = [self._run / EXPORT, *(pathlib.Path(os.path.expanduser(name)) for name in named)]
        for folder in folders:
            if (folder / TOKENIZER).is_file():
                from tokenizers import Tokenizer

                try:
                    return Tokenizer.from_file(str(folder / TOKENIZER))
                except Exception as error:  # the package raises nothing narrower
                    self.problem = f"tokens are shown as ids: {folder / TOKENIZER} cannot be read ({error})"
                    return None
        places = " and ".join(str(folder) for folder in folders)
        self.problem = f"tokens are shown as ids: there is no {TOKENIZER} in {places}"
        return None


def _pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """Decodes each token behind the few before it, and removes the text of those alone (as vLLM and TGI stream)."""
    pieces = []
    begin = 0  # the first token of the window
    shown = 0  # tokens whose text is in `pieces`
    before = ""  # the text of the window up to `shown`
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[begin:end], skip_special_tokens=False)
        incomplete = text.endswith("\ufffd") and end < len(ids) and end - shown < WINDOW
        if incomplete or len(text) < len(before):
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        shown = end
        if end - begin >= 2 * WINDOW:
            begin = end - WINDOW
            before = tokenizer.decode(ids[begin:end], skip_special_tokens=False)
        else:
            before = text
    return pieces
