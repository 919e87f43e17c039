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
from tests.data.tiny_tokenizers import make_tokenizer, trained_text, turns

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
