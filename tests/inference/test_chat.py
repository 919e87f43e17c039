"""`mrl generate --chat`: turns, its commands and an interrupt, where stdin has what a user types."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl.inference.streaming import StreamedText
from tests.data.tiny_tokenizers import make_tokenizer
from tests.engine.harness import run_case
from tests.inference.cases import greedy, mrl

NEW_TOKENS = 24


def answer_of_transformers(folder: str, system: str, *turns: str) -> str:
    """What comes after turns, of which every second one is an answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    messages = [{"role": "system", "content": system}, *said]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    return tokenizer.decode(greedy(hf, ids, NEW_TOKENS, tokenizer.eos_token_id), skip_special_tokens=True)


@pytest.mark.parametrize(
    ("world", "keys"), [(1, ()), pytest.param(2, ("engine.parallel.tp=2",), marks=pytest.mark.nightly)]
)
def test_a_conversation(folder, tmp_path, world, keys):
    """Turns with what was said before them, other system text, a saved file, an end; as transformers answers greedily."""
    model, file = folder("qwen3", seed=2), tmp_path / "talk.jsonl"
    first = answer_of_transformers(model, "Be brief.", "hello")
    second = answer_of_transformers(model, "Be brief.", "hello", first, "2 + 2?")
    other = answer_of_transformers(model, "Go on.", "hello")
    typed_and_said = [
        ("hello", first), ("2 + 2?", second), (f"/save {file}", f"({file}: 5 messages, as one more row)"),
        ("/reset", "(the conversation is empty)"), ("hello", first),
        ("/system Go on.", "(the conversation begins anew with this system message)"), ("hello", other),
        ("/nothing", "(/nothing is no command, ANY)"), ("hello " * 120, "(the conversation: the prompt has ANY128 positionsANY)"),
        ("/reset", "(the conversation is empty)"), ("a\\\nb", answer_of_transformers(model, "Go on.", "a\nb")), ("/quit", ""),
    ]  # fmt: skip
    asked = ["--chat", "--greedy", "--system", "Be brief.", "--max-new-tokens", NEW_TOKENS, *keys]
    done = mrl("generate", model, *asked, world=world, stdin="".join(f"{typed}\n" for typed, _ in typed_and_said))
    expected = "\n".join(f"> {said}" for _, said in typed_and_said).replace("\r\n", "\n")  # as click reads stdout
    assert done.code == 0 and re.fullmatch(re.escape(expected).replace("ANY", r"[^\n]*"), done.out), done.out
    assert other != first
    (row,) = map(json.loads, file.read_text().splitlines())
    assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in row["messages"]] == ["Be brief.", "hello", first, "2 + 2?", second]


def test_an_interrupt_ends_an_answer_and_no_conversation(folder):
    """The end of stdin ends that."""
    model = folder("qwen3", seed=2)
    done = run_case(1, "tests.inference.cases:interrupted", model=model, after=4)
    whole = answer_of_transformers(model, "Be brief.", "hello")
    _, cut, second, end = done.out.split("> ")
    assert done.code == 0 and end == "\n" and second.endswith("\n"), done.out
    assert whole.startswith(cut.rstrip("\n")) and 0 < len(cut) < len(whole)


# -------------------------------------------------------------------------------------- the text while its tokens come


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
