"""JSON in the text of a field, as Parquet and the OpenAI API carry values that have no type of their own.

Text of `tools`, `chat_template_kwargs` and `tool_calls` has to be JSON. Text of a conversation is read as JSON if it is
a list of messages with roles. Any other is somebody's text and stays. So does the completion of a prompt in text.
"""

from __future__ import annotations

import json
from typing import Any

from mrl.data.files import BadRow, json_problem, kind_of, parse_json

AS_MESSAGES = "JSON text is read as a list of messages"
CONVERSATIONS = ("messages", "prompt", "completion", "chosen", "rejected")


def decode_json_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with lists of messages where its fields have them as JSON text."""
    values = {name: value for name, value in row.items() if name in CONVERSATIONS}  # looked at, which is no reading
    fields = {name: _conversation(value, name) for name, value in values.items()}
    if isinstance(fields.get("prompt"), str) and isinstance(values.get("completion"), str):
        fields["completion"] = values["completion"]
    changed = {name: value for name, value in fields.items() if value is not values[name]}
    return row | changed if changed else row


def tools_of(row: dict[str, Any]) -> list[Any] | None:
    """Returns the function schemas of a row, None where it has none. Raises BadRow."""
    wanted = "a list of function schemas"
    tools = parse_json_text(row.get("tools"), "tools", wanted)
    if tools is not None and not isinstance(tools, list):
        raise BadRow(f"tools is {kind_of(tools)}; give {wanted}")
    return [_schema(tool, f"tools[{i}]") for i, tool in enumerate(tools)] if tools else None


def template_kwargs_of(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row's values for variables of the chat template. Raises BadRow."""
    wanted = 'an object, as {"enable_thinking": false}'
    kwargs = parse_json_text(row.get("chat_template_kwargs"), "chat_template_kwargs", wanted) or {}
    if not isinstance(kwargs, dict):
        raise BadRow(f"chat_template_kwargs is {kind_of(kwargs)}; give {wanted}")
    return kwargs


def parse_json_text(value: Any, name: str, wanted: str) -> Any:
    """Returns the JSON value of a text, None of an empty one, and any other value as it is. Raises BadRow."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except json.JSONDecodeError as e:
        raise BadRow(f"{name} is a string that is not JSON ({json_problem(e)}); give {wanted}") from None


def json_object(text: Any) -> dict[str, Any] | None:
    """Returns the object that a text is the JSON of; None of anything else. Raises BadRow where it is too deep."""
    if not isinstance(text, str) or not text.lstrip().startswith("{"):
        return None
    try:
        value = parse_json(text)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def decode_tool_calls(message: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a message with tool calls as objects, also if they are JSON text. A field that is null and an empty list
    of calls are left out. Raises BadRow."""
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "tool_calls" not in message:
        return message
    wanted = "a list of calls with name and arguments"
    calls = parse_json_text(message.pop("tool_calls"), f"{name}.tool_calls", wanted)
    if not calls:
        return message
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list):
        raise BadRow(f"{name}.tool_calls is {calls!r:.40}; give {wanted}")
    decoded = []
    for i, call in enumerate(calls):
        call = parse_json_text(call, f"{name}.tool_calls[{i}]", "a call with name and arguments")
        if not isinstance(call, dict):
            raise BadRow(f"{name}.tool_calls[{i}] is {call!r:.40}; give a call with name and arguments")
        function = json_object(call.get("function"))
        decoded.append(call if function is None else {**call, "function": function})
    return {**message, "tool_calls": decoded}


def _schema(tool: Any, name: str) -> Any:
    """Returns a tool as an object, and its parameters as one."""
    tool = parse_json_text(tool, name, "a function schema")
    if not isinstance(tool, dict):
        raise BadRow(f"{name} is {tool!r:.40}; give a function schema")
    function = json_object(tool.get("function")) or tool.get("function")
    if isinstance(function, dict):
        return {**tool, "function": _with_parameters(function)}
    return _with_parameters(tool)


def _with_parameters(function: dict[str, Any]) -> dict[str, Any]:
    parameters = json_object(function.get("parameters"))
    return function if parameters is None else {**function, "parameters": parameters}


def _conversation(value: Any, name: str) -> Any:
    """Returns the messages in a JSON text, or in a list of JSON texts; any other value as it is.

    name: of the field. Messages with `from` (ShareGPT) are refused by the reader of `messages`, never text.
    """
    messages = value
    if isinstance(value, str):
        if not value.lstrip().startswith("["):
            return value
        try:
            messages = parse_json(value)
        except (json.JSONDecodeError, BadRow):
            return value
    if not isinstance(messages, list) or not messages:
        return value
    if messages is value and not any(isinstance(message, str) for message in messages):
        return value
    found = [json_object(message) or message for message in messages]
    fields = {"role", "from"} if name == "messages" else {"role"}
    are_messages = all(isinstance(message, dict) and fields & message.keys() for message in found)
    return found if are_messages else value
