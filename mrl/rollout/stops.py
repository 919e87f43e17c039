"""Finds the end of a completion: the model's own end tokens, those of its chat template, and texts."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from mrl.data.encode import Encoder
from mrl.weights.json_file import read_json

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def end_tokens(folder: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the tokenizer's EOS and those that generation_config.json of the model names, in order of their ids."""
    path = pathlib.Path(os.path.expanduser(folder)) / "generation_config.json"
    found = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if path.is_file():
        given = read_json(path).get("eos_token_id")
        if given is not None:
            found += given if isinstance(given, list) else [given]
    return tuple(sorted(set(found)))


@dataclasses.dataclass(frozen=True)
class EndTokens:
    """The tokens that end a completion, as ascending ids."""

    own: tuple[int, ...]  # those that the model's folder names
    added: tuple[int, ...]  # others that end an assistant's turn in the chat template

    @classmethod
    def of(
        cls, folder: str, tokenizer: PreTrainedTokenizerBase, encoders: Sequence[Encoder] | None = None
    ) -> EndTokens:
        """Returns a model's end tokens.

        encoders: with the chat templates that the model is asked or trained with; None: with the tokenizer's.
        """
        encoders = [Encoder(tokenizer, "all")] if encoders is None else encoders
        own = end_tokens(folder, tokenizer)
        ids = frozenset[int]().union(*(encoder.turn_ends().end_tokens for encoder in encoders))
        return cls(own, tuple(sorted(ids.difference(own))))

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(sorted(self.own + self.added))

    def notes(self, tokenizer: PreTrainedTokenizerBase, use: str) -> list[str]:
        """Returns lines on the added ones. use: their use here, in words."""
        if not self.added:
            return []
        named = " and ".join(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in self.added)
        return [f"end tokens: the chat template ends a turn with {named}, no end token of the model's folder; {use}"]


class StopTexts:
    """Whether the last of a completion's tokens completes a stop text, in the decoded tokens (special ones too).

    Called after each token, it decodes the last tokens alone. They may hold the longest text, and begin with a token
    that is whole characters by itself. A tokenizer decodes the tokens from there on without regard to earlier ones,
    except for a space that some leave out at the start. A character completes nothing until all its bytes are there.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._whole: dict[int, bool] = {}  # a fact of the vocabulary, looked up once per token

    def __call__(self, new: Sequence[int]) -> bool:
        """Returns whether the text of `new` has a stop text that the text without its last token has not.

        new: the completion's ids so far.
        """
        start, whole = len(new) - 1, 0
        while start > 0 and whole <= self._longest:
            start -= 1
            whole += self._is_whole(new[start])
        text = self.decode(new[start:])
        return any(stop in text for stop in self._stop)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _is_whole(self, token: int) -> bool:
        """Returns whether the token is whole characters; a byte of a byte-fallback vocabulary may be part of one."""
        known = self._whole.get(token)
        if known is None:
            text = self.decode([token])
            name = self._tokenizer.convert_ids_to_tokens(token)
            known = bool(text) and "\N{REPLACEMENT CHARACTER}" not in text and not _BYTE.fullmatch(name or "")
            self._whole[token] = known
        return known
