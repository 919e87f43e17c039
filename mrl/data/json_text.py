"""JSON in the text of a field, as Parquet and the OpenAI API carry values that have no type of their own.

Text of `tools`, `chat_template_kwargs` and `tool_calls` has to be JSON. Text of a conversation is read as JSON if it is
a list of messages with roles. Any other is somebody's text and stays. So does the completion of a prompt in text.
"""

from __future__ import annotations

from typing import Any

from mrl.data.files import BadRow, kind_of
from mrl.weights.json_file import parse_json

CONVERSATIONS = ("messages", "prompt", "completion", "chosen", "rejected")


def decode_json_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with lists of messages where its fields have them as JSON text."""
    values = {name: value for name, value in row.items() if name in CONVERSATIONS}  # looked at, which is no reading
    fields = {name: _conversation(value) for name, value in values.items()}
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
    except ValueError as e:
        raise BadRow(f"{name} is a string that is not JSON ({e}); give {wanted}") from None


def json_if(value: Any, bracket: str) -> Any:
    """Returns the JSON value of a text that begins with `bracket`; None of any other text or value."""
    if not isinstance(value, str) or not value.lstrip().startswith(bracket):
        return None
    try:
        return parse_json(value)
    except ValueError:
        return None


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
    if not isinstance(calls, list):
        raise BadRow(f"{name}.tool_calls is {kind_of(calls)}; give {wanted}")
    decoded = [_object(call, f"{name}.tool_calls[{i}]", ("function",)) for i, call in enumerate(calls)]
    return {**message, "tool_calls": decoded}


def _object(value: Any, name: str, fields: tuple[str, ...]) -> dict[str, Any]:
    """Returns a call or a schema as an object, and those of its `fields` that are JSON text. Raises BadRow."""
    found = parse_json_text(value, name, "an object")
    if not isinstance(found, dict):
        raise BadRow(f"{name} is {kind_of(found)}; give an object")
    decoded = {field: inner for field in fields if (inner := json_if(found.get(field), "{")) is not None}
    return found | decoded


def _schema(value: Any, name: str) -> dict[str, Any]:
    """Returns a function schema as an object, and its parameters as one. Raises BadRow."""
    found = _object(value, name, ("function", "parameters"))
    if "function" not in found:
        return found
    return found | {"function": _object(found["function"], f"{name}.function", ("parameters",))}


def _conversation(value: Any) -> Any:
    """Returns the messages in a JSON text; any other value as it is."""
    messages = json_if(value, "[")
    if messages and all(isinstance(message, dict) and "role" in message for message in messages):
        return messages
    return value
