"""Text that comes token by token is the text of the whole, character by character."""

import pytest

from mrl.inference.streaming import StreamedText
from tests.data.tiny_tokenizers import make_tokenizer

TEXTS = ["hello there!", "é", "a 日本 b\U0001f600c", "line\n  two", "<think>\nhm\n</think>\n\nyes"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("end", [[], ["</s>"]])
def test_what_is_written_is_the_whole_text(text, end):
    tokenizer, written = make_tokenizer(), []
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids += tokenizer.convert_tokens_to_ids(end)
    streamed = StreamedText(tokenizer, written.append, [tokenizer.eos_token_id])
    for count in range(1, len(ids) + 1):
        streamed(ids[:count])
        assert text.startswith("".join(written)), "no half of a character, and nothing that is taken back"
    assert streamed.rest(ids) == "".join(written) == text
    assert len(written) > 1 or len(text) == 1


def test_a_character_that_never_becomes_whole_is_shown_at_the_end():
    tokenizer, written = make_tokenizer(), []
    ids = tokenizer("é", add_special_tokens=False)["input_ids"][:1]
    streamed = StreamedText(tokenizer, written.append, [])
    streamed(ids)
    assert not written
    assert streamed.rest(ids) == "".join(written) == "\N{REPLACEMENT CHARACTER}"
