"""Where an assistant's turn ends: by its own token, by its place, by the next turn's token; and what a conversation lacks."""

import pytest
from tokenizers import AddedToken

from mrl.data.encode import Encoder
from mrl.data.ends import TurnEnds
from mrl.data.formats import Chat
from mrl.errors import DataError
from tests.data import test_preferences, test_scored, tiny_tokenizers
from tests.data.tiny_tokenizers import trained_text, turns

SPECIAL = ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|message|>"]  # fmt: skip
# As gpt-oss: <|return|> ends the last turn, <|end|> those before it and reasoning, <|call|> a call of a tool.
BY_PLACE = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.thinking and loop.last %}<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    "<|message|>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}<|call|>"
    "{% elif m.role == 'assistant' and loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# As GLM-4.5: what follows a turn ends it.
NEXT_TURN = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\nCALL {{ call.function.name }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NEXT_TURN_MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ '\n' + m.content }}{% endgeneration %}"
    "{% else %}{{ '\n' + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LEFT_OUT = tiny_tokenizers.CHATML.replace("<|im_end|>\n", "\n")
OF_PARTS = tiny_tokenizers.CHATML.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
BOS_FOLLOWS = "{% for m in messages %}{% if m.role == 'user' %}<s>[{{ m.content }}]{% else %}{{ m.content }}{% endif %}{% endfor %}"
WANTS_SYSTEM = "{{ raise_exception('no') if messages[0].role != 'system' }}" + tiny_tokenizers.CHATML
REFUSES = "{{ raise_exception('no') }}"
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "lazy", "arguments": {}}}]}  # fmt: skip
TOOL = {"role": "tool", "content": "dog"}
ONE, TWO, OPEN = turns("hello", "4"), turns("hello", "4", "fox", "dog"), turns("hello", "4", "fox")
CALLS = [*turns("hello"), CALL, TOOL, *turns("", "4")[1:]]


def make_tokenizer(template, **options):
    tokenizer = tiny_tokenizers.make_tokenizer(template, **options)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL], special_tokens=True)
    return tokenizer


def trained(messages, template, loss_on="assistant", **options):
    tokenizer = make_tokenizer(template, **options)
    return trained_text(tokenizer, Encoder(tokenizer, loss_on).encode(Chat(messages)))


@pytest.mark.parametrize(
    ("template", "kind", "last", "ending", "call", "begin"),
    [
        (tiny_tokenizers.CHATML, "own", "<|im_end|>", "", None, None),
        (tiny_tokenizers.STRIPS_REASONING, "own", "<|im_end|>", "", None, None),
        (tiny_tokenizers.EOS_AT_THE_END, "own", "<|im_end|>", "</s>", None, None),
        (OF_PARTS, "own", "<|im_end|>", "", None, None),
        (WANTS_SYSTEM, "own", "<|im_end|>", "", None, None),
        (BY_PLACE, "by place", "<|return|>", "", None, None),
        (NEXT_TURN, "next turn", "<|user|>", "", "<|observation|>", "<|assistant|>"),
        (NEXT_TURN + "{% if not add_generation_prompt %}</s>{% endif %}", "by place", "</s>", "", None, None),
        (LEFT_OUT, "unknown", None, "", None, None),
        (BOS_FOLLOWS, "unknown", None, "", None, None),
        (REFUSES, "unknown", None, "", None, None),
        (None, "unknown", None, "", None, None),
    ],
)  # fmt: skip
def test_a_probe_tells_how_turns_end(template, kind, last, ending, call, begin):
    tokenizer = make_tokenizer(template, bos=template == BOS_FOLLOWS)
    ids = [None if name is None else tokenizer.convert_tokens_to_ids(name) for name in (last, call, begin)]
    ending = tuple(tokenizer(ending, add_special_tokens=False)["input_ids"])
    assert Encoder(tokenizer, "assistant").turn_ends() == TurnEnds(kind, ids[0], ending, *ids[1:])


@pytest.mark.parametrize(
    ("messages", "runs"),
    [
        (ONE, ["<|message|>4<|return|>"]),
        (TWO, ["<|message|>4<|end|>", "<|message|>dog<|return|>"]),
        (OPEN, ["<|message|>4<|end|>"]),
        (turns("hello", "", "fox", "dog"), ["<|message|><|end|>", "<|message|>dog<|return|>"]),
        (CALLS, ["<|message|>lazy<|call|>", "<|message|>4<|return|>"]),
        ([*CALLS, *turns("fox"), CALL], ["<|message|>lazy<|call|>", "<|message|>4<|end|>", "<|message|>lazy<|call|>"]),
        ([*ONE, {"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog", "thinking": "hm"}],
         ["<|message|>4<|end|>", "<|message|>hm<|end|><|start|>assistant<|message|>dog<|return|>"]),
    ],
)  # fmt: skip
def test_a_turn_trains_with_the_end_that_the_whole_conversation_gives_it(messages, runs):
    assert trained(messages, BY_PLACE) == runs
    assert trained(messages, BY_PLACE, "last") == runs[-1:]


def test_reasoning_that_only_the_last_turn_keeps_is_still_an_error():
    first = {"role": "assistant", "content": "4", "thinking": "hm"}
    with pytest.raises(DataError, match="the chat template rewrites turns"):
        trained([*turns("hello"), first, *turns("fox", "dog")], BY_PLACE)


@pytest.mark.parametrize("template", [NEXT_TURN, NEXT_TURN_MARKED])
@pytest.mark.parametrize(
    ("messages", "runs"),
    [
        (ONE, ["\n4<|user|>"]),
        (TWO, ["\n4<|user|>", "\ndog<|user|>"]),
        (OPEN, ["\n4<|user|>"]),
        ([*ONE, {"role": "system", "content": "x"}, *turns("fox", "dog")], ["\n4<|system|>", "\ndog<|user|>"]),
        (turns("hello", "", "fox", "dog"), ["\n<|user|>", "\ndog<|user|>"]),
    ],
)
def test_the_next_turns_token_belongs_to_a_turn_without_an_end(template, messages, runs):
    assert trained(messages, template) == runs
    assert trained(messages, template, "last") == runs[-1:]


def test_a_call_of_a_tool_ends_with_the_token_of_its_answer():
    runs = ["\nCALL lazy<|observation|>", "\n4<|user|>"]
    assert trained(CALLS, NEXT_TURN) == runs and trained(CALLS[:2], NEXT_TURN) == runs[:1]


def test_a_whole_conversation_gets_its_end_where_all_trains_and_a_prompt_does_not():
    assert trained(ONE, NEXT_TURN, "all") == ["<|user|>\nhello<|assistant|>\n4<|user|>"]
    assert trained(OPEN, NEXT_TURN, "all")[0].endswith("<|user|>\nfox")
    assert trained(ONE, NEXT_TURN, ("user",)) == ["hello"]


def test_another_assistants_turn_ends_none():
    with pytest.raises(DataError, match="is no special token"):
        trained([*ONE, {"role": "assistant", "content": "fox"}], NEXT_TURN)
    for template in (LEFT_OUT, BOS_FOLLOWS):
        with pytest.raises(DataError, match="is no special token"):
            trained(TWO, template, bos=template == BOS_FOLLOWS)


@pytest.mark.parametrize("loss_on", ["assistant", "last", ("user", "assistant"), ("user",)])
def test_what_ends_a_whole_rendering_is_no_part_of_its_last_turn(loss_on):
    for messages in (ONE, TWO, OPEN):
        runs = trained(messages, tiny_tokenizers.EOS_AT_THE_END, loss_on)
        assert runs and all(run.endswith("<|im_end|>") for run in runs), runs
    assert trained(ONE, tiny_tokenizers.EOS_AT_THE_END, "all")[0].endswith("4<|im_end|>\n</s>")


def test_template_arguments_count():
    template = tiny_tokenizers.CHATML.replace("<|im_end|>", "{{ '<|end|>' if short else '<|im_end|>' }}")
    encoder = Encoder(make_tokenizer(template), "assistant")
    for arguments, end in (({}, "<|im_end|>"), ({"short": True}, "<|end|>")):
        found = encoder.turn_ends(Chat([], template_kwargs=arguments)).last
        assert encoder.tokenizer.convert_ids_to_tokens(found) == end


def test_answers_of_preferences_end_so_and_scored_sequences_are_as_the_template_renders_them(tmp_path):
    row = {"prompt": turns("hello"), "chosen": turns("", "4")[1:], "rejected": turns("", "fox")[1:]}
    tokenizer = make_tokenizer(NEXT_TURN)
    pair = test_preferences.dataset(tmp_path, row, tokenizer=tokenizer).load(0)
    assert [trained_text(tokenizer, answer) for answer in pair.answers] == [["\n4<|user|>"], ["\nfox<|user|>"]]
    scored = test_scored.dataset(tmp_path, row, tokenizer=tokenizer).load(0)
    assert [tokenizer.decode(one.ids).endswith(("\n4", "\nfox")) for one in scored.sequences] == [True, True]
