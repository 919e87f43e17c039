"""How a chat template ends the turns of an assistant.

A probe conversation is rendered with nothing after the assistant's turn, and with another turn after it.

- Most templates end a turn with a special token, whatever follows (ChatML, Llama 3). Some write more after the last
  turn of all (Phi-3: EOS), which is no part of it.
- Some end the last turn with another token than earlier ones (gpt-oss: <|return|>, and <|end|> before).
- Some write no end. The special token that begins the next turn then ends this one (GLM-4.5: <|user|>, and
  <|observation|> after a turn that calls tools). It belongs to the turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from mrl.data.files import BadRow

STAND_IN = "a-turn-of-the-assistant"
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}


@dataclasses.dataclass(frozen=True)
class TurnEnds:
    """The ends of the assistant's turns in a chat template, as token ids."""

    kind: Literal["own", "by place", "next turn", "unknown"] = "unknown"
    last: int | None = None  # ends the last turn of a conversation
    ending: tuple[int, ...] = ()  # what follows it where a conversation ends: no part of the turn
    begin: int | None = None  # begins a turn of the assistant
    next_turn: tuple[int, ...] = ()  # what a conversation's end lacks where the next turn's token ends its last turn
    next_turn_of_tool: tuple[int, ...] = ()  # the same after a turn that calls tools

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a conversation's last turn."""
        found = {self.last, *self.next_turn_of_tool[-1:]}
        return frozenset(token for token in found if token is not None)


class Probe:
    """Renders probe conversations. render: the text of messages, with the generation prompt where it is told so."""

    def __init__(
        self, render: Callable[..., str], tokenize: Callable[[str], list[int]], special_ids: Collection[int],
        is_blank: Callable[[int], bool], bos: Sequence[int],
    ) -> None:  # fmt: skip
        self._render, self._tokenize, self._is_blank = render, tokenize, is_blank
        self._special = frozenset(special_ids) - frozenset(bos)

    def find(self) -> TurnEnds:
        """Returns the ends of turns; of kind "unknown" where no probe can be rendered."""
        for parts in (False, True):
            asked, said, more = (_message(*message, parts=parts) for message in _TALK)
            alone = self._after_stand_in([asked, said])
            if alone is not None:
                followed = self._after_stand_in([asked, said, more])
                return self._compare(alone, alone if followed is None else followed, asked)
        return TurnEnds()

    def _compare(self, alone: list[int], followed: list[int], asked: dict[str, Any]) -> TurnEnds:
        """alone, followed: what is after the assistant's words, without and with another turn there."""
        same = common(alone, followed)
        own = [token for token in alone[:same] if token in self._special]
        if own:
            ending = alone[same:]
            has_more = any(token in self._special for token in ending)
            return TurnEnds("own", own[-1], tuple(ending) if has_more else ())
        here, there, begin = self._up_to_special(alone[same:]), self._up_to_special(followed[same:]), self._begin(asked)
        if there[-1:] == (begin,):  # it begins any turn, and ends none
            there = ()
        if here:
            return TurnEnds("by place" if there else "unknown", here[-1])
        if not there or not all(self._is_blank(token) for token in alone[same:]):
            return TurnEnds()
        return TurnEnds("next turn", there[-1], (), begin, there, self._after_call(asked))

    def _after_call(self, asked: dict[str, Any]) -> tuple[int, ...]:
        """Returns what a tool's answer begins with, up to its first special token."""
        call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        answer = {"role": "tool", "content": "7", "name": "f", "tool_call_id": CALL["id"]}
        alone, followed = self._text([asked, call]), self._text([asked, call, answer])
        if alone is None or followed is None or not followed.startswith(alone):
            return ()
        return self._up_to_special(self._tokenize(followed[len(alone) :]))

    def _begin(self, asked: dict[str, Any]) -> int | None:
        """Returns the first special token of the generation prompt."""
        alone, prompt = self._text([asked]), self._text([asked], prompt=True)
        if alone is None or prompt is None or not prompt.startswith(alone):
            return None
        return next((token for token in self._tokenize(prompt[len(alone) :]) if token in self._special), None)

    def _up_to_special(self, ids: list[int]) -> tuple[int, ...]:
        """Returns the ids up to and with the first special token; none where it is not the first that is no space."""
        for i, token in enumerate(ids):
            if token in self._special:
                return tuple(ids[: i + 1])
            if not self._is_blank(token):
                break
        return ()

    def _after_stand_in(self, messages: list[dict[str, Any]]) -> list[int] | None:
        """The text is tokenized alone: it begins with a special token, over which no token reaches."""
        _, found, after = (self._text(messages) or "").partition(STAND_IN)
        return self._tokenize(after) if found else None

    def _text(self, messages: list[dict[str, Any]], *, prompt: bool = False) -> str | None:
        try:
            return self._render(messages, prompt=prompt)
        except BadRow:  # the template wants another conversation than this
            return None


_TALK = (("user", "x"), ("assistant", STAND_IN), ("user", "7"))


def _message(role: str, text: str, *, parts: bool) -> dict[str, Any]:
    """parts: as templates of models that read images want it."""
    return {"role": role, "content": [{"type": "text", "text": text}] if parts else text}


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many tokens both sequences begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
