"""The role of a message, and its fields beside content."""

from __future__ import annotations

import functools
import os
import typing
from typing import Any

from mrl.config.sources import Role
from mrl.data.files import BadRow, kind_of
from mrl.errors import DataError

ROLES = typing.get_args(Role)
OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}

KNOWN_FIELDS = ("role", "content", "weight")


def check_role(role: Any, name: str) -> None:
    """Raises BadRow for no role, another trainer's name of one, or a misspelt one. A template may have others. name: of
    the message."""
    if not isinstance(role, str) or not role:
        raise BadRow(f"{name}.role is {kind_of(role)}; give system, user, assistant or tool")
    if role in OTHER_NAMES:
        raise BadRow(f"{name}.role is {role!r}; write {OTHER_NAMES[role]}")
    if role not in ROLES and (meant := _meant_by(role)) is not None:
        raise BadRow(f"{name}.role is {role!r}; did you mean {meant}?")


@functools.lru_cache(maxsize=64)
def _meant_by(role: str) -> str | None:
    """Returns the role that a misspelt one means."""
    names = [*(name for name in ROLES if name != "ipython"), *OTHER_NAMES]  # python is no slip
    meant = next((name for name in names if _is_slip(role.lower(), name)), None)
    return OTHER_NAMES.get(meant, meant) if meant else None


def _is_slip(word: str, name: str) -> bool:
    """Returns whether a word is a name but for one letter: left out, put in, changed, or two in the wrong order.

    The first letter must be right. A letter at the end makes another name, as in userA or tools. Names of three letters
    have no slips.
    """
    if word == name:
        return True
    same = len(os.path.commonprefix([word, name]))
    rest, wanted = word[same:], name[same:]
    if len(name) < 4 or not same or not wanted:
        return False
    swapped = rest[:2] == wanted[1::-1] and rest[2:] == wanted[2:]
    return swapped or wanted[1:] in (rest, rest[1:]) or rest[1:] == wanted


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
