"""Notes at the start on fields that a chat template leaves out, from the first rows with each field.

A conversation is rendered with a field and without it. A variable of chat_template_kwargs is looked for in the
template's text instead: `enable_thinking: true` may change nothing, and be right.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mrl.config.sources import Role
from mrl.data.encode import Encoder, extra_fields, is_blank
from mrl.data.formats import Chat
from mrl.data.tokenizer import variables_of
from mrl.errors import DataError

ROLES = typing.get_args(Role)
PROBE_TEXT = "a-text-that-stands-in"


def left_out(encoder: Encoder, chats: Iterable[tuple[str, Chat]]) -> list[str]:
    """Returns a line for each field that the chat template leaves out. chats: conversations, each with its file and
    line."""
    if not encoder.has_template:
        return []
    lines: dict[str, str] = {}
    missing: dict[str, str] = {}  # field -> the first row in which it is left out
    written: set[str] = set()
    for where, chat in chats:
        try:
            fitted = encoder.fit_tool_arguments(encoder.with_system(chat))
            whole = encoder.render_text(fitted, fitted.messages)
        except DataError:
            continue  # its own encoding says so
        for role in sorted({message["role"] for message in chat.messages}.difference(ROLES)):
            lines.setdefault(role, f"{where}: the role {role!r} is not usual; one of {', '.join(ROLES)} may be meant")
        for field, other in _without_each(encoder, fitted):
            if field not in written and _changes(encoder, other, whole):
                written.add(field)
            elif field not in written:
                missing.setdefault(field, where)
    fix = "name another in data.chat_template where it counts"
    notes = [f"{at}: the chat template writes nothing of {f}; {fix}" for f, at in missing.items() if f not in written]
    return [*lines.values(), *notes]


def _changes(encoder: Encoder, other: Chat | None, whole: str) -> bool:
    if other is None:
        return False
    try:
        return encoder.render_text(other, other.messages) != whole
    except DataError:
        return True  # the template asks for the field


def _without_each(encoder: Encoder, chat: Chat) -> Iterator[tuple[str, Chat | None]]:
    """Yields each field of a conversation in words, with the conversation without it; None where the template has no
    such variable."""
    if chat.tools:
        yield "tools", dataclasses.replace(chat, tools=None)
    if chat.template_kwargs:
        variables = variables_of(encoder.tokenizer.get_chat_template(None, chat.tools))
        yield from ((f"chat_template_kwargs.{name}", None) for name in chat.template_kwargs if name not in variables)
    for name in dict.fromkeys(name for message in chat.messages for name in extra_fields(message)):
        yield f"{name} of a message", dataclasses.replace(chat, messages=[_without(m, name) for m in chat.messages])
    for role in dict.fromkeys(message["role"] for message in chat.messages if _is_text(message)):
        messages = [{**m, "content": PROBE_TEXT} if m["role"] == role and _is_text(m) else m for m in chat.messages]
        yield f"messages of the role {role}", dataclasses.replace(chat, messages=messages)


def _without(message: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != name}


def _is_text(message: Mapping[str, Any]) -> bool:
    return isinstance(message["content"], str) and not is_blank(message["content"])
