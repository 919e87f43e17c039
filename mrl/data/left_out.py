"""Notes at the start on fields that a chat template leaves out, from the first rows with each field.

A conversation is rendered with a field and without it. A variable of chat_template_kwargs is looked for in the
template's text instead: `enable_thinking: true` may change nothing, and be right.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from mrl.data.encode import Encoder
from mrl.data.formats import SYSTEM_ROLES, Chat
from mrl.data.messages import ROLES, empty_turn_error, extra_fields, is_blank
from mrl.data.tokenizer import variables_of
from mrl.errors import DataError

PROBE_TEXT = "a-text-that-stands-in"
MAX_ROWS_PER_FIELD = 8


def left_out(encoder: Encoder, chats: Iterable[tuple[str, Chat]]) -> list[str]:
    """Returns a line for each field that the chat template leaves out, and for the form of tool calls' arguments.

    chats: conversations, each with its file and line. Raises DataError if nothing is left of a turn but its end.
    """
    if not encoder.has_template:
        return []
    lines: dict[str, str] = {}
    missing: dict[str, str] = {}  # field -> the first row in which it is left out
    written: set[str] = set()
    rows = collections.Counter[str]()
    for where, chat in chats:
        try:
            fitted, forms = encoder.fit_tool_arguments_and_forms(encoder.with_system(chat))
            whole = encoder.render_text(fitted, fitted.messages)
        except DataError:
            continue  # its own encoding says so
        for role in sorted({message["role"] for message in chat.messages}.difference(ROLES)):
            if not re.search(f"['\"]{re.escape(role)}['\"]", encoder.tokenizer.get_chat_template(None, chat.tools)):
                why = f"the role {role!r} is in no list of mrl, and the chat template does not name it"
                lines.setdefault(role, f"{where}: {why}; one of {', '.join(ROLES)} may be meant")
        for form in forms:
            lines.setdefault(form, f"{where}: {form}")
        for field, other in _without_each(encoder, fitted):
            if field in written or rows[field] == MAX_ROWS_PER_FIELD:
                continue
            rows[field] += 1
            if _changes(encoder, other, whole):
                written.add(field)
            else:
                missing.setdefault(field, where)
        _check_turns(encoder, fitted, whole, where)
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
        yield f"{name} of a message", dataclasses.replace(chat, messages=[_without(m, [name]) for m in chat.messages])
    kinds = [_kind_of_text(message, i) for i, message in enumerate(chat.messages)]
    for kind in dict.fromkeys(kind for kind in kinds if kind is not None):
        messages = [{**m, "content": PROBE_TEXT} if k == kind else m for m, k in zip(chat.messages, kinds, strict=True)]
        yield kind, dataclasses.replace(chat, messages=messages)


def _without(message: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in names}


def _kind_of_text(message: Mapping[str, Any], place: int) -> str | None:
    """Returns the kind of a message's text; a template leaves out all texts of a kind or none.

    Kinds are the roles, and texts without a place in some templates (Llama 3.1: content beside a call; Qwen3-VL: a
    later system message).
    """
    content, role = message["content"], message["role"]
    if not isinstance(content, str) or is_blank(content):
        return None
    if "tool_calls" in message:
        return "content beside tool_calls"
    is_later = role in SYSTEM_ROLES and place > 0
    return f"messages of the role {role}" + " that are not the first message" * is_later


def _check_turns(encoder: Encoder, chat: Chat, whole: str, where: str) -> None:
    """Raises DataError if an assistant turn without content has other fields and nothing of them is written."""
    for i, message in enumerate(chat.messages):
        extra = extra_fields(message)
        if message["role"] != "assistant" or not extra or not is_blank(message["content"]):
            continue
        messages = [*chat.messages[:i], _without(message, extra), *chat.messages[i + 1 :]]
        if not _changes(encoder, dataclasses.replace(chat, messages=messages), whole):
            raise empty_turn_error(f"{where}: messages[{i}]", message)
