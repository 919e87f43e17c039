"""What a chat template leaves out of rows is said, and is an error where nothing of a turn is left."""

import pytest

from mrl.errors import DataError
from tests.data.test_fields import dataset
from tests.data.tiny_tokenizers import CHATML, make_tokenizer, trained_text, turns, write_jsonl

USER, ANSWER = turns("hello", "dog")
THINKS = {**ANSWER, "reasoning_content": "fox"}
CALL = [{"type": "function", "function": {"name": "fox", "arguments": {"city": "Paris"}}}]
TOOLS = [{"type": "function", "function": {"name": "fox", "parameters": {}}}]
ALL = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
NO_TOOL_TURNS = (
    "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


def notes(tmp_path, *rows, template=CHATML, reader="sft"):
    return dataset(write_jsonl(tmp_path / "a.jsonl", rows), reader, template).template_notes()


ROW = {"messages": [USER, ANSWER]}
LEFT = {
    "reasoning_content of a message": {"messages": [USER, THINKS]},
    "tools": {**ROW, "tools": TOOLS},
    "chat_template_kwargs.loud": {**ROW, "chat_template_kwargs": {"loud": 7, "enable_thinking": True}},
    "tool_calls of a message": {"messages": [USER, {**ANSWER, "tool_calls": CALL}]},
    "tool_call_id of a message": {"messages": [USER, {"role": "tool", "content": "4", "tool_call_id": "c1"}, ANSWER]},
}
UNWRITTEN = ("loud", "tool_call_id of a message")


@pytest.mark.parametrize("field", LEFT)
def test_a_field_that_changes_nothing_is_one_line_and_one_that_is_written_none(tmp_path, field):
    said = notes(tmp_path, LEFT[field], LEFT[field])
    first, *more = [line for line in said if "enable_thinking" not in line]
    assert f"a.jsonl:1: the chat template writes nothing of {field}; name another" in first and not more
    others = [line for line in notes(tmp_path, LEFT[field], template=ALL) if "enable_thinking" in line]
    written = notes(tmp_path, LEFT[field], template=ALL)
    assert not others, "a variable that the template asks for may change nothing"
    assert [line for line in written if field in line] == (written if field.endswith(UNWRITTEN) else [])


def test_a_row_that_has_nothing_beside_its_content_says_nothing(tmp_path):
    assert notes(tmp_path, ROW) == [] and notes(tmp_path, {"prompt": "hello", "completion": "dog"}) == []


def test_turns_of_a_role_that_is_left_out(tmp_path):
    row = {"messages": [USER, ANSWER, {"role": "tool", "content": "4"}, ANSWER]}
    [line] = notes(tmp_path, row, template=NO_TOOL_TURNS)
    assert "writes nothing of messages of the role tool" in line


def test_a_role_that_may_be_misspelt(tmp_path):
    row = {"messages": [USER, {"role": "assitant", "content": "4"}, ANSWER]}
    [line] = notes(tmp_path, row)
    assert "a.jsonl:1: the role 'assitant' is not usual; one of system, " in line


@pytest.mark.parametrize("reader", ["sft", "ppo"])
def test_a_system_message_of_rows_of_text_that_is_left_out(tmp_path, reader):
    row = {"prompt": "hello", "completion": "dog", "system": "quick"}
    template = CHATML.replace("in messages", "in messages if m.role != 'system'")
    [line] = notes(tmp_path, row, template=template, reader=reader)
    assert "writes nothing of messages of the role system" in line
    assert notes(tmp_path, row, reader=reader) == []


def test_a_row_whose_arguments_are_refused_is_skipped_where_bad_rows_are(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{**ROW, "chat_template_kwargs": {"tokenize": True}}, ROW])
    assert dataset(file, "sft", on_bad_row="skip").notes() == []


def test_a_field_that_some_of_the_first_rows_need_is_no_line(tmp_path):
    """As Qwen3, which writes the reasoning of the last turn alone."""
    last = ALL.replace("is defined %}<think>", "is defined and loop.last %}<think>")
    early = {"messages": [USER, THINKS, USER, ANSWER]}
    assert notes(tmp_path, early, {"messages": [USER, THINKS]}, template=last) == []
    assert len(notes(tmp_path, early, early, template=last)) == 1


@pytest.mark.parametrize("more", [{"reasoning_content": "fox"}, {"tool_calls": CALL}])
def test_a_turn_of_which_nothing_is_left_is_an_error(tmp_path, more):
    empty = {"role": "assistant", "content": "", **more}
    row = {"messages": [USER, empty, USER, ANSWER]}
    says = rf"a.jsonl:1: messages\[1\]: the chat template leaves out {next(iter(more))}"
    file = write_jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError, match=says):
        dataset(file, "sft", on_bad_row="skip").load(0)
    example = dataset(file, "sft", ALL).load(0)
    assert len(trained_text(make_tokenizer(), example)) == 2


def test_an_argument_of_the_call_itself_is_no_variable(tmp_path):
    """`max_length` would cut the tokens, `chat_template` bring a template of the row's."""
    for name in ("max_length", "chat_template", "add_generation_prompt", "messages"):
        file = write_jsonl(tmp_path / "a.jsonl", [{**ROW, "chat_template_kwargs": {name: 5}}])
        with pytest.raises(DataError, match=f"chat_template_kwargs.{name}: is no variable"):
            dataset(file, "sft").load(0)


REASONS = (  # as Qwen3: the last turn has an empty reasoning, and so has a prompt of enable_thinking: false
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}OPEN{% endif %}{% endif %}"
)


def test_rows_of_one_answer_train_where_the_template_rewrites_turns(tmp_path):
    """As docs/conversations.md says."""
    row = {"messages": [USER, ANSWER] * 2}
    with pytest.raises(DataError, match="give one row for each answer and set data.loss_on to last"):
        dataset(write_jsonl(tmp_path / "a.jsonl", [row]), "sft", REASONS).load(0)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    rows = [{"messages": row["messages"][: i + 2], **off} for i in range(0, len(row["messages"]), 2)]
    found = dataset(write_jsonl(tmp_path / "b.jsonl", rows), "sft", REASONS, loss_on="last")
    assert all(trained_text(make_tokenizer(), found.load(i)) == ["dog<|im_end|>"] for i in range(len(rows)))
