"""Conversations that are written in one text, as `data.turns` marks them.

    data.turns: {user: "\\n\\nHuman:", assistant: "\\n\\nAssistant:"}

    "\\n\\nHuman: 1+1?\\n\\nAssistant: 2"    becomes    [{role: user, content: "1+1?"}, {role: assistant, content: "2"}]

A marker begins a turn, wherever it stands in a text; white space around the content of a turn is left out. A text that
is asked (`prompt`) may end with the assistant's marker. A text that answers (`completion`, or `chosen` and `rejected`
beside a `prompt`) begins in the assistant's turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mrl.data.files import BadRow

FIELDS = ("prompt", "text", "chosen", "rejected", "completion")
LOOKS_LIKE = re.compile(r"(?m)^\s*(?:###\s*)?(?:Human|User)\s*:.*^\s*(?:###\s*)?(?:Assistant|AI|Bot)\s*:", re.DOTALL)


def split_turns(row: dict[str, Any], markers: Mapping[str, str]) -> dict[str, Any]:
    """Returns the row with messages in place of its marked texts. markers: role -> what begins a turn; {}: as it is.

    Raises BadRow where a text does not begin with a marker, or has an empty turn.
    """
    if not markers:
        return row
    fields = dict(row)
    texts = {name: row[name] for name in FIELDS if isinstance(row.get(name), str)}
    answers = ("completion",) if row.get("prompt") is None else ("completion", "chosen", "rejected")
    for name, text in texts.items():
        if name == "prompt":  # it may end with the marker of the answer that is asked for
            text = text.rstrip().removesuffix(markers["assistant"].rstrip())
        fields[name] = turns_of(text, markers, name, begins="assistant" if name in answers else None)
    if "text" in texts:
        fields["messages"] = fields.pop("text")
    return fields


def turns_of(text: str, markers: Mapping[str, str], name: str, begins: str | None = None) -> list[dict[str, str]]:
    """Returns the turns of a text. name: of its field. begins: the role of what stands before the first marker.

    Raises BadRow.
    """
    roles = {marker: role for role, marker in markers.items()}
    first = next((marker for marker in roles if text.lstrip().startswith(marker.lstrip())), None)
    if begins is None and first is not None:  # the first turn of a text may lack the blank lines before it
        text = first + text.lstrip()[len(first.lstrip()) :]
    # a longer marker first: one may begin with another
    either = "|".join(re.escape(marker) for marker in sorted(roles, key=len, reverse=True))
    before, *parts = re.split(f"({either})", text)
    turns = [] if begins is None else [(begins, before)]
    if begins is None and (before.strip() or not parts):
        shown = " and ".join(repr(marker) for marker in roles)
        raise BadRow(
            f"{name} begins with {text.lstrip()[:30]!r}, and data.turns has the markers {shown}; give the marker that "
            "its first turn has, or remove the row"
        )
    turns += [(roles[marker], content) for marker, content in zip(parts[::2], parts[1::2], strict=True)]
    for role, content in turns:
        if not content.strip():
            raise BadRow(f"{name} has an empty turn of {role}; give its text, or remove the row")
    return [{"role": role, "content": content.strip()} for role, content in turns]


def looks_like_dialogue(row: Mapping[str, Any]) -> str | None:
    """Returns the first field with a whole dialogue in one text: a chat template would make one turn of it."""
    fields = ("prompt", "chosen", "rejected", "instruction")
    return next((name for name in fields if LOOKS_LIKE.search(str(row.get(name)))), None)
