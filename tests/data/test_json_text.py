"""Values that rows have as JSON text become what the same rows have as objects, in every command's reader."""

import json

import pytest

from mrl.data.encode import Encoder
from mrl.data.formats import Chat
from mrl.data.prompts import TurnEncoder
from mrl.errors import DataError
from tests.data.test_fields import dataset
from tests.data.tiny_tokenizers import make_tokenizer, turns, write_jsonl


def template(arguments: str) -> str:
    """A template that writes the arguments of a call `c` with a Jinja text."""
    return (
        "{% if tools %}{{ tools | tojson }}<|im_end|>{% endif %}{% if loud is defined %}LOUD{{ loud }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ 'HAS ' if m.tool_calls is defined }}{% for call in m.tool_calls or [] %}{% set c = call.function or call %}CALL "
        + arguments
        + "{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


TOJSON = template("{{ c.arguments | tojson }}")
PRINTS = template("{{ c.arguments }}")
JOINS = template("{{ 'A ' + c.arguments }}")
ITEMS = template("{% for k, v in c.arguments | items %}{{ k }}={{ v }};{% endfor %}")
EITHER = template("{{ c.arguments if c.arguments is string else c.arguments | tojson }}")
CITY = {"city": "Paris", "when": [1, {"a": None}]}
AS_JSON = json.dumps(CITY)
TOOL = {"type": "function", "function": {"name": "fox", "parameters": {"type": "object", "properties": {}}}}
ASK, ANSWER = turns("hello", "dog")
EACH = {"messages": [ASK, ANSWER], "tools": [TOOL], "chat_template_kwargs": {"loud": 5}}


def talk(arguments, *, flat=False):
    call = {"name": "fox", "arguments": arguments}
    calls = [call if flat else {"id": "call00001", "type": "function", "function": call}]
    return [ASK, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "4"}, ANSWER]


def rendered(messages, template, tmp_path, reader=Encoder):
    if reader is Encoder:  # a row
        path = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}])
        found = dataset(path, "sft", template).load(0).ids
    else:
        found = TurnEncoder(make_tokenizer(template)).prompt(
            Chat([{**m, "content": m["content"] or ""} for m in messages[:3]])
        )
    return make_tokenizer(template).decode(found)


@pytest.mark.parametrize(
    ("flat", "given", "reader"),
    [(False, CITY, Encoder), (True, AS_JSON, Encoder), (False, AS_JSON, TurnEncoder), (True, CITY, TurnEncoder)],
)
@pytest.mark.parametrize(
    ("template", "written"),
    [
        (TOJSON, AS_JSON), (EITHER, AS_JSON), (PRINTS, AS_JSON), (JOINS, "A " + AS_JSON),
        (ITEMS, "city=Paris;when=[1, {'a': None}];"),
    ],
    ids=["tojson", "either", "prints", "joins", "items"],
)  # fmt: skip
def test_arguments_are_written_as_json_once_whatever_the_template_takes(
    tmp_path, template, written, reader, given, flat
):
    assert f"CALL {written}<|im_end|>" in rendered(talk(given, flat=flat), template, tmp_path, reader)


@pytest.mark.parametrize(
    ("given", "template", "written"),
    [
        ("print(1)", TOJSON, '"print(1)"'),  # code, as of an interpreter
        ("[1, 2]", TOJSON, '"[1, 2]"'),
        ('{"a": 1', PRINTS, '{"a": 1'),
        ("", TOJSON, "{}"),  # OpenAI's API of a call without arguments
        ("", JOINS, "A "),
        ('{"a":1}', JOINS, 'A {"a":1}'),  # text stays as it is
        (["fox"], PRINTS, '["fox"]'),
        (["fox"], TOJSON, '["fox"]'),
        (None, PRINTS, "null"),
        (5, JOINS, "A 5"),
    ],
)
def test_text_that_is_no_object_stays_text(tmp_path, given, template, written):
    assert f"CALL {written}<|im_end|>" in rendered(talk(given), template, tmp_path)


def test_text_that_a_template_cannot_take_is_told_by_its_form(tmp_path):
    with pytest.raises(DataError, match=r"a.jsonl:1: .*put turns and calls in the order and form that it wants"):
        rendered(talk("print(1)"), ITEMS, tmp_path)


def as_text(row, *names):
    return {name: json.dumps(value) if name in names else value for name, value in row.items()}


CALLS_AS_TEXT = [{**m, "tool_calls": json.dumps(m["tool_calls"])} if "tool_calls" in m else m for m in talk(CITY)]
CALL_AS_TEXT = [
    {**m, "tool_calls": [json.dumps(call) for call in m["tool_calls"]]} if "tool_calls" in m else m for m in talk(CITY)
]
ROWS = {
    "messages": (as_text(EACH, "messages"), EACH),
    "kwargs": (as_text(EACH, "chat_template_kwargs"), EACH),
    "tools": (as_text(EACH, "tools"), EACH),
    "list of tools": ({**EACH, "tools": [json.dumps(TOOL)]}, EACH),
    "parameters": (
        {**EACH, "tools": [{"type": "function", "function": as_text(TOOL["function"], "parameters")}]}, EACH,
    ),
    "calls": ({**EACH, "messages": CALLS_AS_TEXT}, {**EACH, "messages": talk(CITY)}),
    "call": ({**EACH, "messages": CALL_AS_TEXT}, {**EACH, "messages": talk(CITY)}),
    "an empty list of calls": ({"messages": [ASK, {**ANSWER, "tool_calls": []}]}, {"messages": [ASK, ANSWER]}),
    "no calls": ({"messages": [ASK, {**ANSWER, "tool_calls": "[]"}]}, {"messages": [ASK, ANSWER]}),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_json_text_in_a_conversation_is_its_value(tmp_path, name):
    file = write_jsonl(tmp_path / "a.jsonl", ROWS[name])
    rows, prompts = (dataset(file, command, TOJSON) for command in ("sft", "ppo"))
    assert rows.load(0) == rows.load(1)
    assert (prompts.load(0).tokens, prompts.load(0).content) == (prompts.load(1).tokens, prompts.load(1).content)
    assert prompts.load(0).row == ROWS[name][0]  # rewards get the row


@pytest.mark.parametrize("fields", [("prompt", "chosen", "rejected"), ("chosen", "rejected")])
def test_json_text_in_answers_is_a_conversation(tmp_path, fields):
    row = {"prompt": [ASK], "chosen": [ANSWER], "rejected": turns("", "fox")[1:]}
    if "prompt" not in fields:
        row = {name: [ASK, *row[name]] for name in fields}
    file = write_jsonl(tmp_path / "a.jsonl", [as_text(row, *fields), row])
    pairs, scored = (dataset(file, command) for command in ("dpo", "bradley_terry"))
    assert pairs.load(0) == pairs.load(1) and scored.load(0) == scored.load(1)


OTHER = ['{"role": "user"}', "[1, 2]", "[]", '[{"content": "role"}]', '[{"role":']


@pytest.mark.parametrize(
    ("prompt", "completion"), [*zip(OTHER, OTHER, strict=True), ("Write a chat", json.dumps([ASK, ANSWER]))]
)
def test_other_json_and_text_beside_text_stay_text(tmp_path, prompt, completion):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "completion": completion}])
    text = make_tokenizer().decode(dataset(file, "sft").load(0).ids)
    assert f"user\n{prompt}<|im_end|>" in text and f"assistant\n{completion}<|im_end|>" in text


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**EACH, "tools": ["fox"]}, r"tools\[0\] is a string that is not JSON"),
        ({**EACH, "tools": "{}"}, "tools is an empty dict; give a list of function schemas"),
        ({**EACH, "chat_template_kwargs": "thinking"}, "chat_template_kwargs is a string that is not JSON"),
        ({**EACH, "chat_template_kwargs": "[1]"}, "chat_template_kwargs is a list; give an object"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": "fox()"}]}, r"messages\[1\].tool_calls is a string that is not"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": ["fox"]}]}, r"messages\[1\].tool_calls\[0\] is a string that"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": 5}]}, r"messages\[1\].tool_calls is 5; give a list of calls"),
    ],
)
def test_text_that_has_to_be_json_is_refused_where_it_is_not(tmp_path, row, says):
    with pytest.raises(DataError, match=says):
        dataset(write_jsonl(tmp_path / "a.jsonl", [row]), "sft", TOJSON).load(0)
