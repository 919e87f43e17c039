"""Token ids as the texts that they add to a sequence, by the tokenizer of a run."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

from mrl.report.runs import CONFIG, EXPORT, read_settings

TOKENIZER = "tokenizer.json"
MODEL_KEYS = ("actor.model.path", "model.path")
WINDOW = 4
"""Tokens before one that are decoded with it: what a token adds may depend on them."""


class TokenTexts:
    """The tokenizer of a run's export, or else of its first model if that is a folder here.

    No code of a model is run, and nothing is fetched: a tokenizer without tokenizer.json is none.
    """

    problem: str | None = None  # why there are no texts, for the page

    def __init__(self, run: pathlib.Path) -> None:
        self._run = run
        self._tokenizer: Any = None
        self._looked = False

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """Returns the text that each token adds; None without a tokenizer.

        A token that begins a character adds "". The token that ends the character has it.
        """
        if not self._looked:
            self._looked = True
            self._tokenizer = self._load()
        return None if self._tokenizer is None else _pieces(self._tokenizer, list(ids))

    def _load(self) -> Any:
        keys = read_settings(self._run / CONFIG).keys
        named = [str(keys[name]) for name in MODEL_KEYS if keys.get(name)]
        folders = [self._run / EXPORT, *(pathlib.Path(os.path.expanduser(name)) for name in named)]
        for folder in folders:
            if (folder / TOKENIZER).is_file():
                from tokenizers import Tokenizer

                try:
                    return Tokenizer.from_file(str(folder / TOKENIZER))
                except Exception as error:  # the package raises nothing narrower
                    self.problem = f"tokens are shown as ids: {folder / TOKENIZER} cannot be read ({error})"
                    return None
        places = " and ".join(str(folder) for folder in folders)
        self.problem = f"tokens are shown as ids: there is no {TOKENIZER} in {places}"
        return None


def _pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """Decodes each token behind the few before it, and removes the text of those alone (as vLLM and TGI stream)."""
    pieces = []
    begin = 0  # the first token of the window
    shown = 0  # tokens whose text is in `pieces`
    before = ""  # the text of the window up to `shown`
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[begin:end], skip_special_tokens=False)
        incomplete = text.endswith("\ufffd") and end < len(ids) and end - shown < WINDOW
        if incomplete or len(text) < len(before):
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        shown = end
        if end - begin >= 2 * WINDOW:
            begin = end - WINDOW
            before = tokenizer.decode(ids[begin:end], skip_special_tokens=False)
        else:
            before = text
    return pieces
