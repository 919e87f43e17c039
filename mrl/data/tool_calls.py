"""The arguments of tool calls in the form that a chat template writes as JSON: an object, or text.

Rows have either: OpenAI's API gives text, most data sets objects. Some templates write `arguments | tojson`, and text
gets quotes once more. Others write `arguments` as it is, and an object becomes a Python repr. A row is rendered with
known arguments in its calls, and gets the form that comes out right.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from mrl.data.formats import Chat
from mrl.data.json_text import json_if
from mrl.errors import DataError

Convert = Callable[[Any], Any]
Render = Callable[[list[dict[str, Any]]], str]
NAME, VALUE = "mrl_name", "mrl_value"
PROBE = {NAME: VALUE}


def fit_arguments(chat: Chat, render: Render) -> Chat:
    """Returns a conversation with the arguments of its calls in the form that its template takes.

    render: messages to text; raises DataError if that fails.
    """
    if not any("tool_calls" in message for message in chat.messages):
        return chat
    convert = _conversion(chat.messages, render)
    return chat if convert is None else dataclasses.replace(chat, messages=_with_arguments(chat.messages, convert))


def _conversion(messages: list[dict[str, Any]], render: Render) -> Convert | None:
    """Returns a function to the template's form of arguments; None if it writes neither form as JSON."""
    try:
        shown = render(_with_arguments(messages, lambda _: PROBE))
        if NAME in shown and VALUE in shown and str(PROBE) not in shown:
            return _as_object
    except DataError:
        pass  # it may want text
    text = json.dumps(PROBE)
    try:
        return _as_text if text in render(_with_arguments(messages, lambda _: text)) else None
    except DataError:
        return None  # the conversation itself cannot be rendered, which its own rendering says


def _as_object(argument: Any) -> Any:
    if isinstance(argument, str) and not argument.strip():
        return {}  # a call without arguments
    found = json_if(argument, "{")
    return argument if found is None else found


def _as_text(argument: Any) -> Any:
    return argument if isinstance(argument, str) else json.dumps(argument, ensure_ascii=False)


def _with_arguments(messages: list[dict[str, Any]], convert: Convert) -> list[dict[str, Any]]:
    return [
        {**m, "tool_calls": [_with_argument(call, convert) for call in m["tool_calls"]]} if "tool_calls" in m else m
        for m in messages
    ]


def _with_argument(call: dict[str, Any], convert: Convert) -> dict[str, Any]:
    """Returns a call, in OpenAI's form or flat, with other arguments."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_argument(call["function"], convert)}
    if "arguments" not in call:
        return call
    return {**call, "arguments": convert(call["arguments"])}
