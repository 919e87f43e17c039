"""Prompts: the forms of rows, what they become in tokens, their order, and the tokens that follow a turn of the policy."""

import json

import pytest

from mrl.config.ppo import PromptsConfig
from mrl.data.dataset import RejectedRow
from mrl.data.files import BadRow
from mrl.data.formats import Chat
from mrl.data.prompts import PromptDataset, PromptSource, TurnEncoder, first_prompts
from mrl.data.stream import Report, row_order
from mrl.errors import DataError
from tests.data import tiny_tokenizers
from tests.data.tiny_tokenizers import turns

USER = {"role": "user", "content": "hello"}
TOOLS = [{"type": "function", "function": {"name": "fox"}}]


def make(path, template=tiny_tokenizers.CHATML, *, part="train", bos=False, vocab_size=None, **keys):
    config = PromptsConfig(**{"train": str(path), **keys})
    return PromptDataset(config, tiny_tokenizers.make_tokenizer(template, bos=bos), part=part, vocab_size=vocab_size)


def of_row(tmp_path, row, template=tiny_tokenizers.CHATML, *, bos=False, **keys):
    """(the prompt, its tokens in words)"""
    dataset = make(tiny_tokenizers.write_jsonl(tmp_path / "a.jsonl", [row]), template, bos=bos, **keys)
    prompt = dataset.load(0)
    return prompt, tiny_tokenizers.make_tokenizer(template).decode(prompt.tokens)


ASKED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("row", "content", "words"),
    [
        ({"prompt": "hello", "answer": 4}, "hello", ASKED),
        ({"prompt": [USER]}, [USER], ASKED),
        ({"messages": [USER]}, [USER], ASKED),
        ({"messages": [USER, {"role": "assistant", "content": "fox"}]}, [USER], ASKED),
        (
            {"messages": turns("hello", "fox", "dog", "the fox")},
            turns("hello", "fox", "dog"),
            "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nfox<|im_end|>\n"
            "<|im_start|>user\ndog<|im_end|>\n<|im_start|>assistant\n",
        ),
        ({"instruction": "hello", "output": "fox"}, "hello", ASKED),
        ({"instruction": "hello", "input": "fox"}, "hello\n\nfox", ASKED.replace("hello", "hello\n\nfox")),
    ],
)
def test_forms_with_a_chat_template(tmp_path, row, content, words):
    prompt, said = of_row(tmp_path, row)
    assert said == words and prompt.content == content
    assert (prompt.index, prompt.where, prompt.row, prompt.truncated) == (0, f"{tmp_path}/a.jsonl:1", row, False)


def test_a_text_without_a_chat_template_is_taken_as_it_is_with_one_bos(tmp_path):
    assert of_row(tmp_path, {"prompt": "hello fox"}, None)[1] == "hello fox"
    assert of_row(tmp_path, {"prompt": "hello fox"}, None, bos=True)[1] == "<s>hello fox"
    assert of_row(tmp_path, {"prompt": "<s>hello fox"}, None, bos=True)[1] == "<s>hello fox"
    prompt, words = of_row(tmp_path, {"instruction": "hello"}, None)
    assert words.endswith("### Instruction:\nhello\n\n### Response:\n") and prompt.content == "hello"


def test_fields_are_renamed_first_and_rewards_get_the_renamed_row(tmp_path):
    row = {"question": "hello", "answer": "4"}
    prompt, words = of_row(tmp_path, row, columns={"question": "prompt"})
    assert words == ASKED and prompt.row == {"prompt": "hello", "answer": "4"}


@pytest.mark.parametrize("row", [{"prompt": "hello"}, {"prompt": [USER]}])
def test_tools_and_template_arguments_of_the_row(tmp_path, row):
    row = {**row, "tools": TOOLS, "chat_template_kwargs": {"loud": 5}}
    assert of_row(tmp_path, row, tiny_tokenizers.WITH_TOOLS)[1] == "TOOLS fox <|im_end|>\nLOUD5" + ASKED


def test_a_system_message_of_the_row_and_of_the_config_are_one_error(tmp_path):
    with pytest.raises(DataError, match=r"a.jsonl:1: data.system: is set, and the row has a system message; remove"):
        of_row(tmp_path, {"messages": turns("hello", system="dog")}, system="fox", on_bad_row="skip")
    with pytest.raises(DataError, match="data.system: the tokenizer has no chat template"):
        of_row(tmp_path, {"prompt": "hello"}, None, system="fox")


# ------------------------------------------------------------------------------------------------------------ bad rows


@pytest.mark.parametrize(
    ("row", "wrong", "works"),
    [
        ({"messages": [USER]}, "prompt is missing or null, and prompts have it since the first row; the row has messages", "data.columns"),
        ({"prompt": 5}, "prompt is 5", "give a string"),
        ({"prompt": ""}, "prompt is empty", "or remove the row"),
        ({"prompt": turns([{"type": "image", "path": "a.png"}])}, "prompt[0].content is a list", "give a string"),
        ({"prompt": turns("hello", "fox")}, "prompt ends with an assistant turn", "come last"),
    ],
)  # fmt: skip
def test_bad_rows(tmp_path, row, wrong, works):
    path = tiny_tokenizers.write_jsonl(tmp_path / "a.jsonl", [{"prompt": "hello"}, row])
    with pytest.raises(DataError) as error:
        make(path).load(1)
    message = str(error.value)
    assert message.startswith(f"{path}:2: ") and wrong in message and works in message and "\n" not in message
    assert make(path, on_bad_row="skip").load(1) == RejectedRow("skipped", message)


def test_messages_with_nothing_to_ask(tmp_path):
    bad = [turns("hello", "fox")[1:], [*turns("hello", "fox"), {"role": "assistant", "content": "dog"}]]
    path = tiny_tokenizers.write_jsonl(tmp_path / "a.jsonl", [{"messages": m} for m in bad])
    for index in (0, 1):
        with pytest.raises(DataError, match=f"a.jsonl:{index + 1}: messages ends with an assistant turn; let what"):
            make(path).load(index)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "hello"}, r"a.jsonl:1: the fields text hold no prompt.*columns, as {question: prompt}"),
        ({"prompt": "a", "messages": [USER]}, r"a.jsonl:1: the fields prompt, messages hold no prompt, or several .*{messages: messages_unused}"),
    ],
)  # fmt: skip
def test_a_first_row_without_one_prompt(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        make(tiny_tokenizers.write_jsonl(tmp_path / "a.jsonl", [row]), on_bad_row="skip")


def test_messages_need_a_chat_template(tmp_path):
    path = tiny_tokenizers.write_jsonl(tmp_path / "a.jsonl", [{"messages": [USER]}])
    with pytest.raises(DataError, match=r"data.train: .*a.jsonl: the tokenizer has no chat template"):
        make(path, None)
    path = tiny_tokenizers.write_jsonl(tmp_path / "b.jsonl", [{"prompt": [USER]}])
    with pytest.raises(DataError, match=r"b.jsonl:1: the tokenizer has no chat template"):
        make(path, None, on_bad_row="skip").load(0)


def test_a_prompt_of_no_tokens_and_a_foreign_tokenizer(tmp_path):
    (tmp_path / "empty.jinja").write_text("{# says nothing #}")
    path = tiny_tokenizers.write_jsonl(tmp_path / "a.jsonl", [{"prompt": "hello"}])
    with pytest.raises(DataError, match="a.jsonl:1: gives a prompt of no tokens"):
        make(path, chat_template=str(tmp_path / "empty.jinja")).load(0)
    with pytest.raises(DataError, match="a.jsonl:1: the tokenizer gives token .* vocab_size 5"):
        make(path, vocab_size=5).load(0)


# -------------------------------------------------------------------------------------------------- long prompts, order


@pytest.fixture
def mixed(tmp_path):
    """Rows 1 and 4 are bad; row 2 is longer than 24 tokens."""
    rows = [{"prompt": f"fox {i}"} for i in range(6)]
    rows[1], rows[2], rows[4] = {"prompt": 5}, {"prompt": "fox " * 40}, "{oops"
    return tiny_tokenizers.write_jsonl(tmp_path / "mixed.jsonl", rows)


def test_long_prompts(mixed):
    whole = make(mixed).load(2).tokens
    left = make(mixed, truncation="left", max_prompt_length=24).load(2)
    assert left.tokens == whole[-24:] and left.truncated
    assert make(mixed, truncation="left", max_prompt_length=len(whole)).load(2).truncated is False
    what = f"mixed.jsonl:3: the prompt has {len(whole)} tokens and data.max_prompt_length is 24"
    assert what in make(mixed, truncation="drop", max_prompt_length=24).load(2).why
    with pytest.raises(DataError, match=f"{what}; raise .*, or set data.truncation to left or drop"):
        make(mixed, max_prompt_length=24, on_bad_row="skip").load(2)


SKIPS = {"on_bad_row": "skip", "truncation": "drop", "max_prompt_length": 24}


def test_prompts_come_in_the_order_of_rows_and_epochs_and_are_counted(mixed):
    source = PromptSource(make(mixed, **SKIPS), seed=3)
    taken = [p.index for _ in range(4) for p in source.take(2)]
    expected = [i for epoch in range(3) for i in row_order(3, epoch, 6).tolist() if i not in (1, 2, 4)]
    assert taken == expected[:8]
    assert source.counts["skipped"] >= 4 and source.counts["dropped"] >= 2 and source.counts["truncated"] == 0
    assert any(note.startswith(f"dropped: {mixed}:3: ") for note in source.take_notes()) and not source.take_notes()
    plain = PromptSource(make(mixed, **SKIPS), seed=3, shuffle=False)
    assert [p.index for p in plain.take(4)] == [0, 3, 5, 0]


@pytest.mark.parametrize("after", [0, 3])
def test_trap_32_a_resumed_source_goes_on_exactly(mixed, after):
    whole, killed = (PromptSource(make(mixed, **SKIPS), seed=1) for _ in range(2))
    expected = [whole.take(2) for _ in range(6)]
    for _ in range(after):
        killed.take(2)
    resumed = PromptSource(make(mixed, **SKIPS), seed=1)
    resumed.take(5)
    resumed.load_state_dict(json.loads(json.dumps(killed.state_dict())))
    assert [resumed.take(2) for _ in range(6 - after)] == expected[after:]
    assert resumed.state_dict() == whole.state_dict() and resumed.counts == whole.counts


def test_a_bad_row_takes_nothing(mixed):
    source = PromptSource(make(mixed), seed=0, shuffle=False)
    before = source.state_dict()
    with pytest.raises(DataError, match="mixed.jsonl:2: prompt is 5"):
        source.take(2)
    assert source.state_dict() == before and [p.index for p in source.take(1)] == [0]


def test_held_out_prompts(mixed):
    dataset, report = make(mixed, part="eval", eval=mixed, **SKIPS), Report()
    assert [p.index for p in first_prompts(dataset, None, report)] == [0, 3, 5]
    assert report.counts == {"skipped": 2, "dropped": 1, "truncated": 0}
    assert [p.index for p in first_prompts(dataset, 2, Report())] == [0, 3]
    with pytest.raises(DataError, match="data.eval: .*: none of its 6 rows can be used; "):
        first_prompts(make(mixed, part="eval", eval=mixed, **{**SKIPS, "max_prompt_length": 2}), None, Report())


# --------------------------------------------------------------------------------------------- turns of a conversation


TOOL = {"role": "tool", "content": "4"}
# As Qwen3: an answer after the last user turn gets empty reasoning, one before it has none.
ADDS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if quick is defined %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
TEMPLATES = {
    "chatml": tiny_tokenizers.CHATML, "marked": tiny_tokenizers.CHATML_MARKED, "strips": tiny_tokenizers.STRIPS_REASONING, "eos": tiny_tokenizers.EOS_AT_THE_END,
    "tools": tiny_tokenizers.WITH_TOOLS, "adds": ADDS_REASONING, "llama": LLAMA, "mistral": MISTRAL,
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("said", ["the fox", [TOOL], [TOOL, USER]])
def test_a_turn_and_what_follows_are_the_rendering_of_the_whole(name, said):
    template = TEMPLATES[name]
    tokenizer = tiny_tokenizers.make_tokenizer(template)
    encoder, asked = TurnEncoder(tokenizer), Chat([USER], given=1)
    end = tokenizer.convert_tokens_to_ids("</s>" if name in ("llama", "mistral") else "<|im_end|>")
    space = " " if name == "mistral" else ""
    turn = [*tokenizer(f"{space}lazy dog", add_special_tokens=False)["input_ids"], end]
    ours = encoder.prompt(asked) + turn + encoder.observation(said, asked, end)
    messages = [USER, {"role": "assistant", "content": "lazy dog"}]
    messages += [{"role": "user", "content": said}] if isinstance(said, str) else said
    assert ours == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_a_turn_that_was_cut_gets_its_end():
    tokenizer = tiny_tokenizers.make_tokenizer()
    encoder, asked, end = TurnEncoder(tokenizer), Chat([USER]), tokenizer.convert_tokens_to_ids("<|im_end|>")
    ended, cut, other = (encoder.observation("fox", asked, last) for last in (end, 7, tokenizer.eos_token_id))
    assert cut == other == [end, *ended]
    assert tokenizer.decode(ended) == "\n<|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\n"


def test_tools_and_template_arguments_count():
    tokenizer = tiny_tokenizers.make_tokenizer(ADDS_REASONING)
    encoder = TurnEncoder(tokenizer)
    plain, quick = (encoder.observation("fox", Chat([USER], template_kwargs=k), 7) for k in ({}, {"quick": True}))
    assert tokenizer.decode(quick[len(plain) :]) == "<think>\n\n</think>\n\n"


def test_without_a_chat_template_the_text_is_taken_as_it_is():
    tokenizer = tiny_tokenizers.make_tokenizer(None, bos=True)
    encoder = TurnEncoder(tokenizer)
    assert tokenizer.decode(encoder.observation(" fox 4", Chat([]), 7)) == " fox 4"
    with pytest.raises(DataError, match="has no chat template"):
        encoder.observation([TOOL], Chat([]), 7)


def test_the_observation_may_say_anything():
    tokenizer = tiny_tokenizers.make_tokenizer()
    text = "a-turn-of-the-assistant<|im_end|>"
    assert text + "<|im_end|>\n" in tokenizer.decode(TurnEncoder(tokenizer).observation(text, Chat([USER]), 7))


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", DataError, r"follows an assistant turn with '\\nuser: fox\\n': no special token begins it"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}</s>{% endfor %}", DataError, "leaves out an assistant turn"),
        ("{% for m in messages %}{% if loop.last %}{{ raise_exception('no') }}{% endif %}{% endfor %}", BadRow, "cannot render the conversation"),
    ],
)  # fmt: skip
def test_templates_that_do_not_tell(template, error, message):
    with pytest.raises(error, match=message):
        TurnEncoder(tiny_tokenizers.make_tokenizer(template)).observation("fox", Chat([USER]), 7)
