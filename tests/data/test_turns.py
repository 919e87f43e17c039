"""What follows a turn of the policy: the tokens that the chat template puts there, and nothing of what was before."""

import pytest

from mrl.data.files import BadRow
from mrl.data.formats import Chat
from mrl.data.prompts import TurnEncoder
from mrl.errors import DataError
from tests.data import tiny_tokenizers

USER = {"role": "user", "content": "hello"}
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
