"""From rows to tokens and masks: formats, chat templates, what trains."""

import pytest

from mrl.batch import make_batch
from mrl.data.dataset import SFTDataset
from mrl.data.encode import Encoder
from mrl.data.formats import Chat, Pair, Text, Tokens
from mrl.errors import DataError, ModelError
from tests.data.tiny_tokenizers import (
    CHATML,
    CHATML_MARKED,
    EOS_AT_THE_END,
    STRIPS_REASONING,
    WITH_TOOLS,
    config,
    make_tokenizer,
    trained_text,
    turns,
    write_jsonl,
)

FOUR = turns("What is 2 + 2?", "4", "hello", "hello there", system="You are a helpful assistant.")


def encode(content, template=CHATML, loss_on="assistant", **tokenizer):
    tokenizer = make_tokenizer(template, **tokenizer)
    encoded = Encoder(tokenizer, loss_on).encode(content)
    return tokenizer.decode(encoded.ids), trained_text(tokenizer, encoded), encoded


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["prefixes", "markers"])
@pytest.mark.parametrize(
    "loss_on, trained",
    [("assistant", ["4<|im_end|>", "hello there<|im_end|>"]), ("last", ["hello there<|im_end|>"]), ("all", None)],
)
def test_both_ways_of_finding_the_mask_agree_and_the_end_of_turn_trains(template, loss_on, trained):
    whole, runs, _ = encode(Chat(FOUR), template, loss_on)
    assert whole.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhat")
    assert runs == ([whole] if trained is None else trained)


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["prefixes", "markers"])
def test_trap_21_the_first_response_token_trains_and_the_last_prompt_token_predicts_it(template):
    tokenizer = make_tokenizer(template)
    encoded = Encoder(tokenizer, "assistant").encode(Chat(turns("hello", "fox")))
    batch = make_batch([encoded.ids], [encoded.mask])
    fox = tokenizer("fox", add_special_tokens=False)["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert batch.labels[batch.loss_mask == 1].tolist() == [*fox, end]
    first = int(batch.loss_mask.nonzero()[0])
    assert tokenizer.decode(batch.tokens[: first + 1].tolist()).endswith("<|im_start|>assistant\n")


def test_reasoning_that_the_template_strips_is_an_error_that_shows_the_difference():
    chat = Chat(turns("hello", "<think>\nhm\n</think>\n\n4", "hello", "<think>\nhm\n</think>\n\nfox"))
    with pytest.raises(DataError, match="messages.1.: .* to its end it has .*think.* where .*set data.loss_on to last"):
        encode(chat, STRIPS_REASONING)
    _, runs, _ = encode(chat, STRIPS_REASONING, "last")
    assert runs == ["<think>\nhm\n</think>\n\nfox<|im_end|>"]


def test_a_generation_prompt_that_the_whole_does_not_have_is_an_error():
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    with pytest.raises(
        DataError, match=r"rendered up to it, with the generation prompt, it has .*<think>.* where .*fox"
    ):
        encode(Chat(turns("hello", "fox")), template)


def test_a_prompt_whose_tokens_change_when_the_answer_follows_is_an_error_but_not_with_markers():
    chat = Chat(turns("hello", "fox"))
    with pytest.raises(DataError, match=r"or a token reaches over a prompt's end: .*; put {% generation %} markers"):
        encode(chat, CHATML.replace("assistant\n", "assistant\n\n").replace("role }}\n", "role }}\n\n"))
    assert encode(chat, CHATML_MARKED.replace("\n", "\n\n"))[1] == ["fox<|im_end|>"]


@pytest.mark.parametrize("loss_on", ["assistant", "last"])
def test_a_turn_without_an_end_token_is_an_error(loss_on):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    with pytest.raises(DataError, match="is no special token, so the model would not learn to stop"):
        encode(Chat(turns("hello", "fox")), template, loss_on)
    assert encode(Chat(turns("hello", "fox")), template, "all")[1] == ["user: hello\nassistant: fox\n"]


def test_markers_that_leave_out_the_end_of_turn_are_an_error():
    template = CHATML_MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    with pytest.raises(DataError, match=r"before the end-of-turn token \('<\|im_end\|>' follows\)"):
        encode(Chat(turns("hello", "fox")), template)


def test_markers_that_take_in_white_space_after_the_end_of_turn_are_believed():
    template = CHATML_MARKED.replace("{% endgeneration %}", "\n{% endgeneration %}").replace("{{ '\\n' }}", "")
    assert encode(Chat(turns("hello", "fox")), template)[1] == ["fox<|im_end|>\n"]


def test_markers_around_some_turns_only_are_an_error():
    template = CHATML_MARKED.replace("m.role == 'assistant'", "loop.last")
    with pytest.raises(DataError, match="give 1 spans for 2 assistant turns"):
        encode(Chat(FOUR), template)


def test_a_user_turn_at_the_end_does_not_train_and_is_kept():
    whole, runs, _ = encode(Chat(turns("hello", "fox", "dog")))
    assert runs == ["fox<|im_end|>"] and whole.endswith("dog<|im_end|>\n")


def test_the_prompt_of_a_message_pair_never_trains():
    chat = Chat(FOUR, given=3)
    assert encode(chat)[1] == encode(chat, CHATML_MARKED)[1] == ["hello there<|im_end|>"]


def test_bos_comes_once_whoever_writes_it():
    bos = make_tokenizer(bos=True).bos_token_id
    contents = [
        (Chat(turns("hello", "fox")), EOS_AT_THE_END), (Text("fox"), None), (Text("<s>fox"), None),
        (Pair("hello ", "fox", "hello:"), None), (Pair("x", "fox", "<s>hello:"), None),
    ]  # fmt: skip
    for content, template in contents:
        ids = encode(content, template, bos=True)[2].ids
        assert ids[0] == bos and ids.count(bos) == 1, content
    assert bos not in encode(Text("fox"), None)[2].ids


def test_a_pair_is_joined_and_ended_where_there_is_no_template_and_the_documented_template_gives_the_same():
    pair = Pair("Question: hello\nAnswer:", " fox", "Question: hello\nAnswer:")
    plain = encode(pair, None)
    assert plain[0] == "Question: hello\nAnswer: fox</s>" and plain[1] == [" fox</s>"]
    assert encode(pair, None, "all")[1] == [plain[0]]
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    assert encode(pair, template)[2] == plain[2]


def test_text_trains_whole_with_one_eos():
    assert encode(Text("fox"), None)[1] == encode(Text("fox</s>"), None)[1] == ["fox</s>"]
    with pytest.raises(ModelError, match="no EOS token"):
        encode(Text("fox"), None, eos=None)


@pytest.mark.parametrize(
    "mask, loss_on, trained",
    [([0, 1, 0], "assistant", [0, 1, 0]), ([0, 1, 0], "all", [1, 1, 1]), (None, "assistant", [1, 1, 1])],
)
def test_token_ids_stay_as_they_are(mask, loss_on, trained):
    encoded = encode(Tokens([9, 10, 11], mask), None, loss_on)[2]
    assert encoded.ids == [9, 10, 11] and encoded.mask == trained


ROWS = {
    "messages": {"messages": turns("hello", "fox"), "source": "ignored"},
    "prompt_completion": {"prompt": "hello", "completion": "fox"},
    "alpaca": {"instruction": "hello", "output": "fox", "input": ""},
    "text": {"text": "fox"},
    "tokenized": {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
}


@pytest.mark.parametrize(("format", "named"), [*((name, False) for name in ROWS), ("text", True)])
def test_formats_are_detected_or_named(tmp_path, format, named):
    path = write_jsonl(tmp_path / "a.jsonl", [ROWS[format]])
    dataset = SFTDataset(config(path, format=format if named else "auto"), make_tokenizer())
    assert dataset.format == format
    example = dataset.load(0)
    if format == "tokenized":
        assert (example.ids, example.mask) == ([5, 6, 7], [0, 1, 1])
    else:
        assert trained_text(make_tokenizer(), example) == ["fox</s>" if format == "text" else "fox<|im_end|>"]


def test_tools_and_template_arguments_of_a_row_reach_the_template(tmp_path):
    tools = [{"type": "function", "function": {"name": "lazy"}}]
    call = {"role": "assistant", "content": "hello", "tool_calls": [{"function": {"name": "lazy", "arguments": {}}}]}
    row = {
        "messages": [turns("hello")[0], call, {"role": "tool", "content": "dog"}, turns("", "fox")[1]],
        "tools": tools,
        "chat_template_kwargs": {"loud": 7},
    }
    tokenizer = make_tokenizer(WITH_TOOLS)
    example = SFTDataset(config(write_jsonl(tmp_path / "a.jsonl", [row])), tokenizer).load(0)
    assert tokenizer.decode(example.ids).startswith("TOOLS lazy <|im_end|>\nLOUD7<|im_start|>user\nhello")
    assert trained_text(tokenizer, example) == ["hello<|im_end|>", "fox<|im_end|>"]


def test_columns_rename_fields_before_the_format_is_read(tmp_path):
    path = write_jsonl(tmp_path / "gsm8k.jsonl", [{"question": "2 + 2?", "answer": "4"}])
    columns = {"question": "prompt", "answer": "completion"}
    dataset = SFTDataset(config(path, columns=columns), make_tokenizer())
    assert trained_text(make_tokenizer(), dataset.load(0)) == ["4<|im_end|>"]
    swapped = write_jsonl(tmp_path / "swap.jsonl", [{"prompt": "4", "completion": "2 + 2?"}])
    dataset = SFTDataset(config(swapped, columns={"prompt": "completion", "completion": "prompt"}), make_tokenizer())
    assert trained_text(make_tokenizer(), dataset.load(0)) == ["4<|im_end|>"]


@pytest.mark.parametrize("field", ["loss_mask", "assistant_masks", "completion_mask"])
def test_masks_of_tokenized_rows(tmp_path, field):
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7], field: [0, 0, 1]}])
    assert SFTDataset(config(path), make_tokenizer(None)).load(0).mask == [0, 0, 1]


def test_alpaca_puts_the_input_after_the_instruction_and_has_its_own_prompt_without_a_template(tmp_path):
    row = {"instruction": "the quick", "input": "brown", "output": "fox"}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    with_template, without = make_tokenizer(), make_tokenizer(None)
    chat = SFTDataset(config(path), with_template).load(0)
    assert "user\nthe quick\n\nbrown<|im_end|>" in with_template.decode(chat.ids)
    plain = SFTDataset(config(path), without).load(0)
    assert without.decode(plain.ids).endswith(
        "### Instruction:\nthe quick\n\n### Input:\nbrown\n\n### Response:\nfox</s>"
    )
    assert trained_text(without, plain) == ["fox</s>"]


def test_chat_template_and_loss_on_of_the_config_reach_the_rows(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": FOUR}])
    template = tmp_path / "t.jinja"
    template.write_text(CHATML.replace("<|im_start|>{{", "<|im_start|>MY {{"))
    tokenizer = make_tokenizer(None)
    example = SFTDataset(config(path, chat_template=str(template), loss_on="all"), tokenizer).load(0)
    assert tokenizer.decode(example.ids).startswith("<|im_start|>MY system") and all(example.mask)
    assert tokenizer.chat_template is None  # the dataset has a copy
    last = SFTDataset(config(path, loss_on="last"), make_tokenizer()).load(0)
    assert trained_text(make_tokenizer(), last) == ["hello there<|im_end|>"]
