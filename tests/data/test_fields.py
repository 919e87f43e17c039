"""Fields of a row beside its messages: `system` and `history` become turns, and what nothing reads is listed."""

import dataclasses

import pytest
from tokenizers import normalizers

from mrl.config.dpo import PreferenceDataConfig
from mrl.config.ppo import PromptsConfig
from mrl.config.rm import ScoredDataConfig
from mrl.config.schema import DataConfig
from mrl.data.dataset import SFTDataset
from mrl.data.formats import Chat, parse_prompt
from mrl.data.preferences import PreferenceDataset
from mrl.data.prompts import PromptDataset, TurnEncoder
from mrl.data.scored import ScoredDataset
from mrl.errors import DataError
from tests.data import tiny_tokenizers
from tests.data.tiny_tokenizers import CHATML, make_tokenizer, trained_text, turns, write_jsonl

SYSTEM = "Answer in French."
SYSTEM_TURN = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
HISTORY = [["What is 2+2?", "4"], ["And 1+1?", "2"]]
ASKED, SAID = turns("Two?", "deux")
PAIRS = {
    "texts": {"prompt": "Two?", "chosen": "deux", "rejected": "two"},
    "messages": {"prompt": [ASKED], "chosen": [SAID], "rejected": turns("", "two")[1:]},
    "conversations": {"chosen": [ASKED, SAID], "rejected": turns("Two?", "two")},
}
# (command, what its rows are called, a row)
ROWS = [
    *(("sft", name, row) for name, row in {
        "messages": {"messages": [ASKED, SAID]}, "pair": {"prompt": "Two?", "completion": "deux"},
        "message lists": {"prompt": [ASKED], "completion": [SAID]}, "alpaca": {"instruction": "Two?", "output": "deux"},
    }.items()),
    *(("dpo", name, row) for name, row in PAIRS.items()),
    ("dpo", "unpaired", {"prompt": "Two?", "completion": "deux", "label": True}),
    *(("bradley_terry", name, row) for name, row in PAIRS.items()),
    ("regression", "graded", {"prompt": "Two?", "completion": "deux", "score": 1.0}),
    ("steps", "steps", {"prompt": "Two?", "completions": ["un", "deux"], "labels": [False, True]}),
    *(("ppo", name, row) for name, row in {
        "text": {"prompt": "Two?"}, "list": {"prompt": [ASKED]}, "messages": {"messages": [ASKED]},
        "alpaca": {"instruction": "Two?"},
    }.items()),
]  # fmt: skip
IDS = [f"{command}-{name}" for command, name, _ in ROWS]


def dataset(path, command, template=tiny_tokenizers.CHATML, **keys):
    """The rows of a file as a command reads them."""
    tokenizer = make_tokenizer(template)
    keys = {"train": str(path), **keys}
    if command == "sft":
        return SFTDataset(DataConfig(max_length=512, **keys), tokenizer)
    if command == "dpo":
        return PreferenceDataset(PreferenceDataConfig(max_length=512, **keys), tokenizer, paired=False)
    if command == "ppo":
        return PromptDataset(PromptsConfig(**keys), tokenizer)
    config = ScoredDataConfig(max_length=512, **keys)
    return ScoredDataset(config, tokenizer, loss=command, pad_token_id=tokenizer.eos_token_id)


def ids_of(item) -> list[list[int]]:
    if hasattr(item, "tokens"):
        return [item.tokens]
    parts = getattr(item, "answers", None) or getattr(item, "sequences", None) or [item]
    return [part.ids for part in parts]


def loaded(folder, command, row, template=tiny_tokenizers.CHATML, **keys):
    path = tiny_tokenizers.write_jsonl(folder / "a.jsonl", [row])
    return dataset(path, command, template, **keys).load(0)


@pytest.mark.parametrize(("command", "name", "row"), ROWS, ids=IDS)
def test_system_is_the_system_message_in_every_format(tmp_path, command, name, row):
    text = lambda item: [make_tokenizer().decode(ids) for ids in ids_of(item)]  # noqa: E731
    plain, with_system = loaded(tmp_path, command, row), loaded(tmp_path, command, {**row, "system": SYSTEM})
    assert text(with_system) == [SYSTEM_TURN + one for one in text(plain)]
    assert ids_of(with_system) == ids_of(loaded(tmp_path, command, row, system=SYSTEM)), "as data.system writes it"
    if command in ("sft", "dpo"):
        parts = zip(*(getattr(item, "answers", [item]) for item in (plain, with_system)), strict=True)
        assert all(trained_text(make_tokenizer(), one) == trained_text(make_tokenizer(), other) for one, other in parts)
    for empty in ("", None):
        assert ids_of(loaded(tmp_path, command, {**row, "system": empty})) == ids_of(plain)
    if command != "ppo":  # there both are one error, as with a system message
        assert ids_of(loaded(tmp_path, command, {**row, "system": SYSTEM}, system="x")) == ids_of(with_system)


@pytest.mark.parametrize(
    ("command", "more", "template", "says"),
    [
        ("sft", {"system": ["x"]}, tiny_tokenizers.CHATML, "a.jsonl:1: system is a list; give a string"),
        ("sft", {"system": SYSTEM}, None, "a.jsonl:1: has a field system or history, and the tokenizer has no chat"),
        ("ppo", {"system": SYSTEM}, None, "a.jsonl:1: has a field system or history, and the tokenizer has no chat"),
        ("ppo", {"system": SYSTEM, "prompt": [{"role": "developer", "content": "x"}, ASKED]}, tiny_tokenizers.CHATML,
         "a.jsonl:1: has a field system and a system message"),
    ],
)  # fmt: skip
def test_system_that_cannot_be_written_is_a_bad_row(tmp_path, command, more, template, says):
    with pytest.raises(DataError, match=says) as error:
        loaded(tmp_path, command, {"prompt": "Two?", "completion": "deux", **more}, template)
    assert error.value.may_be_skipped


def test_history_becomes_turns_that_train(tmp_path):
    row = {"instruction": "And 3+3?", "input": "Go.", "output": "6", "system": SYSTEM, "history": HISTORY}
    messages = turns("What is 2+2?", "4", "And 1+1?", "2", "And 3+3?\n\nGo.", "6", system=SYSTEM)
    for loss_on in ("assistant", "last", "all", ["user", "assistant"]):
        keys = {"loss_on": tuple(loss_on) if isinstance(loss_on, list) else loss_on}
        found, expected = (loaded(tmp_path, "sft", one, **keys) for one in (row, {"messages": messages}))
        assert (found.ids, list(found.mask)) == (expected.ids, list(expected.mask))
    ends = [f"{text}<|im_end|>" for text in ("4", "2", "6")]
    assert trained_text(make_tokenizer(), loaded(tmp_path, "sft", row)) == ends
    without = {name: value for name, value in row.items() if name != "history"}
    for empty in ([], None):
        assert loaded(tmp_path, "sft", {**without, "history": empty}) == loaded(tmp_path, "sft", without)
    prompt = loaded(tmp_path, "ppo", row)
    assert make_tokenizer().decode(prompt.tokens) == (
        make_tokenizer().apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    )
    for wrong in (5, [["a"]], [["", "b"]]):
        with pytest.raises(DataError, match=r"a.jsonl:1: history(\[0\])? is ") as error:
            loaded(tmp_path, "sft", {**row, "history": wrong})
        assert error.value.may_be_skipped


@pytest.mark.parametrize(("command", "name", "row"), [row for row in ROWS if row[0] == "ppo"])
def test_prompts_keep_their_fields_and_are_asked_again_as_they_were(tmp_path, command, name, row):
    """Reward models, environments and saved rollouts ask for the conversation of a prompt again."""
    row = {**row, "system": SYSTEM, "answer": "2"} | ({"history": HISTORY} if name == "alpaca" else {})
    prompt = loaded(tmp_path, "ppo", row)
    assert prompt.row == row
    encoder = TurnEncoder(make_tokenizer())
    assert encoder.prompt(prompt.conversation) == prompt.tokens
    saved = dataclasses.replace(
        prompt, content=[*prompt.content] if isinstance(prompt.content, list) else prompt.content
    )
    assert encoder.prompt(saved.conversation) == prompt.tokens
    other = prompt.with_conversation("Three?")  # of an environment
    assert not isinstance(other, Chat) and [m["role"] for m in other.chat.messages] == ["system", "user"]
    given = prompt.with_conversation([{"role": "system", "content": "x"}, ASKED])
    assert isinstance(given, Chat) and [m["content"] for m in given.messages] == ["x", "Two?"]
    assert parse_prompt({"prompt": "Two?"}, "prompt").chat.messages == [ASKED]


def test_what_a_format_reads_decides_what_is_listed(tmp_path):
    every = {"system": "x", "history": HISTORY, "margin": 1.0, "score": 1.0, "tools": [], "images": [], "teacher": "x"}
    for command, row, unread in [
        ("sft", {"text": "a"}, "system, history, margin, score, tools, images, teacher"),
        ("sft", {"input_ids": [5, 6]}, "system, history, margin, score, tools, images, teacher"),
        ("sft", {"messages": [ASKED, SAID]}, "history, margin, score, teacher"),
        ("sft", {"instruction": "a", "output": "b"}, "margin, score, tools, images, teacher"),
        ("dpo", PAIRS["messages"], "history, margin, score, teacher"),
        ("bradley_terry", PAIRS["texts"], "history, score, images, teacher"),
    ]:
        path = tiny_tokenizers.write_jsonl(tmp_path / "a.jsonl", [{**row, **every}])
        assert dataset(path, command).unread_fields() == [f"{path}:1: nothing reads its fields {unread}"]
    row = {"prompt": "Two?", "completion": "deux", "system": "x", "weight": 2, "source_unused": "web"}
    path = tiny_tokenizers.write_jsonl(tmp_path / "a.jsonl", [row])
    assert dataset(path, "sft").unread_fields() == dataset(path, "ppo").unread_fields() == []


NOTHING = ("\n", " \u200b \t")


@pytest.mark.parametrize("bos", [False, True])
def test_a_text_of_no_tokens_is_a_bad_row(tmp_path, monkeypatch, bos):
    """A tokenizer may drop white space and characters without width: nothing but EOS would be left to learn."""

    def dropping(template):
        made = tiny_tokenizers.make_tokenizer(template, bos=bos)
        dropped = [normalizers.Replace("\u200b", ""), normalizers.Strip()]
        made.backend_tokenizer.normalizer = normalizers.Sequence(dropped)
        return made

    monkeypatch.setattr("tests.data.test_fields.make_tokenizer", dropping)
    rows = [
        ("sft", {"text": "NOTHING"}), ("sft", {"prompt": "a:", "completion": "NOTHING"}),
        ("dpo", {"prompt": "a:", "chosen": "b", "rejected": "NOTHING"}),
        ("bradley_terry", {"chosen": "NOTHING", "rejected": "a"}), ("ppo", {"prompt": "NOTHING"}),
    ]  # fmt: skip
    for command, row in rows:
        for text in NOTHING:
            one = {name: text if value == "NOTHING" else value for name, value in row.items()}
            with pytest.raises(DataError, match="a.jsonl:1: .* (text|answer|prompt) of no tokens") as error:
                loaded(tmp_path, command, one, template=None)
            assert error.value.may_be_skipped


# ------------------------------------------------------------------------------ fields that a chat template leaves out


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
