"""Rows of a reward model in every form, where their scores are read, and what is said of a bad row."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mrl.config.rm import ScoredDataConfig
from mrl.data.dataset import RejectedRow
from mrl.data.scored import ScoredDataset, padding, scored_batch
from mrl.errors import DataError, ModelError
from tests.data.tiny_tokenizers import CHATML, STRIPS_REASONING, WITH_TOOLS, make_tokenizer, turns, write_jsonl

ASKED, GOOD, BAD = turns("2 + 2?"), [turns("x", "4")[1]], [turns("x", "fish")[1]]
PAIR = {"prompt": ASKED, "chosen": GOOD, "rejected": BAD}
GRADED = {"prompt": ASKED, "completion": GOOD, "score": 1.5}
STEPS = {"prompt": "2 + 2?", "completions": ["2 + 1 is 3", "3 + 1 is 4", "The answer is 4."], "labels": [True, 0.25, 0]}


def dataset(tmp_path, *rows, tokenizer=None, loss="bradley_terry", pad="</s>", **keys):
    tokenizer = tokenizer or make_tokenizer()
    config = ScoredDataConfig(**{"train": write_jsonl(tmp_path / "rows.jsonl", rows), "max_length": 512, **keys})
    pad_token_id = tokenizer.convert_tokens_to_ids(pad)
    return ScoredDataset(config, tokenizer, loss=loss, pad_token_id=pad_token_id)


def refusal(tmp_path, row, **keys):
    """The one line that is said of a row, without the name of its file."""
    with pytest.raises(DataError) as caught:
        dataset(tmp_path, row, **keys).load(0)
    said = str(caught.value)
    assert "\n" not in said and "rows.jsonl:1" in said and len(said) < 400
    return said


def read_after(tokenizer, sequence) -> list[str]:
    """The text up to each token whose score is read, with that token."""
    return [tokenizer.decode(sequence.ids[: place + 1]) for place in sequence.places]


@pytest.mark.parametrize(
    "row",
    [PAIR, {"prompt": "2 + 2?", "chosen": "4", "rejected": "fish"}, {"chosen": ASKED + GOOD, "rejected": ASKED + BAD}],
    ids=["messages", "strings", "implicit prompt"],
)
def test_pairs_are_whole_conversations_read_at_their_last_token(tmp_path, row):
    tokenizer = make_tokenizer()
    made = dataset(tmp_path, {**row, "margin": -0.5}).load(0)
    start = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    texts = [start + "4<|im_end|>\n", start + "fish<|im_end|>\n"]
    assert [read_after(tokenizer, s) for s in made.sequences] == [[text] for text in texts]
    assert made.margin == -0.5


def test_a_string_row_has_its_tools_and_template_arguments_as_in_mrl_ppo(tmp_path):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = {"prompt": "2 + 2?", "completion": "4", "score": 1, "tools": tools, "chat_template_kwargs": {"loud": 7}}
    tokenizer = make_tokenizer(WITH_TOOLS)
    (sequence,) = dataset(tmp_path, row, tokenizer=tokenizer, loss="regression").load(0).sequences
    assert tokenizer.decode(sequence.ids).startswith("TOOLS add <|im_end|>\nLOUD7<|im_start|>user")


def test_a_system_text_stands_before_conversations_that_have_none(tmp_path):
    (before,), (after,) = (
        dataset(tmp_path, STEPS, loss="steps", **keys).load(0).sequences for keys in ({}, {"system": "fox"})
    )
    tokenizer = make_tokenizer()
    assert tokenizer.decode(after.ids) == "<|im_start|>system\nfox<|im_end|>\n" + tokenizer.decode(before.ids)
    more = len(after.ids) - len(before.ids)
    assert after.places == tuple(place + more for place in before.places)
    own = {**GRADED, "prompt": [{"role": "system", "content": "dog"}, *ASKED]}
    (sequence,) = dataset(tmp_path, own, loss="regression", system="fox").load(0).sequences
    assert tokenizer.decode(sequence.ids).startswith("<|im_start|>system\ndog<|im_end|>\n<|im_start|>user")
    with pytest.raises(DataError, match="data.system: the tokenizer has no chat template"):
        dataset(tmp_path, STEPS, loss="steps", system="fox", tokenizer=make_tokenizer(None))


def test_whole_texts_are_scored_as_they_are_or_as_prompt_and_answer_where_a_template_renders(tmp_path):
    """Without a template `mrl ppo` joins prompt and answer to the same text."""
    row = {"chosen": "Q: 2 + 2?\nA: 4", "rejected": "Q: 2 + 2?\nA: fish"}
    tokenizer = make_tokenizer(None)
    made = [dataset(tmp_path, row, tokenizer=tokenizer, **keys).load(0) for keys in ({}, {"prompt_end": "\nA:"})]
    assert made[0] == made[1] and tokenizer.decode(made[0].sequences[0].ids) == row["chosen"] + "</s>"
    apart = {"prompt": "Q: 2 + 2?\nA:", "chosen": " 4", "rejected": " fish"}
    assert dataset(tmp_path, row, prompt_end="\nA:").load(0) == dataset(tmp_path, apart).load(0)
    assert "or data.prompt_end" in refusal(tmp_path, row)


@pytest.mark.parametrize("pad, ends", [("<s>", "4</s>"), ("</s>", "4")])
def test_without_a_template_texts_are_joined_and_end(tmp_path, pad, ends):
    """Where EOS is the padding too, the token before it is read."""
    tokenizer = make_tokenizer(None)
    row = {"prompt": "2 + 2 is ", "completion": "4", "score": -2}
    (sequence,) = dataset(tmp_path, row, tokenizer=tokenizer, loss="regression", pad=pad).load(0).sequences
    assert tokenizer.decode(sequence.ids) == "2 + 2 is 4</s>" and sequence.targets == (-2.0,)
    assert read_after(tokenizer, sequence) == ["2 + 2 is " + ends]


# --------------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("as_messages", [False, True])
@pytest.mark.parametrize("template", [CHATML, CHATML.replace("m.content", "m.content | trim"), STRIPS_REASONING])
def test_every_step_is_read_at_its_end_and_the_last_where_the_answer_is(tmp_path, template, as_messages):
    tokenizer = make_tokenizer(template)
    row = {**STEPS, "prompt": ASKED if as_messages else STEPS["prompt"]}
    (sequence,) = dataset(tmp_path, row, tokenizer=tokenizer, loss="steps").load(0).sequences
    start = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    first, second, third = STEPS["completions"]
    assert read_after(tokenizer, sequence) == [
        f"{start}{first}\n", f"{start}{first}\n{second}\n", f"{start}{first}\n{second}\n{third}<|im_end|>\n"
    ]  # fmt: skip
    assert sequence.targets == (1.0, 0.25, 0.0)


@pytest.mark.parametrize("bos", [False, True])
def test_steps_without_a_template(tmp_path, bos):
    tokenizer = make_tokenizer(None, bos=bos)
    row = {**STEPS, "prompt": "2 + 2?\n"}
    (sequence,) = dataset(tmp_path, row, tokenizer=tokenizer, loss="steps", pad="<|im_end|>").load(0).sequences
    first, second, third = STEPS["completions"]
    start = "<s>" * bos + "2 + 2?\n"
    assert read_after(tokenizer, sequence) == [
        f"{start}{first}\n", f"{start}{first}\n{second}\n", f"{start}{first}\n{second}\n{third}</s>"
    ]  # fmt: skip


def test_a_separator_in_the_next_steps_token_leaves_the_step_its_own_end(tmp_path):
    """A byte-level tokenizer writes " the" as one token: what comes before is the step's last token."""
    tokenizer = make_tokenizer(None)
    row = {"prompt": "", "completions": ["the quick", "the lazy"], "labels": [1, 0]}
    (sequence,) = dataset(tmp_path, row, tokenizer=tokenizer, loss="steps", step_separator=" ").load(0).sequences
    assert read_after(tokenizer, sequence) == ["the quick", "the quick the lazy"]


def test_characters_of_many_bytes_and_separators_that_are_a_special_token(tmp_path):
    """The separator is the padding here: the token before it is read, as transformers does with the text so far."""
    tokenizer = make_tokenizer(None)
    row = {"prompt": "é", "completions": ["ж🙂", "🙂🙂ж"], "labels": [1, 0]}
    for pad, end in (("<|im_start|>", "<|im_end|>"), ("<|im_end|>", "")):
        found = dataset(tmp_path, row, tokenizer=tokenizer, loss="steps", step_separator="<|im_end|>", pad=pad).load(0)
        assert read_after(tokenizer, found.sequences[0]) == ["éж🙂" + end, "éж🙂<|im_end|>🙂🙂ж</s>"]


def test_the_prompt_may_hold_the_words_of_the_answer(tmp_path):
    tokenizer = make_tokenizer(None)
    row = {"prompt": "assistant\nassistant\n", "completions": ["assistant", "assistant"], "labels": [1, 0]}
    (sequence,) = dataset(tmp_path, row, tokenizer=tokenizer, loss="steps").load(0).sequences
    assert read_after(tokenizer, sequence)[0] == "assistant\nassistant\nassistant\n"


# ------------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize(
    "hf_config, pad_token, token",
    [
        ({"pad_token_id": 2}, "<s>", 2),  # transformers goes by config.json
        ({"text_config": {"pad_token_id": 2}}, "<s>", 2),
        ({}, "<|im_start|>", 2),
        ({"pad_token_id": -1}, None, 1),  # Llama's first folders
        ({"pad_token_id": 10**6}, None, 1),
        ({"pad_token_id": None}, None, 1),
    ],
)
def test_the_padding_is_that_of_the_config_the_tokenizer_or_eos(hf_config, pad_token, token):
    tokenizer = make_tokenizer()
    if pad_token is not None:
        tokenizer.pad_token = pad_token
    assert padding(hf_config, tokenizer) == token


def test_a_tokenizer_without_padding_and_end_is_refused():
    bare = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ModelError, match="no padding and no EOS token.*set pad_token in tokenizer_config.json"):
        padding({}, PreTrainedTokenizerFast(tokenizer_object=bare))


# ------------------------------------------------------------------------------------------------------------ bad rows


CASES = {
    "of no form": ("bradley_terry", {"prompt": ASKED, "chosen": GOOD}, "are of no known form: give prompt, chosen"),
    "of two forms": ("bradley_terry", {**PAIR, **GRADED}, "fit the formats preference and graded"),
    "margin": ("bradley_terry", {**PAIR, "margin": "much"}, "margin is 'much'; give a number"),
    "weight of a message": (
        "bradley_terry", {**PAIR, "chosen": [{**GOOD[0], "weight": 2}]},
        "has a weight of a message, which reward models do not take; leave it out",
    ),
    "weight in a prompt": ("steps", {**STEPS, "prompt": [{**ASKED[0], "weight": 0}]}, "has a weight of a message, which reward"),
    "an image": (
        "bradley_terry", {**PAIR, "prompt": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]},
        "has an image, which reward models do not read; leave the row out",
    ),
    "no prompt": ("bradley_terry", {"chosen": "a", "rejected": "b"}, "chosen is no list of messages, and there is no"),
    "a user ends it": ("bradley_terry", {**PAIR, "chosen": GOOD + ASKED}, "its last message is of the role user"),
    "list and text": ("regression", {**GRADED, "completion": "4"}, "prompt is a list and completion is '4'"),
    "score is text": ("regression", {**GRADED, "score": "1.5"}, "score is '1.5'; give a number"),
    "score is huge": ("regression", {**GRADED, "score": 10**400}, f"score is {10**39}; give a number"),
    "score is null": ("regression", {**GRADED, "score": None}, "score is missing or null, and graded needs it"),
    "no steps": ("steps", {**STEPS, "completions": []}, "completions is []; give a list"),
    "fewer labels": ("steps", {**STEPS, "labels": [1]}, "has 3 completions and 1 label; give one label for each"),
    "an empty step": ("steps", {**STEPS, "completions": ["a", " \n", "b"]}, "completions[1] is ' \\n'; give the text"),
    "label above 1": ("steps", {**STEPS, "labels": [1, 2, 0]}, "labels[1] is 2; give true for a right step"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_bad_row_is_one_line_with_its_place(tmp_path, name):
    loss, row, says = CASES[name]
    assert says in refusal(tmp_path, row, loss=loss)


@pytest.mark.parametrize(("loss", "row"), [("regression", PAIR), ("steps", GRADED), ("bradley_terry", STEPS)])
def test_rows_of_another_loss_are_refused(tmp_path, loss, row):
    with pytest.raises(DataError, match=f"and loss.name {loss} is of others; give "):
        dataset(tmp_path, row, loss=loss)


def test_steps_that_the_template_or_the_tokenizer_hides_are_refused(tmp_path):
    shouts = make_tokenizer(CHATML.replace("m.content", "m.content | upper"))
    assert "the chat template writes the steps otherwise" in refusal(tmp_path, STEPS, loss="steps", tokenizer=shouts)
    joined = {**STEPS, "completions": ["the qu", "ick brown"], "labels": [1, 0]}
    said = refusal(tmp_path, joined, loss="steps", step_separator="", tokenizer=make_tokenizer(None))
    assert "completions[0] and completions[1] share a token" in said and "set data.step_separator" in said
    padded = {"prompt": "a", "completions": ["b", "</s>", "a"], "labels": [1, 0, 1]}
    said = refusal(tmp_path, padded, loss="steps", step_separator="</s>", tokenizer=make_tokenizer(None))
    assert "two of its steps end at the same token" in said


def test_steps_need_a_fast_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(ModelError, match="tells no token's place in a text, .*; use the fast one"):
        dataset(tmp_path, STEPS, loss="steps").load(0)


def test_long_rows_are_refused_or_dropped_whole_and_bad_ones_skipped(tmp_path):
    long = {**PAIR, "rejected": [{"role": "assistant", "content": "the lazy dog " * 40}]}
    assert "set data.truncation to drop, or raise data.max_length" in refusal(tmp_path, long, max_length=60)
    found = dataset(tmp_path, long, {**PAIR, "rejected": GOOD}, max_length=60, truncation="drop", on_bad_row="skip")
    assert [found.load(i).outcome for i in range(2)] == ["dropped", "skipped"]
    assert isinstance(found.load(0), RejectedRow)


def test_a_batch_reads_the_last_token_and_counts_what_is_divided_by(tmp_path):
    """The batch has one label more than the answer, so that its last token has a value."""
    rows = [dataset(tmp_path, {**PAIR, "margin": m}, pad="<s>").load(0) for m in (-0.5, 2)]
    batch = scored_batch(rows, group=2)
    assert batch.lengths.tolist() == [len(s.ids) for row in rows for s in row.sequences]
    assert batch.loss_mask.nonzero()[:, 0].tolist() == (batch.lengths.cumsum(0) - 1).tolist()
    assert batch.sequence_fields["margin"].tolist() == [-0.5, -0.5, 2, 2] and batch.denominators["units"] == 2
    rows = [dataset(tmp_path, STEPS, loss="steps").load(0) for _ in range(2)]
    batch = scored_batch(rows, group=1)
    assert (batch.denominators["units"], batch.denominators["tokens"], batch.group) == (6, 6, 1)
    at, targets = batch.loss_mask != 0, batch.token_fields["targets"]
    assert targets[at].tolist() == [1, 0.25, 0] * 2 and not targets[~at].any()
