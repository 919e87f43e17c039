"""Conversations that are written in one text (`data.turns`), and raw text (`data.chat_template: none`)."""

from __future__ import annotations

import dataclasses

import pytest

from mrl.config.build import build_section
from mrl.config.schema import DataConfig
from mrl.data.dialogue import looks_like_dialogue, split_turns
from mrl.data.files import BadRow
from mrl.errors import ConfigError, DataError
from tests.data import tiny_tokenizers
from tests.data.test_fields import dataset
from tests.data.tiny_tokenizers import make_tokenizer

HH = {"user": "\n\nHuman:", "assistant": "\n\nAssistant:"}
ASKED, RIGHT, WRONG = "\n\nHuman: 1+1?\n\nAssistant:", " 2", " 3"
USER = {"role": "user", "content": "1+1?"}
RIGHT_TURN, WRONG_TURN = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}
LATER = "\n\nHuman: and 2+2?\n\nAssistant: 4"
LATER_TURNS = [{"role": "user", "content": "and 2+2?"}, {"role": "assistant", "content": "4"}]
PAIRS = [
    ({"text": ASKED + RIGHT}, {"messages": [USER, RIGHT_TURN]}),
    ({"text": (ASKED + RIGHT).lstrip()}, {"messages": [USER, RIGHT_TURN]}),
    ({"prompt": ASKED, "answer": "2"}, {"prompt": [USER], "answer": "2"}),
    ({"prompt": ASKED + "\n", "completion": RIGHT}, {"prompt": [USER], "completion": [RIGHT_TURN]}),
    (
        {"prompt": ASKED, "completion": RIGHT + LATER, "score": 1},
        {"prompt": [USER], "completion": [RIGHT_TURN, *LATER_TURNS], "score": 1},
    ),
    (
        {"chosen": ASKED + RIGHT, "rejected": ASKED + WRONG},
        {"chosen": [USER, RIGHT_TURN], "rejected": [USER, WRONG_TURN]},
    ),
    (
        {"prompt": ASKED, "chosen": RIGHT, "rejected": WRONG},
        {"prompt": [USER], "chosen": [RIGHT_TURN], "rejected": [WRONG_TURN]},
    ),
    ({"messages": [USER], "tools": []}, {"messages": [USER], "tools": []}),
    ({"prompt": [USER], "completion": [RIGHT_TURN]}, {"prompt": [USER], "completion": [RIGHT_TURN]}),
]


@pytest.mark.parametrize(("row", "made"), PAIRS)
def test_marked_texts_become_messages(row, made):
    assert split_turns(row, HH) == made
    assert split_turns(row, {}) is row


def test_a_marker_may_begin_another_and_roles_are_the_users():
    markers = {"user": "#", "assistant": "##", "system": "###"}
    made = split_turns({"text": "### be brief # 1+1? ## 2"}, markers)
    assert made == {"messages": [{"role": "system", "content": "be brief"}, USER, RIGHT_TURN]}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "1+1? 2"}, "text begins with '1+1? 2', and data.turns has the markers"),
        ({"prompt": "Hello.\n\nHuman: 1+1?"}, "prompt begins with 'Hello."),
        ({"chosen": ASKED, "rejected": ASKED + WRONG}, "chosen has an empty turn of assistant"),
        ({"prompt": ASKED, "completion": " "}, "completion has an empty turn of assistant"),
        ({"text": "\n\nHuman:\n\nAssistant: 2"}, "text has an empty turn of user"),
    ],
)
def test_what_cannot_be_told_is_a_bad_row(row, says):
    with pytest.raises(BadRow, match=says.replace("+", r"\+").replace("?", r"\?")):
        split_turns(row, HH)


def test_only_whole_conversations_look_like_one():
    assert looks_like_dialogue({"prompt": ASKED}) == "prompt"
    assert looks_like_dialogue({"chosen": ASKED + RIGHT, "rejected": ASKED + WRONG}) == "chosen"
    assert looks_like_dialogue({"instruction": "### User: a\n### Assistant:"}) == "instruction"
    for text in ("1+1?", "The Human: a study", "Assistant: is there a Human: here?", "User: only"):
        assert looks_like_dialogue({"prompt": text}) is None, text


# ------------------------------------------------------------------------------------------------- in every command

STEPS = {"completions": ["2", "so 2"], "labels": [True, True]}
ROWS = [
    ("sft", *PAIRS[0]), ("sft", *PAIRS[3]), ("ppo", *PAIRS[2]), ("dpo", *PAIRS[5]), ("dpo", *PAIRS[6]),
    ("dpo", {**PAIRS[3][0], "label": True}, {**PAIRS[3][1], "label": True}), ("bradley_terry", *PAIRS[5]),
    ("regression", *PAIRS[4]), ("steps", {"prompt": ASKED, **STEPS}, {"prompt": [USER], **STEPS}),
]  # fmt: skip


@pytest.mark.parametrize(("command", "row", "made"), ROWS)
def test_every_command_reads_them_as_the_messages_that_they_are(tmp_path, command, row, made):
    """And says of the raw text that a chat template makes one turn of it, where it is one turn."""
    marked = dataset(tiny_tokenizers.write_jsonl(tmp_path / "a.jsonl", [row]), command, turns=HH)
    plain = dataset(tiny_tokenizers.write_jsonl(tmp_path / "b.jsonl", [made]), command)
    of_rows = [
        dataclasses.replace(one, row={}, where="") if command == "ppo" else one
        for one in (marked.load(0), plain.load(0))
    ]
    assert of_rows[0] == of_rows[1]
    assert not [line for rows in (marked, plain) for line in rows.notes() if "looks like" in line]


@pytest.mark.parametrize(
    ("command", "row", "keys"),
    [
        ("sft", {"prompt": ASKED, "completion": RIGHT}, {}), ("ppo", {"prompt": ASKED}, {}),
        ("dpo", PAIRS[5][0], {"prompt_end": HH["assistant"]}), ("regression", PAIRS[4][0], {}),
    ],
)  # fmt: skip
def test_a_conversation_in_one_turn_is_said_and_none_is_raw_text(tmp_path, command, row, keys):
    path = tiny_tokenizers.write_jsonl(tmp_path / "a.jsonl", [row])
    said = [line for line in dataset(path, command, **keys).notes() if "looks like a conversation" in line]
    field = "chosen" if "chosen" in row else "prompt"
    assert len(said) == 1 and said[0].startswith(f"{path}:1: {field} looks like") and "data.turns" in said[0]
    raw = dataset(path, command, chat_template="none", **keys)
    assert not [line for line in raw.notes() if "looks like" in line]
    first = raw.load(0)
    ids = {
        "dpo": lambda: first.answers[0].ids,
        "regression": lambda: first.sequences[0].ids,
        "ppo": lambda: first.tokens,
    }
    text = make_tokenizer().decode(ids.get(command, lambda: first.ids)())
    assert text.startswith(ASKED) and "<|im_start|>" not in text


@pytest.mark.parametrize(("command", "row", "made"), [row for row in ROWS if row[0] != "steps"])
def test_messages_without_a_template_are_refused(tmp_path, command, row, made):
    path = tiny_tokenizers.write_jsonl(tmp_path / "b.jsonl", [made])
    with pytest.raises(DataError, match="chat template"):
        dataset(path, command, chat_template="none").load(0)


@pytest.mark.parametrize(
    "turns",
    [{"user": "U:"}, {"user": "U:", "assistant": "U:"}, {"user": "U:", "assistant": " "}, "U:", {"human": "U:", "assistant": "A:"}],
)  # fmt: skip
def test_markers_are_checked(turns):
    with pytest.raises(ConfigError) as error:
        build_section(DataConfig, {"train": "a.jsonl", "turns": turns}, "data", DataConfig)
    assert str(error.value).startswith("data.turns: value ") and "does not mark the turns" in str(error.value)
