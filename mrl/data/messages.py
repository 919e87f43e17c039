"""The roles of messages, and their fields beside content."""

from __future__ import annotations

import typing
from typing import Any

from mrl.config.sources import Role
from mrl.errors import DataError

ROLES = typing.get_args(Role)
KNOWN_FIELDS = ("role", "content", "weight")


def extra_fields(message: dict[str, Any]) -> list[str]:
    """Returns the fields of a message that a template may write beside its content."""
    return [name for name, value in message.items() if name not in KNOWN_FIELDS and value not in (None, "", [], {})]


def is_blank(content: Any) -> bool:
    return isinstance(content, str) and not content.strip()


def empty_turn_error(where: str, message: dict[str, Any]) -> DataError:
    """Returns the error of a turn that is nothing but its end, because the template leaves out its content."""
    return DataError(
        where,
        why=f"the chat template leaves out {' and '.join(extra_fields(message))}, and only the turn's end is left",
        fix="name a template that writes it in data.chat_template, or remove the row",
    )
