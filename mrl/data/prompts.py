"""Prompts of data.train or data.eval: what the policy is given, and the row that rewards are computed from."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A row as the policy sees it.

    index: of the row in its data set. where: its file and line, `train.jsonl:17`. row: the data row, as rewards and
    environments get it (after data.columns). content: the prompt as text or messages, as rewards get it. tokens: what the
    policy is given, generation prompt included.
    """

    index: int
    where: str
    row: dict[str, Any]
    content: str | list[dict[str, Any]]
    tokens: list[int]
