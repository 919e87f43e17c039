"""From the content of a row to token ids and the mask of those that train; never by guessing.

A *conversation* goes through the tokenizer's chat template. `data.loss_on` says what trains: every assistant turn, the
last one, those of a list of roles, or everything. Its tokens are found in one of two ways:

- The template has `{% generation %}` markers: they say it. Every assistant turn must have one marked span.
- Otherwise the conversation is rendered up to each assistant turn, with the generation prompt that the model will get,
  and up to the turn's end. Both must agree, token by token, with the rendering of the whole. They do not agree if a
  template rewrites earlier turns (some drop the reasoning of all but the last). The error shows the difference.

An assistant turn trains from the first token after the generation prompt up to and with its end-of-turn token, the last
special token of the turn. White space that a template puts after it ("\\n" after <|im_end|>) does not train, since
generation has stopped by then; inside generation markers it does. A turn whose end-of-turn token would not train is
an error, because the model would not learn to stop. mrl/data/ends.py finds the end of a turn, since templates differ.
An ending of the whole rendering is no part of the last turn. The next turn's token ends a turn that has no other.

A message of another role than assistant trains from the first token of its content, up to and with its end-of-turn
token where the template writes one. Its content begins at the first difference from renderings with other contents in
its place. A message's `weight` multiplies what its tokens count in the loss; one of weight 0 does not train.

A *pair* of strings (prompt_completion, alpaca) becomes a user and an assistant turn if the tokenizer has a chat
template. Without one the two strings are joined as they are and the EOS token ends them, as in TRL. A template file of
`{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}` gives the
same on a tokenizer that has its own. The prompt must keep its tokens when the completion follows it. loss_on: assistant
and last train the completion.

A *text* trains whole and ends with EOS. The tokenizer's BOS comes first exactly once: templates write their own, and a
text or prompt that begins with it gets no second one. *Token ids* stay as they are; without labels or mask all train.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import threading
from collections.abc import Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from mrl.config.keys import join_names
from mrl.config.sources import LossOn
from mrl.data.ends import Probe, TurnEnds, common_prefix_length
from mrl.data.files import BadRow
from mrl.data.formats import SYSTEM_ROLES, Chat, Pair, Text, Tokens, check_plain, with_system
from mrl.data.tokenizer import syntax_error
from mrl.data.tool_calls import fit_arguments
from mrl.errors import DataError, ModelError

# transformers compiles a chat template once per process and keeps the positions of its generation markers on the
# compiled object while it renders, so two threads must not render at once.
_RENDERING = threading.Lock()

PROBE_CONTENTS = ("a", "7")
"""Contents that stand in for a message's own, and begin with different tokens."""

TEMPLATE_ARGUMENTS = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {
    "documents"
}
"""Names that transformers takes for itself: a row would cut its tokens with them, or a request bring a template of its
own, which would be run."""

PROBES = 64
"""How many probes of turn ends are remembered: rows may have template arguments of their own."""

NO_TEMPLATE = (
    "the tokenizer has no chat template, or data.chat_template: none took it away, and a conversation needs one; "
    "leave none out, name a Jinja file there, or use the tokenizer of the model's instruct version"
)


KNOWN_FIELDS = ("role", "content", "weight")


def extra_fields(message: dict[str, Any]) -> list[str]:
    """Returns the fields of a message that a template may write beside its content."""
    return [name for name, value in message.items() if name not in KNOWN_FIELDS and value not in (None, "", [], {})]


def is_blank(content: Any) -> bool:
    return isinstance(content, str) and not content.strip()


def check_system(system: str | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises DataError where data.system is set, and no chat template would render it."""
    if system is not None and tokenizer.chat_template is None:
        raise DataError("data.system", why=NO_TEMPLATE)


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Token ids of one sequence, and the weight of each in the loss, 0 where it does not train (not shifted: `mask[i]`
    belongs to `ids[i]`)."""

    ids: list[int]
    mask: Sequence[float]


class Encoder:
    """Turns parsed rows into tokens.

    system: text of a system message before conversations without one. as_rendered: a conversation is exactly the
    template's rendering. Otherwise the next turn's token is added to its end, if that token ends turns. Raises BadRow
    for a row's fault and DataError for the template's or tokenizer's.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn, system: str | None = None, *,
        as_rendered: bool = False,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self.loss_on, self.system, self.as_rendered = loss_on, system, as_rendered
        self._turn_ends: dict[str, TurnEnds] = {}
        self.has_template = tokenizer.chat_template is not None
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(special | set(tokenizer.all_special_ids))
        probe = tokenizer("x")["input_ids"]
        self.bos = [probe[0]] if tokenizer.bos_token_id is not None and probe[0] == tokenizer.bos_token_id else []

    def encode(self, content: Chat | Pair | Text | Tokens) -> Encoded:
        match content:
            case Chat():
                return self.chat(content)
            case Pair() if self.has_template:
                return self.chat(content.chat)
            case Pair():
                check_plain(content)
                return self.pair(content)
            case Text():
                encoded = self.tokenize(content.text)
                if not encoded:
                    raise BadRow(f"has a text of no tokens: {content.text!r:.40}; remove the row")
                ids = self._end(self.begin(encoded))
                return Encoded(ids, [1] * len(ids))
            case Tokens():
                return self.tokens(content)
        raise AssertionError(f"content {type(content).__name__}")

    # ------------------------------------------------------------------------------------------------ strings, ids

    def tokenize(self, text: str) -> list[int]:
        """Returns the tokens of a text, without special ones but those in the text."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def begin(self, ids: list[int]) -> list[int]:
        """Returns `ids` with the BOS in front, once, if the tokenizer begins texts with it."""
        return ids if ids[:1] == self.bos else self.bos + ids

    def _end(self, ids: list[int]) -> list[int]:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise ModelError(
                "the tokenizer has no EOS token, so a text has no end to learn; set eos_token in tokenizer_config.json"
            )
        return ids if ids[-1:] == [eos] else [*ids, eos]

    def pair(self, pair: Pair) -> Encoded:
        """Joins prompt and completion as strings, then adds EOS; the completion trains."""
        before = self.begin(self.tokenize(pair.plain_prompt))
        ids = self.begin(self.tokenize(pair.plain_prompt + pair.completion))
        if ids[: len(before)] != before:
            here, there = self.difference(before, ids)
            raise BadRow(
                f"the prompt's last tokens change when the completion follows ({here} becomes {there}); "
                "end the prompt with the colon or newline and begin the completion with the space"
            )
        if len(ids) == len(before):
            raise BadRow(f"has an answer of no tokens: {pair.completion!r:.40}; remove the row")
        ids = self._end(ids)
        if not isinstance(self.loss_on, str) and "assistant" not in self.loss_on:
            raise BadRow("has nothing to train on: the completion is the assistant's; name assistant in data.loss_on")
        trained = 0 if self.loss_on == "all" else len(before)
        return Encoded(ids, [int(i >= trained) for i in range(len(ids))])

    def tokens(self, row: Tokens) -> Encoded:
        size = len(self.tokenizer)
        for i, token in enumerate(row.ids):
            if not 0 <= token < size:
                raise BadRow(
                    f"input_ids[{i}] is {token}, but the tokenizer has {size} tokens; tokenize with the model's own "
                    "tokenizer"
                )
        mask: list[float] = [1] * len(row.ids)
        if row.mask is not None and (self.loss_on != "all" or row.weighs):
            mask = list(row.mask)
        return Encoded(list(row.ids), mask)

    # ------------------------------------------------------------------------------------------------ conversations

    def turn_ends(self, chat: Chat | None = None) -> TurnEnds:
        """Returns how the template ends an assistant's turn, with the tools and template arguments of `chat`."""
        if not self.has_template:
            return TurnEnds()
        chat = chat or Chat([])
        key = f"{bool(chat.tools)} {chat.template_kwargs}"
        if key not in self._turn_ends:
            if len(self._turn_ends) == PROBES:
                self._turn_ends.clear()
            special = self.special_ids.difference(self.bos)
            probe = Probe(functools.partial(self.render_text, chat), self.tokenize, special)
            self._turn_ends[key] = probe.find()
        return self._turn_ends[key]

    def chat(self, chat: Chat) -> Encoded:
        """Returns a conversation through the chat template; see the top of this file for what trains."""
        if not self.has_template:
            raise DataError(NO_TEMPLATE)
        chat = self.fit_tool_arguments(self.with_system(chat))
        trained = self._trained(chat)
        ids, spans = self._spans(chat, [i for i, weight in trained.items() if weight])
        if self.loss_on == "all":
            return Encoded(ids, [1] * len(ids))
        mask: list[float] = [0] * len(ids)
        for turn, (start, end) in spans.items():
            mask[start:end] = [trained[turn]] * (end - start)
        return Encoded(ids, mask)

    def with_system(self, chat: Chat) -> Chat:
        """Returns a conversation with the system message before it, where it has none and there is one."""
        if self.system is None or any(message["role"] in SYSTEM_ROLES for message in chat.messages):
            return chat
        return with_system(chat, self.system)

    def fit_tool_arguments(self, chat: Chat) -> Chat:
        """Returns a conversation with the arguments of its tool calls in the form that the template takes."""
        other = sorted(TEMPLATE_ARGUMENTS & chat.template_kwargs.keys())
        if other:
            why = "is no variable of a chat template"
            raise BadRow(f"chat_template_kwargs.{other[0]}", why=why, fix="leave it out")
        return fit_arguments(chat, lambda messages: self.render_text(chat, messages))

    def _trained(self, chat: Chat) -> dict[int, float]:
        """Returns the weight of each message that trains by its role and place, 0 among them. Raises BadRow."""
        if self.loss_on == "all":
            if any(weight is not None for weight in chat.weights):
                raise BadRow(
                    "has a weight of a message, but data.loss_on all trains everything; leave the weight out, or set "
                    "data.loss_on to assistant or a list of roles"
                )
            return {}
        roles = ("assistant",) if isinstance(self.loss_on, str) else self.loss_on
        of_roles = [i for i, m in enumerate(chat.messages) if m["role"] in roles and i >= chat.given]
        weights = chat.weights or [None] * len(chat.messages)
        for i, weight in enumerate(weights):
            if weight and i not in of_roles:
                why = "is in the prompt" if i < chat.given else f"has the role {chat.messages[i]['role']}"
                raise BadRow(
                    f"message {i} has weight {weight:g} and never trains: it {why}; give it weight 0 or none, or name "
                    "its role in data.loss_on"
                )
        if self.loss_on == "last":
            turns = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant"]
            of_roles = [i for i in turns[-1:] if i >= chat.given]
        found: dict[int, float] = {}
        for i in of_roles:
            weight = weights[i]
            found[i] = 1 if weight is None or weight == 1 else weight
        if not any(found.values()):
            seen = join_names(dict.fromkeys(message["role"] for message in chat.messages[chat.given :]))
            raise BadRow(
                f"has nothing to train on: no turn of {' or '.join(roles)} with a weight above 0 (roles: {seen}); add "
                "one, or name another role in data.loss_on"
            )
        return found

    def _spans(self, chat: Chat, wanted: list[int]) -> tuple[list[int], dict[int, tuple[int, int]]]:
        """Returns the whole rendering, and where what trains of each message `wanted` starts and ends in it."""
        turns = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant"]
        answers = [i for i in wanted if i in turns]
        if answers and self._has_markers(chat):
            ids, of_answers = self._marked_spans(chat, turns, answers)
        else:
            ids = self._ended(chat, self.render(chat, chat.messages))
            of_answers = [self._verified_span(chat, turn, ids) for turn in answers]
        spans = dict(zip(answers, of_answers, strict=True))
        for i, (start, end) in spans.items():
            message = chat.messages[i]
            fields = extra_fields(message)
            if fields and is_blank(message["content"]) and self._says_nothing(ids[start:end]):
                why = f"the chat template leaves out {' and '.join(fields)}, and only the turn's end is left"
                fix = "name a template that writes it in data.chat_template, or remove the row"
                raise DataError(f"messages[{i}]", why=why, fix=fix)
        return ids, spans | {i: self._content_span(chat, i, ids) for i in wanted if i not in spans}

    def _ended(self, chat: Chat, ids: list[int]) -> list[int]:
        """Returns a rendering of all messages, with the last turn's end if the template leaves it to the next turn."""
        last = chat.messages[-1]
        if self.as_rendered or last["role"] != "assistant":
            return ids
        return ids + self.turn_ends(chat).missing_end(calls=bool(last.get("tool_calls")))

    def _body(self, chat: Chat, whole: list[int]) -> int:
        """Returns how many tokens of a whole rendering are turns: a template's ending of all is no part of one."""
        ending = list(self.turn_ends(chat).ending)
        return len(whole) - len(ending) if ending and whole[-len(ending) :] == ending else len(whole)

    def render(self, chat: Chat, messages: list[dict[str, Any]], *, prompt: bool = False) -> list[int]:
        """Returns the token ids of `messages` (with the generation prompt if `prompt`)."""
        return list(self._apply_template(chat, messages, prompt, tokenize=True, return_dict=True)["input_ids"])

    def render_text(self, chat: Chat, messages: list[dict[str, Any]], *, prompt: bool = False) -> str:
        """Returns the text that `render` tokenizes."""
        return self._apply_template(chat, messages, prompt, tokenize=False)

    def _apply_template(self, chat: Chat, messages: list[dict[str, Any]], prompt: bool, **options: Any) -> Any:
        try:
            with _RENDERING:
                return self.tokenizer.apply_chat_template(
                    messages, tools=chat.tools, add_generation_prompt=prompt, **options, **chat.template_kwargs
                )
        except jinja2.TemplateSyntaxError as e:
            raise syntax_error(e) from e
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as e:
            raise BadRow(
                f"the chat template cannot render the conversation ({type(e).__name__}: {e}); put turns and calls in "
                "the order and form that it wants, or name another in data.chat_template"
            ) from e

    def _has_markers(self, chat: Chat) -> bool:
        template = self.tokenizer.get_chat_template(None, chat.tools)
        return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None

    def _marked_spans(self, chat: Chat, turns: list[int], wanted: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the whole rendering, and where its marked spans of the turns `wanted` start and end."""
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        out = self._apply_template(chat, chat.messages, False, **options)
        ids, marks = list(out["input_ids"]), list(out["assistant_masks"])
        edges = [i for i in range(len(marks) + 1) if (marks[i] if i < len(marks) else 0) != (marks[i - 1] if i else 0)]
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        if len(spans) != len(turns):
            raise DataError(
                f"the chat template's generation markers give {len(spans)} spans for {len(turns)} assistant turns; "
                "mark each assistant turn once in data.chat_template, or remove the markers to compare prefixes"
            )
        ids = self._ended(chat, ids)
        chosen = []
        for turn in wanted:
            start, end = spans[turns.index(turn)]
            end = self._end_at_next(chat, ids, end) or end
            chosen.append((start, end))
            if self._end_of_turn(ids, start, end) is None:
                following = self._show(ids[end : end + 1]) if end < len(ids) else "nothing"
                raise DataError(
                    f"messages[{turn}]",
                    why="the chat template's generation markers end with "
                    f"{self._show(ids[max(start, end - 3) : end])}, before the end-of-turn token "
                    f"({following} follows), so the model would not learn to stop",
                    fix="put {% endgeneration %} after that token",
                )
        return ids, chosen

    def _verified_span(self, chat: Chat, turn: int, whole: list[int]) -> tuple[int, int]:
        """Returns the start and end of the assistant message `turn` in `whole`, which holds all messages."""
        if turn == 0:
            raise BadRow(
                "messages[0] is an assistant turn, before which there is nothing to render; begin with a user turn"
            )
        before = self.render(chat, chat.messages[:turn], prompt=True)
        start = len(before)
        if whole[:start] != before:
            raise self._rewritten(turn, "up to it, with the generation prompt,", before, whole)
        is_last = turn == len(chat.messages) - 1
        after = whole if is_last else self.render(chat, chat.messages[: turn + 1])
        same = min(common_prefix_length(after, whole), self._body(chat, whole))
        # Templates may end a rendering in their own way (Phi-3: EOS after the last turn): that is no part of the turn.
        if not self._says_nothing(after[same:]):
            raise self._rewritten(turn, "to its end", after, whole)
        end = self._end_in_place(chat, after[same:], whole, same) or self._end_of_turn(whole, start, same)
        if end is None:
            raise DataError(
                f"messages[{turn}]",
                why="the chat template ends the assistant turn with "
                f"{self._show(whole[max(start, same - 3) : same])}, which is no special "
                "token, so the model would not learn to stop",
                fix="write {{ eos_token }} after the content in data.chat_template, or mark its end token special",
            )
        return start, end

    def _end_in_place(self, chat: Chat, rest: list[int], whole: list[int], same: int) -> int | None:
        """Returns the position after the token that ends an earlier turn, if the turn alone lacks it.

        rest: the rendering up to the turn from `same` on, the first position that differs from `whole`.
        """
        if not rest:
            return self._end_at_next(chat, whole, same)
        differs = rest[0] in self.special_ids and same < len(whole) and whole[same] in self.special_ids
        return same + 1 if differs and self.turn_ends(chat).kind == "by place" else None

    def _end_at_next(self, chat: Chat, whole: list[int], at: int) -> int | None:
        """Returns the position after the next turn's first token, if it ends the turn that is whole at `at`."""
        ends = self.turn_ends(chat)
        if ends.kind != "next turn" or at == len(whole) or whole[at] == ends.begin:
            return None
        return at + 1 if whole[at] in self.special_ids else None

    def _content_span(self, chat: Chat, number: int, whole: list[int]) -> tuple[int, int]:
        """Returns the start and end of the content of message `number`, of another role than assistant, in `whole`."""
        message = chat.messages[number]
        if not isinstance(message["content"], str):
            raise BadRow(
                f"messages[{number}].content is a list of parts, which trains in assistant turns alone; leave the role "
                f"{message['role']} out of data.loss_on"
            )
        after = whole if number == len(chat.messages) - 1 else self.render(chat, chat.messages[: number + 1])
        start = len(after)
        for other in PROBE_CONTENTS:  # one of them begins otherwise than the content
            stand_in = [*chat.messages[:number], {**message, "content": other}]
            start = min(start, common_prefix_length(after, self.render(chat, stand_in)))
        end = min(common_prefix_length(after, whole), self._body(chat, whole))
        if end < start or not self._says_nothing(after[end:]):
            raise self._rewritten(number, "to its end", after, whole)
        end_of_turn = self._end_of_turn(whole, start, end)
        if end_of_turn is None:
            while end > start and self._is_blank(whole[end - 1]):
                end -= 1
        return start, end if end_of_turn is None else end_of_turn

    def _end_of_turn(self, ids: list[int], start: int, end: int) -> int | None:
        """Returns the position after the last special token of ids[start:end], if only white space follows it."""
        while end > start and ids[end - 1] not in self.special_ids and self._is_blank(ids[end - 1]):
            end -= 1
        return end if end > start and ids[end - 1] in self.special_ids else None

    def _says_nothing(self, ids: Sequence[int]) -> bool:
        """Returns whether tokens are special ones and white space alone."""
        return all(token in self.special_ids or self._is_blank(token) for token in ids)

    def _is_blank(self, token: int) -> bool:
        return not self.tokenizer.decode([token]).strip()

    def _show(self, ids: list[int]) -> str:
        return repr(self.tokenizer.decode(ids))

    def difference(self, part: list[int], whole: list[int]) -> tuple[str, str]:
        """Returns the texts around the first token in which two sequences differ."""
        at = common_prefix_length(part, whole)
        return self._show(part[max(0, at - 4) : at + 6]), self._show(whole[max(0, at - 4) : at + 6])

    def _rewritten(self, turn: int, extent: str, part: list[int], whole: list[int]) -> DataError:
        here, there = self.difference(part, whole)
        return DataError(
            f"messages[{turn}]",
            why=f"the chat template rewrites turns, or a token reaches over a prompt's end: rendered {extent} it has "
            f"{here} where the whole has {there}",
            fix="put {% generation %} markers in data.chat_template, or give one row for each answer and set "
            "data.loss_on to last",
        )
