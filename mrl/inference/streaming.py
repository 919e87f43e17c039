"""The text of a completion while its tokens come, one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer gives for the bytes of a character that is not whole yet."""


class StreamedText:
    """Gives `write` each token's part of the text of a completion, without special tokens.

    Characters come when all their bytes are there. All parts together are the text of `rest`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None], end_tokens: Collection[int]
    ) -> None:
        self._tokenizer, self._write, self._end_tokens = tokenizer, write, frozenset(end_tokens)
        self._written = ""

    def __call__(self, tokens: Sequence[int]) -> None:
        """Writes the new part of the text. tokens: all ids of the completion so far."""
        text = self.text(tokens)
        if not text.endswith(UNFINISHED):
            self._show(text)

    def rest(self, tokens: Sequence[int]) -> str:
        """Writes what is left, and returns the whole text."""
        text = self.text(tokens)
        self._show(text)
        return text

    def text(self, tokens: Sequence[int]) -> str:
        words = tokens[:-1] if tokens and tokens[-1] in self._end_tokens else tokens
        return self._tokenizer.decode(list(words), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _show(self, text: str) -> None:
        """Writes what is new. A tokenizer that changes what it gave before (a space at a seam) changes no screen."""
        if len(text) > len(self._written):
            self._write(text[len(self._written) :])
            self._written = text
