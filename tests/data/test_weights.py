"""What counts how much: weights of rows, messages and tokens, roles that train, and a system text of the config."""

import pytest

from mrl.data.batches import batch_of
from mrl.data.dataset import Example, SFTDataset
from mrl.errors import DataError
from tests.data.tiny_tokenizers import CHATML, CHATML_MARKED, config, make_tokenizer, trained_text, write_jsonl

# As Qwen3: tool messages that follow each other stand in one user turn.
TOOLS_IN_ONE_TURN = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<r>\n{{ m.content }}\n</r>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "lazy"}, {"role": "user", "content": "hello"}, {"role": "assistant", "content": "dog"},
    {"role": "tool", "content": "4"}, {"role": "tool", "content": "fox"}, {"role": "assistant", "content": "over"},
]  # fmt: skip


def load(tmp_path, row, *, template=CHATML, **keys) -> Example:
    dataset = SFTDataset(config(write_jsonl(tmp_path / "rows.jsonl", [row]), **keys), make_tokenizer(template))
    found = dataset.load(0)
    assert isinstance(found, Example)
    return found


def weighed(example: Example) -> list[tuple[str, float]]:
    """What trains, in words, each run with its weight."""
    runs: list[tuple[list[int], float]] = []
    for i, (token, weight) in enumerate(zip(example.ids, example.mask, strict=True)):
        if weight and (i == 0 or example.mask[i - 1] != weight):
            runs.append(([], weight))
        if weight:
            runs[-1][0].append(token)
    return [(make_tokenizer().decode(ids), weight) for ids, weight in runs]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, TOOLS_IN_ONE_TURN], ids=["plain", "marked", "one turn"])
@pytest.mark.parametrize(
    "roles, trained",
    [
        (["assistant"], ["dog<|im_end|>", "over<|im_end|>"]),
        (["assistant", "tool"], ["dog<|im_end|>", "4<|im_end|>", "fox<|im_end|>", "over<|im_end|>"]),
        (["user", "system"], ["lazy<|im_end|>", "hello<|im_end|>"]),
        (["tool"], ["4<|im_end|>", "fox<|im_end|>"]),
    ],
)
def test_the_turns_of_a_list_of_roles_train(tmp_path, template, roles, trained):
    if template == TOOLS_IN_ONE_TURN:  # the first has no end of its own
        trained = [text.replace("4<|im_end|>", "4\n</r>").replace("fox<|", "fox\n</r><|") for text in trained]
    found = load(tmp_path, {"messages": TALK}, template=template, loss_on=tuple(roles))
    assert trained_text(make_tokenizer(), found) == trained


@pytest.mark.parametrize("content", ["a", "7", "a fox", "7 dogs", "\nfox", "fox\n", " "])
def test_a_content_is_found_whatever_it_begins_with(tmp_path, content):
    talk = [{"role": "user", "content": content}, {"role": "assistant", "content": "dog"}]
    found = load(tmp_path, {"messages": talk}, loss_on=("user",))
    (text,) = trained_text(make_tokenizer(), found)
    # a token may hold the line's end before
    assert text.removeprefix("\n") == f"{content}<|im_end|>".removeprefix("\n")


def test_weights_of_messages_and_rows_multiply(tmp_path):
    messages = [dict(m) for m in TALK]
    messages[2]["weight"], messages[5]["weight"] = 0.5, 3
    found = load(tmp_path, {"messages": messages, "weight": 2})
    assert weighed(found) == [("dog<|im_end|>", 1), ("over<|im_end|>", 6)]
    messages[5]["weight"] = 0
    assert weighed(load(tmp_path, {"messages": messages})) == [("dog<|im_end|>", 0.5)]
    messages[3]["weight"] = 4
    found = load(tmp_path, {"messages": messages, "weight": None}, loss_on=("assistant", "tool"))
    assert weighed(found) == [("dog<|im_end|>", 0.5), ("4<|im_end|>", 4), ("fox<|im_end|>", 1)]
    assert load(tmp_path, {"messages": TALK, "weight": 1}) == load(tmp_path, {"messages": TALK})  # ints as before
    unread = {"prompt": messages[:2], "completion": messages[2:3]}
    assert weighed(load(tmp_path, unread)) == [("dog<|im_end|>", 0.5)]


def test_weights_of_other_forms(tmp_path):
    row = {"input_ids": [5, 6, 7, 8], "weights": [1, 0.25, 0, 2], "weight": 2}
    assert load(tmp_path, row).mask == [2, 0.5, 0, 4] == load(tmp_path, row, loss_on="all").mask
    assert set(load(tmp_path, {"text": "hello", "weight": 0.5}).mask) == {0.5}
    assert weighed(load(tmp_path, {"prompt": "fox", "completion": "dog", "weight": 3})) == [("dog<|im_end|>", 3)]


def test_a_row_of_weight_0_keeps_its_place_and_one_alone_is_refused(tmp_path):
    nothing = load(tmp_path, {"text": "hello", "weight": 0})
    whole = load(tmp_path, {"text": "lazy dog"})
    assert batch_of([nothing, whole]).denominators == {"tokens": float(len(whole.ids) - 1), "sequences": 1.0}
    with pytest.raises(DataError, match=r"^data: all 1 rows of a batch have weight 0, so there is nothing to divide"):
        batch_of([nothing])


def test_a_system_text_of_a_prompt_never_trains_and_gives_way_to_the_rows_own(tmp_path):
    prompted = {"prompt": TALK[1:2], "completion": TALK[2:3]}
    assert weighed(load(tmp_path, prompted, system="You are", loss_on=("user", "assistant"))) == [("dog<|im_end|>", 1)]
    found = load(tmp_path, {"messages": TALK[1:]}, system="You are", loss_on=("assistant", "system"))
    assert [text for text, _ in weighed(found)] == ["You are<|im_end|>", "dog<|im_end|>", "over<|im_end|>"]
    assert load(tmp_path, {"messages": TALK}, system="You are") == load(tmp_path, {"messages": TALK})


USER = {"role": "user", "content": "hello"}
DOG = {"role": "assistant", "content": "dog"}
BAD = {
    "negative": ({"text": "a", "weight": -1}, {}, "weight is -1; give a number from 0 to 1e+06, or rename the field"),
    "nan": ('{"text": "a", "weight": NaN}', {}, "weight is nan; give a number"),
    "message": ({"messages": [USER, DOG | {"weight": "1"}]}, {}, "messages[1].weight is '1'; give a number from 0"),
    "of a user": ({"messages": [USER | {"weight": 1}, DOG]}, {}, "message 0 has weight 1 and never trains: it has the"),
    "of a prompt": (
        {"prompt": [USER | {"weight": 1}], "completion": [DOG]}, {"loss_on": ("user", "assistant")},
        "message 0 has weight 1 and never trains: it is in the prompt",
    ),
    "all 0": ({"messages": [USER, DOG | {"weight": 0}]}, {}, "has nothing to train on: no turn of assistant with a weight above 0"),
    "with all": ({"messages": [USER, DOG | {"weight": 2}]}, {"loss_on": "all"}, "has a weight of a message, but data.loss_on all"),
    "no such role": ({"messages": [USER, DOG]}, {"loss_on": ("tool",)}, "has nothing to train on: no turn of tool with"),
    "of tokens": ({"input_ids": [1, 2], "weights": [1]}, {}, "weights is a list; give a list of 2 numbers, one per tok"),
    "and labels": ({"input_ids": [1, 2], "weights": [1, 1], "labels": [1, 2]}, {}, "has labels and weights; keep the"),
    "tokens": ({"input_ids": [1, 2]}, {"loss_on": ("tool",)}, "data.loss_on: ['tool'], but tokenized rows have no turn"),
    "a text": ({"text": "a"}, {"system": "You"}, "data.system: is set, but text rows have no turns; leave it out"),
    "no template": ({"messages": [USER, DOG]}, {"system": "You", "template": None}, "the tokenizer has no chat template"),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, DOG]},
        {"loss_on": ("user",)}, "messages[0].content is a list of parts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_weights_and_roles_are_one_line(tmp_path, name):
    row, keys, says = BAD[name]
    with pytest.raises(DataError) as found:
        load(tmp_path, row, **keys)
    assert says in str(found.value) and "\n" not in str(found.value), found.value
