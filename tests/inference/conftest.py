"""Tiny models with a tokenizer, each made once in a module."""

import functools

import pytest

from tests.data.tiny_tokenizers import CHATML, make_tokenizer
from tests.engine import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of a tiny model with a tokenizer of 400 tokens, by family and fields; each is made once."""

    @functools.cache
    def of(family="qwen3", template=CHATML, **fields):
        tokenizer = make_tokenizer(template, eos="</s>" if template is None else "<|im_end|>")
        path = str(tmp_path_factory.mktemp(family))
        tiny.make_model(path, family, vocab=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **fields)
        tokenizer.save_pretrained(path)
        return path

    return of
