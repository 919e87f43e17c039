"""Stop texts: found at the token that completes one, as if everything were decoded each time; and the model's end tokens."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from mrl.data.encode import Encoder
from mrl.rollout.stops import EndTokens, StopTexts, end_tokens
from tests.data import test_ends, tiny_tokenizers


def byte_fallback():
    """As Llama 2's: pieces with ▁ for a space, and bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += [*"▁abcdefghij", "▁a", "ab", "▁ab", "é", "cd", "▁▁", "ij▁"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {"byte level": tiny_tokenizers.make_tokenizer(), "byte fallback": byte_fallback()}
TEXTS = st.text(st.sampled_from([*"ab \n", "é", "你", "😀"]), min_size=1, max_size=5)


@st.composite
def completions(draw):
    """(tokenizer, ids, stop texts): texts as they are tokenized, their bytes one by one, special tokens, anything."""
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer = TOKENIZERS[name]
    stop = draw(st.lists(TEXTS, min_size=1, max_size=3))
    said = st.one_of(TEXTS, st.sampled_from(stop))
    apart = said.map(lambda text: [i for b in text.encode() for i in one_byte(name, b)])
    whole = said.map(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
    parts = st.lists(st.one_of(apart, whole, st.lists(st.integers(0, len(tokenizer) + 3), max_size=3)), max_size=6)
    return name, [i for part in draw(parts) for i in part], stop


def one_byte(name, byte):
    if name == "byte fallback":
        return [3 + byte]
    tokenizer = TOKENIZERS[name]
    alphabet = {bytes([b]): c for b, c in byte_alphabet().items()}
    return [tokenizer.convert_tokens_to_ids(alphabet[bytes([byte])])]


def byte_alphabet():
    """GPT-2's letter for each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(others)}


@settings(max_examples=200, deadline=None)
@given(completions())
@example(("byte level", [i for b in "é你".encode() for i in one_byte("byte level", b)], ["你"]))
@example(("byte fallback", [i for b in "é你\n😀".encode() for i in one_byte("byte fallback", b)], ["\n😀"]))
def test_as_if_all_were_decoded(case):
    name, ids, stop = case
    check = StopTexts(TOKENIZERS[name], stop)
    for n in range(1, len(ids) + 1):
        found = any(text in check.decode(ids[:n]) for text in stop)
        assert check(ids[:n]) == found, (n, check.decode(ids[:n]))
        if found:  # the engine asks no further
            return


def test_little_is_decoded_of_a_long_completion():
    tokenizer, lengths = tiny_tokenizers.make_tokenizer(), []

    class Watched(StopTexts):
        def decode(self, ids):
            lengths.append(len(ids))
            return super().decode(ids)

    check = Watched(tokenizer, ["fox!"])
    ids = tokenizer("the quick brown dog " * 200)["input_ids"]
    assert not check(ids) and check([*ids, *tokenizer("fox!")["input_ids"]]) and max(lengths) < 12


def test_a_special_token_may_be_a_stop_text():
    tokenizer = tiny_tokenizers.make_tokenizer()
    ids = tokenizer("fox<|im_end|>")["input_ids"]
    check = StopTexts(tokenizer, ["<|im_end|>"])
    assert check(ids) and not check(ids[:-1])


@pytest.mark.parametrize(
    ("given_ids", "expected"), [(3, (1, 3)), ([9, 3, 1], (1, 3, 9)), (None, (1,)), ("no file", (1,))]
)
def test_end_tokens(tmp_path, given_ids, expected):
    if given_ids != "no file":
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given_ids}))
    assert end_tokens(str(tmp_path), tiny_tokenizers.make_tokenizer()) == expected


@pytest.mark.parametrize(
    ("template", "named", "added"),
    [(tiny_tokenizers.CHATML, 0, (3,)), (tiny_tokenizers.CHATML, [3, 0], ()), (None, 0, ()), ("{{ messages[0].content }}", 0, ())],
)  # fmt: skip
def test_the_end_of_a_chat_templates_turns_is_an_end_token(tmp_path, template, named, added):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    tokenizer = tiny_tokenizers.make_tokenizer(template)
    found = EndTokens.of(str(tmp_path), tokenizer)
    assert found == EndTokens.of(str(tmp_path), tokenizer, [Encoder(tokenizer, "last")])
    assert found.added == added and set(found.ids) == {*end_tokens(str(tmp_path), tokenizer), *added}
    assert [("'<|im_end|>' (3)" in line, "as well" in line) for line in found.notes(tokenizer, "as well")] == [(True, True)] * len(added)  # fmt: skip


def test_an_end_that_also_closes_reasoning_is_none(tmp_path):
    """gpt-oss ends a conversation with its EOS; <|end|> is after earlier turns, and after the analysis of each."""
    tokenizer = test_ends.make_tokenizer(test_ends.BY_PLACE, eos="<|return|>")
    found = EndTokens.of(str(tmp_path), tokenizer)
    assert found == EndTokens((tokenizer.convert_tokens_to_ids("<|return|>"),), ())
    assert found.notes(tokenizer, "") == []
