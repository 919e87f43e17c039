"""How a chat template ends the turns of an assistant.

A probe conversation is rendered with nothing after the assistant's turn, and with another turn after it.

- Most templates end a turn with a special token, whatever follows (ChatML, Llama 3). Some write more after the last
  turn of all (Phi-3: EOS); it is no part of the turn.
- Some end the last turn with another token than earlier ones (gpt-oss: <|return|>, and <|end|> before).
- Some write no end. The next turn's first special token then ends this one (GLM-4.5: <|user|>, and <|observation|>
  after a turn that calls tools). It belongs to the turn.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from mrl.data.files import BadRow

PROBE_CONTENT = "a-turn-of-the-assistant"
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}


@dataclasses.dataclass(frozen=True)
class TurnEnds:
    """The ends of the assistant's turns in a chat template, as token ids."""

    kind: Literal["own", "by place", "next turn", "unknown"] = "unknown"
    last: int | None = None  # ends the last turn of a conversation
    ending: tuple[int, ...] = ()  # what follows that turn where a conversation ends, and is no part of it
    call: int | None = None  # of kind "next turn": ends a turn that calls tools
    begin: int | None = None  # of kind "next turn": begins a turn of the assistant

    @property
    def end_tokens(self) -> frozenset[int]:
        return frozenset(token for token in (self.last, self.call) if token is not None)

    def missing_end(self, *, calls: bool) -> list[int]:
        """Returns the tokens missing after a conversation's last assistant turn. calls: that turn calls tools."""
        end = self.call if calls and self.call is not None else self.last
        return [end] if self.kind == "next turn" and end is not None else []


@dataclasses.dataclass(frozen=True)
class Probe:
    """Finds the ends of turns in renderings of probe conversations."""

    render: Callable[..., str]  # the text of messages, with the generation prompt where `prompt`; raises BadRow
    tokenize: Callable[[str], list[int]]
    special_ids: Collection[int]  # without BOS, which ends nothing

    def find(self) -> TurnEnds:
        """Returns the ends of turns; of kind "unknown" where no probe can be rendered."""
        begins = ((("user", "x"),), (("system", "x"), ("user", "x")))  # some want a system message
        for begin, parts in itertools.product(begins, (False, True)):  # templates of models that read images want parts
            talk = [
                {"role": role, "content": [{"type": "text", "text": text}] if parts else text}
                for role, text in (*begin, ("assistant", PROBE_CONTENT), ("user", "7"))
            ]
            _, found, rest = self._text(talk[:-1]).partition(PROBE_CONTENT)
            if not found:
                continue
            alone = followed = self.tokenize(rest)
            _, found, rest = self._text(talk).partition(PROBE_CONTENT)
            if found:
                followed = self.tokenize(rest)
            return self._compare(alone, followed, asked=talk[:-2])
        return TurnEnds()

    def _compare(self, alone: list[int], followed: list[int], asked: list[dict[str, Any]]) -> TurnEnds:
        """Finds the ends. alone, followed: the tokens after the assistant's words, without and with another turn
        there."""
        same = common_prefix_length(alone, followed)
        own = [token for token in alone[:same] if token in self.special_ids]
        if own:
            ending = tuple(alone[same:]) if any(token in self.special_ids for token in alone[same:]) else ()
            return TurnEnds("own", own[-1], ending)
        begin = self._first_special(self._added(asked, asked, prompt=True))
        here = self._first_special(alone[same : same + 1])
        there = self._first_special(followed[same : same + 1])
        if there == begin:  # it begins any turn, and ends none
            there = None
        if there is None:
            return TurnEnds("unknown", here)
        if here is not None:
            return TurnEnds("by place", here)
        called = [*asked, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
        answer = {"role": "tool", "content": "7", "name": "f", "tool_call_id": CALL["id"]}
        after_call = self._first_special(self._added(called, [*called, answer])[:1])
        return TurnEnds("next turn", there, call=after_call, begin=begin)

    def _added(self, part: list[dict[str, Any]], whole: list[dict[str, Any]], *, prompt: bool = False) -> list[int]:
        """Returns the tokens of `whole`'s rendering after `part`'s; [] if it does not begin with that."""
        before, after = self._text(part), self._text(whole, prompt=prompt)
        return self.tokenize(after[len(before) :]) if before and after.startswith(before) else []

    def _first_special(self, ids: Sequence[int]) -> int | None:
        return next((token for token in ids if token in self.special_ids), None)

    def _text(self, messages: list[dict[str, Any]], *, prompt: bool = False) -> str:
        """Returns a rendering; "" of a conversation that the template does not take."""
        try:
            return self.render(messages, prompt=prompt)
        except BadRow:
            return ""


def common_prefix_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns how many items both sequences begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
