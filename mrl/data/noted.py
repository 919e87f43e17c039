"""A row that notes its fields as they are read."""

from __future__ import annotations

from typing import Any


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
