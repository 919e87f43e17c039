"""Data files and rows that cannot be trained on, each met before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.bad_input.mistakes import Case, Workspace, chat

GOOD = chat("1+1=", "2")


def row(bad: Any) -> Callable[[Workspace], None]:
    """An edit that makes line 3 of rows.jsonl `bad`."""
    return lambda workspace: workspace.write_rows([GOOD, GOOD, bad, GOOD])


def rows(*all_of_them: Any) -> Callable[[Workspace], None]:
    return lambda workspace: workspace.write_rows(all_of_them)


def file(name: str, content: str | bytes) -> Callable[[Workspace], None]:
    return lambda workspace: workspace.write(name, content)


CASES = [
    # Files.
    Case("empty", "data.train", ("rows.jsonl", "is empty"), edit=rows()),
    # Streamed.
    Case("streamed, bad row", "rows.jsonl:3", ("messages is '1+1='",), ("data.stream=true",), row({"messages": "1+1="})),
    # Lines.
    Case("cut line", "rows.jsonl:4", ("is not a JSON object",), edit=rows(GOOD, GOOD, GOOD, '{"messages": [{"role": "us')),
    Case("a batch of a million", "train.global_batch_size", ("each of the 4 rows of data.train 250000 times", "give 4"), ("train.global_batch_size=1000000", "data.train='*.jsonl'")),
    Case("nothing but bad rows", "data.train", ("none of its 4 rows",), ("data.on_bad_row=skip",), rows(*[{"messages": []}] * 4)),
]  # fmt: skip
