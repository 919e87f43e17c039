"""The forms a row may have, and what each becomes: a conversation, a prompt with its answer, a text, or token ids.

    format              fields                                         becomes
    messages            messages: [{role, content, ...}, ...]          Chat
                        optional: tools, chat_template_kwargs, images
    prompt_completion   prompt, completion: message lists              Chat, of which the completion trains
                        prompt, completion: strings                    Pair
    alpaca              instruction, output, optional input, history   Pair (two blank-line separated parts as prompt)
    text                text                                           Text
    tokenized           input_ids, optional one of labels (-100: not   Tokens
                        trained), loss_mask, assistant_masks,
                        completion_mask (1: trained), weights (of
                        each token in the loss)

A row of any of them may have a `weight`: what its tokens count in the loss, 1 by default, and so may a message. A row
of all but text and tokenized may have a `system`: the text of a system message. `history` is a list of [question,
answer], the turns before.

Fields that a format does not know are left alone. Content may be a list of parts, with images (mrl/data/images.py).
`mrl.data.encode` has what a Pair becomes in tokens.

A prompt for reinforcement learning is in one of three forms; whatever else the row has is for rewards and environments:

    form                fields                                         becomes
    prompt              prompt: text, or a message list                Question, or Chat
    messages            messages: what comes before the last           Chat
                        assistant turn, if that is at the end
    alpaca              instruction, optional input                    Question
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.config.keys import join_names
from mrl.data.files import BadRow, kind_of
from mrl.data.images import Image, check_parts, image_of
from mrl.data.json_text import decode_json_fields, decode_tool_calls, template_kwargs_of, tools_of
from mrl.errors import DataError

Row = dict[str, Any]

REQUIRED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
    "tokenized": ("input_ids",),
}
PROMPT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt",),
    "messages": ("messages",),
    "alpaca": ("instruction",),
}
MASK_FIELDS = ("loss_mask", "assistant_masks", "completion_mask")
ATTENDED = "attention_mask"  # tokenizers write it, with 0 at padding
WEIGHTS = "weights"
MAX_WEIGHT = 1e6
SYSTEM_ROLES = ("system", "developer")


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation."""

    messages: list[dict[str, Any]]
    given: int = 0
    """The first so many messages are the prompt and never train."""
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    images: tuple[Image, ...] = ()
    """Those of its parts of type image, in their order; the parts hold nothing but their type."""
    weights: tuple[float | None, ...] = ()
    """Of each message in the loss, None where it gives none; () where no message does."""

    @property
    def chat(self) -> Chat:
        """Itself, as a Pair and a Question have one."""
        return self


@dataclasses.dataclass(frozen=True)
class Pair:
    """A prompt and its answer. `plain_prompt` is the prompt for a tokenizer that has no chat template."""

    prompt: str
    completion: str
    plain_prompt: str
    before: tuple[dict[str, Any], ...] = ()  # messages before the prompt, which a chat template alone can render
    before_trains: bool = False  # whether they train as turns of a conversation do

    @property
    def chat(self) -> Chat:
        """The conversation that a chat template renders."""
        asked = [*self.before, {"role": "user", "content": self.prompt}]
        messages = [*asked, {"role": "assistant", "content": self.completion}]
        return Chat(messages, given=0 if self.before_trains else len(asked))


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt in text."""

    text: str
    plain: str  # the same for a tokenizer that has no chat template
    chat: Chat  # that user turn, and the row's messages before it


@dataclasses.dataclass(frozen=True)
class Text:
    text: str


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A row that is token ids already."""

    ids: list[int]
    mask: list[float] | None  # which of them train, or their weights; None where the row does not say
    weighs: bool = False  # whether the mask is weights, which data.loss_on all does not overrule


def rename_fields(row: Row, columns: Mapping[str, str]) -> Row:
    """Returns the row with the fields of `data.columns` renamed; a field that is missing or in the way is a bad row."""
    if not columns:
        return row
    for old, new in columns.items():
        if old not in row:
            raise BadRow(f"has no field {old!r}, which data.columns renames to {new!r}; it has {_fields(row)}")
        if new in row and new not in columns:
            raise BadRow(
                f"has a field {new!r} already, and data.columns renames {old!r} to it; "
                f"rename the other one too, as {{{new}: {new}_unused}}"
            )
    return {columns.get(name, name): value for name, value in row.items()}


def check_columns(columns: Mapping[str, str]) -> None:
    """Raises DataError where two fields would get one name."""
    targets = list(columns.values())
    for new in targets:
        if targets.count(new) > 1:
            raise DataError(
                "data.columns",
                why=f"renames {' and '.join(k for k, v in columns.items() if v == new)} both to {new!r}",
                fix="give each field its own name",
            )


def formats_with_fields(row: Row, formats: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the formats whose fields the row has."""
    return [name for name, fields in formats.items() if all(field in row for field in fields)]


def fitting_format(row: Row, formats: Mapping[str, Sequence[str]], otherwise: str) -> str:
    """Returns the one format whose fields the row has. Raises DataError for several, or none.

    otherwise: follows the fields in the message on none.
    """
    fits = formats_with_fields(row, formats)
    if len(fits) > 1:
        why = f"the fields {_fields(row)} fit the formats {' and '.join(fits)}; set data.format to one of them"
        raise DataError(why)
    if not fits:
        raise DataError(f"the fields {_fields(row)} {otherwise}")
    return fits[0]


def detect_format(row: Row) -> str:
    """Returns the one format whose fields the row has. Raises DataError for none or several: the user names it then."""
    known = "; ".join(f"{name}: {', '.join(fields)}" for name, fields in REQUIRED_FIELDS.items())
    hint = "rename fields with data.columns, as {question: prompt, answer: completion} or {conversations: messages}"
    return fitting_format(row, REQUIRED_FIELDS, f"fit no format ({known}); {hint}")


def detect_prompt_form(row: Row) -> str:
    """Returns the one form of prompt whose fields the row has. None or several is a DataError."""
    fits = formats_with_fields(row, PROMPT_FIELDS)
    if len(fits) != 1:
        raise DataError(
            f"the fields {_fields(row)} hold no prompt, or several (prompt: text or messages; messages; instruction); "
            "rename with data.columns, as {question: prompt}, or {messages: messages_unused}"
        )
    return fits[0]


def parse_prompt(row: Row, form: str) -> Chat | Question:
    """Returns the prompt of a row that is in `form`. Raises BadRow."""
    row, field = decode_json_fields(row), PROMPT_FIELDS[form][0]
    if field not in row:
        raise BadRow(
            f"{field} is missing or null, and prompts have it since the first row; the row has {_fields(row)}: "
            "rename with data.columns, or give all rows one form"
        )
    if form == "alpaca":
        return question(row, *_alpaca_prompt(row))
    if form == "prompt" and not isinstance(row["prompt"], list):
        text = _string(row["prompt"], "prompt", empty=False)
        return question(row, text, text)
    messages = check_messages(row[field], field)
    if form == "messages" and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1]["role"] == "assistant":
        raise BadRow(f"{field} ends with an assistant turn; let what the model is to answer come last")
    return _chat(row, messages, given=len(messages))


def question(row: Row, text: str, plain: str, history: Sequence[dict[str, Any]] = ()) -> Question:
    """Returns a text as the last user turn of a conversation with the row's tools and template arguments."""
    turns = [*history, {"role": "user", "content": text}]
    return Question(text, plain, _chat(row, turns, given=len(turns)))


def parse_row(row: Row, format: str) -> Chat | Pair | Text | Tokens:
    """Returns the content of a row that is in `format`. Raises BadRow."""
    missing = [field for field in REQUIRED_FIELDS[format] if field not in row]
    if missing:
        raise BadRow(
            f"{missing[0]} is missing or null, and the format {format} needs it; the row has {_fields(row)}: "
            "rename with data.columns, or set data.format"
        )
    row = decode_json_fields(row)
    match format:
        case "messages":
            return _chat_with_images(row, check_messages(row["messages"], "messages", parts=True), given=0)
        case "prompt_completion":
            return _prompt_completion(row)
        case "alpaca":
            prompt, plain, history = _alpaca_prompt(row)
            answer = _string(row["output"], "output", empty=False)
            return Pair(prompt, answer, plain, _before(row, history), before_trains=bool(history))
        case "text":
            return Text(_string(row["text"], "text", empty=False))
        case "tokenized":
            return _tokens(row)
    raise AssertionError(f"format {format!r}")


def row_weight(row: Row) -> float:
    """Returns what the tokens of a row count in the loss. Raises BadRow."""
    return 1 if row.get("weight") is None else _weight(row["weight"], "weight")


def _weight(value: Any, name: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_WEIGHT:  # nor NaN
        rename = "or rename the field with data.columns={weight: weight_unused}"
        raise BadRow(f"{name} is {kind_of(value)}; give a number from 0 to {MAX_WEIGHT:g}, {rename}")
    return 1 if value == 1 else float(value)


def _fields(row: Row) -> str:
    return join_names(row) or "none"


# ---------------------------------------------------------------------------------------------------- conversations


def _chat(row: Row, messages: list[dict[str, Any]], *, given: int, **more: Any) -> Chat:
    """Returns a conversation with the row's own fields. more: images and weights."""
    chat = Chat(messages, given, tools_of(row), template_kwargs_of(row), **more)
    system = _system(row)
    if system is None:
        return chat
    if any(message["role"] in SYSTEM_ROLES for message in messages):
        raise BadRow("has a field system and a system message; rename it with data.columns={system: system_unused}")
    return with_system(chat, system)


def with_system(chat: Chat, text: str) -> Chat:
    """Returns a conversation with a system message before it."""
    messages = [{"role": "system", "content": text}, *chat.messages]
    weights = (None, *chat.weights) if chat.weights else ()
    return dataclasses.replace(chat, messages=messages, given=chat.given + bool(chat.given), weights=weights)


def _system(row: Row) -> str | None:
    """Returns the text of a row's system message; None where it has none, or an empty one. Raises BadRow."""
    value = row.get("system")
    return None if value is None or value == "" else _string(value, "system")


def check_plain(content: Pair | Question) -> None:
    """Raises BadRow where the messages before a prompt need a chat template, and there is none."""
    before = content.before if isinstance(content, Pair) else content.chat.messages[:-1]
    if before:
        raise BadRow(
            "has a field system or history, and the tokenizer has no chat template to write it; name a Jinja file in "
            "data.chat_template, or rename the field with data.columns={system: system_unused}"
        )


def _chat_with_images(row: Row, messages: list[dict[str, Any]], *, given: int) -> Chat:
    """Returns the conversation with no more than the type in its parts of images, and these images beside it."""
    lists = [m["content"] for m in messages if isinstance(m["content"], list)]
    parts = [part for content in lists for part in content if part["type"] == "image"]
    waiting = sum("image" not in part for part in parts)
    images_of_row, field = row.get("images"), "images"
    beside = images_of_row if isinstance(images_of_row, list) else []
    if waiting and not beside and row.get("image") is not None:
        beside, field = [row["image"]], "image"
    if len(beside) != waiting:
        raise BadRow(
            f'has {len(beside)} images in its field {field} and {waiting} parts {{"type": "image"}} for them; '
            "give one part for each, at its place in the content"
        )
    weights = tuple(
        None if m.get("weight") is None else _weight(m["weight"], f"messages[{i}].weight")
        for i, m in enumerate(messages)
    )
    messages = [{name: value for name, value in m.items() if name != "weight"} for m in messages]
    rest = iter([image_of(value, f"{field}[{i}]") for i, value in enumerate(beside)])
    images = tuple(part["image"] if "image" in part else next(rest) for part in parts)
    bare = lambda content: [{k: v for k, v in part.items() if k != "image"} for part in content]  # noqa: E731
    bared = [{**m, "content": bare(m["content"])} if isinstance(m["content"], list) else m for m in messages]
    has_weights = any(weight is not None for weight in weights)
    return _chat(row, bared, given=given, images=images, weights=weights if has_weights else ())


def check_messages(value: Any, field: str, *, parts: bool = False) -> list[dict[str, Any]]:
    """Returns `value`, a list of messages that was found in `field`. parts: whether their content may be a list.

    Raises BadRow.
    """
    if not isinstance(value, list) or not value:
        raise BadRow(f"{field} is {kind_of(value)}; give a list of at least one {{role, content}}")
    return [_message(message, f"{field}[{i}]", parts) for i, message in enumerate(value)]


def _message(message: Any, name: str, parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRow(f"{name} is {kind_of(message)}; give an object with role and content")
    if not isinstance(message.get("role"), str):
        raise BadRow(f"{name} has no role; give role and content, of ShareGPT's from and value, too")
    message = decode_tool_calls(message, name)
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    if isinstance(content, list) and parts:
        content = check_parts(content, f"{name}.content")
        for i, part in enumerate(content):
            _string(part.get("text", ""), f"{name}.content[{i}].text")
        if len(content) > 1 or content[0]["type"] != "text":
            return {**message, "content": content}
        content = content[0]["text"]
        message = {**message, "content": content}
    says_more = bool(message.get("tool_calls") or message.get("reasoning_content"))
    _string(content, f"{name}.content", empty=message["role"] != "assistant" or says_more)
    return message


def _prompt_completion(row: Row) -> Chat | Pair:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        given = check_messages(prompt, "prompt", parts=True)
        answer = check_messages(completion, "completion", parts=True)
        return _chat_with_images(row, given + answer, given=len(given))
    prompt = _string(prompt, "prompt")
    return Pair(prompt, _string(completion, "completion", empty=False), prompt, _before(row))


def _before(row: Row, history: Sequence[dict[str, Any]] = ()) -> tuple[dict[str, Any], ...]:
    """Returns the messages before a prompt in text."""
    system = _system(row)
    return (*([] if system is None else [{"role": "system", "content": system}]), *history)


def _history(row: Row) -> list[dict[str, Any]]:
    """Returns the turns before the instruction. Raises BadRow."""
    turns: list[dict[str, Any]] = []
    pairs = row.get("history")
    if pairs is None:
        return turns
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        fix = "give lists of [question, answer], or rename the field with data.columns={history: history_unused}"
        raise BadRow(f"history is {kind_of(pairs)}; {fix}")
    for i, pair in enumerate(pairs):
        for role, text in zip(("user", "assistant"), pair, strict=True):
            turns.append({"role": role, "content": _string(text, f"history[{i}]", empty=False)})
    return turns


def _alpaca_prompt(row: Row) -> tuple[str, str, list[dict[str, Any]]]:
    """Returns the prompt with a chat template, and without one, and the turns before it."""
    history = _history(row)
    instruction = _string(row["instruction"], "instruction", empty=False)
    more = _string(row.get("input") or "", "input")
    # The prompt of Stanford Alpaca (Taori et al., 2023), which plain models of this format are trained and used with.
    if more:
        plain = (
            "Below is an instruction that describes a task, paired with an input that provides further context. Write "
            "a response that appropriately completes the request.\n\n"
            f"### Instruction:\n{instruction}\n\n### Input:\n{more}\n\n### Response:\n"
        )
        return f"{instruction}\n\n{more}", plain, history
    plain = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        f"\n\n### Instruction:\n{instruction}\n\n### Response:\n"
    )
    return instruction, plain, history


# -------------------------------------------------------------------------------------------------- strings and ids


def _string(value: Any, name: str, *, empty: bool = True) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{name} is {kind_of(value)}; give a string")
    if not empty and not value:
        raise BadRow(f"{name} is empty; give the text to train on, or remove the row")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as e:
            raise BadRow(f"{name} has half of a UTF-16 pair at character {e.start}; write the text as UTF-8") from None
    return value


def _tokens(row: Row) -> Tokens:
    ids = _integers(row["input_ids"], "input_ids")
    if (attended := row.get(ATTENDED)) is not None and 0 in (mask := _integers(attended, ATTENDED)):
        raise BadRow(f"{ATTENDED}[{mask.index(0)}] is 0; remove padding from input_ids, and the mask")
    given = [name for name in ("labels", WEIGHTS, *MASK_FIELDS) if row.get(name) is not None]
    if len(given) > 1:
        raise BadRow(f"has {' and '.join(given)}; keep the one that marks the trained tokens")
    if not given:
        return Tokens(ids, None)
    if given[0] == WEIGHTS:
        listed_weights = row[WEIGHTS] if isinstance(row[WEIGHTS], list) else []
        if len(listed_weights) != len(ids):
            raise BadRow(f"weights is {kind_of(row[WEIGHTS])}; give a list of {len(ids)} numbers, one per token")
        return Tokens(ids, [_weight(weight, f"weights[{i}]") for i, weight in enumerate(listed_weights)], weighs=True)
    values = _integers(row[given[0]], given[0])
    if len(values) != len(ids):
        raise BadRow(f"{given[0]} has {len(values)} entries and input_ids {len(ids)}; give one per token")
    if given[0] in MASK_FIELDS:
        for i, value in enumerate(values):
            if value not in (0, 1):
                raise BadRow(f"{given[0]}[{i}] is {value}; give 1 where a token trains and 0 elsewhere")
        return Tokens(ids, [int(v) for v in values])
    for i, (token, label) in enumerate(zip(ids, values, strict=True)):
        if label not in (token, -100):
            raise BadRow(
                f"labels[{i}] is {label} and input_ids[{i}] is {token}; labels are not shifted here: "
                "give each token itself, or -100 where it does not train"
            )
    return Tokens(ids, [int(label != -100) for label in values])


def _integers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not value:
        raise BadRow(f"{name} is {kind_of(value)}; give a list of integers")
    for i, x in enumerate(value):
        if not isinstance(x, int) or (isinstance(x, bool) and name not in (ATTENDED, *MASK_FIELDS)):
            raise BadRow(f"{name}[{i}] is {kind_of(x)}; give a list of integers")
    return value
