"""Loading the tokenizer of a Hugging Face folder, with errors that say what the folder lacks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import jinja2
import jinja2.meta
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mrl.config.sources import RAW_TEXT
from mrl.errors import ConfigError, DataError, ModelError, quoted
from mrl.weights.tokenizer_files import TOKENIZER_FILES


def load_tokenizer(
    path: str, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Returns the tokenizer in the folder (or of the hub id) `path`, with the chat template in the file
    `chat_template` if given; "none" leaves it without one.

    Raises ModelError (no such folder, no tokenizer in it, a broken one) or DataError (the template). A tokenizer
    without a chat template is fine here: `SFTDataset` says so if the data needs one.
    """
    folder = os.path.expanduser(path)
    if os.path.isdir(folder):
        has_code = trust_remote_code and (Path(folder) / "tokenizer_config.json").is_file()
        if not has_code and not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
            raise ModelError(
                path,
                why=f"the folder holds no tokenizer (none of {', '.join(TOKENIZER_FILES)})",
                fix="copy the tokenizer's files beside config.json, or use tokenizer.save_pretrained",
            )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as e:  # transformers, tokenizers and the hub client have no common error
        why, fix = "is no folder here, and no hub id that loads", "give a Hugging Face model folder or hub id"
        if os.path.isdir(folder):
            why, fix = "the tokenizer cannot be loaded", "get the tokenizer's files again"
        if not trust_remote_code and "trust_remote_code" in str(e):
            fix = "model.trust_remote_code: true allows it"
        raise ModelError(path, why=f"{why} ({type(e).__name__}: {e})", fix=fix) from e
    if chat_template is not None:
        use_chat_template(tokenizer, chat_template)
    return tokenizer


def syntax_error(error: jinja2.TemplateSyntaxError) -> DataError:
    """Returns the error on a chat template that is no Jinja. No row is at fault, and none is skipped for it."""
    why = f"is not valid Jinja (line {error.lineno}: {error.message})"
    return DataError("the chat template", why=why, fix="correct it, or name another in data.chat_template")


def use_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> None:
    """Gives the tokenizer what `data.chat_template` says. Raises DataError."""
    if chat_template == RAW_TEXT:
        tokenizer.chat_template = None
        return
    try:
        tokenizer.chat_template = Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        fix = "give a file with a Jinja template"
        raise DataError("data.chat_template", why=f"{chat_template}: cannot be read ({e})", fix=fix) from e
    if not tokenizer.chat_template.strip():
        raise DataError("data.chat_template", why=f"{chat_template}: is empty", fix="give a file with a Jinja template")
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except jinja2.TemplateSyntaxError as e:
        raise syntax_error(e) from e
    except Exception:
        return  # it wants another conversation than this: rows will tell


def variables_of(template: str) -> set[str]:
    """Returns the names that a chat template asks for."""
    bare = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    return jinja2.meta.find_undeclared_variables(environment.parse(bare))


def check_same_vocabulary(
    trained: Mapping[str, int], other: Mapping[str, int], path: str, key: str, own: str, *, role: str = "teacher"
) -> None:
    """Raises ConfigError if a token has another id. trained, other: token -> id, of the two models' tokenizers.

    path, key: the other's, and its key in the config. own: the key of the trained model. role: the other's.
    """
    differing = {token for token, _ in trained.items() ^ other.items()}
    if not differing:
        return
    why = f"has another vocabulary than {own}: {len(differing):,} tokens differ, as {quoted(min(differing))}"
    raise ConfigError(key, quoted(path), why, f"give a {role} with the same tokenizer")
