"""Writes the files of a tokenizer in a model folder, without PyTorch and without the tokenizer itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mrl.weights.json_file import read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
GENERATION = "generation_config.json"
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_chat_template(folder: str | Path, template: str) -> None:
    """Makes `template` the one chat template of the tokenizer in `folder`, as transformers saves it."""
    folder = Path(folder)
    for file in (*folder.glob("chat_template*"), *folder.glob("additional_chat_templates/*")):
        file.unlink()
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        content = read_json(settings)
        if content.pop("chat_template", None) is not None:
            settings.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    with open(folder / "chat_template.jinja", "w", encoding="utf-8", newline="") as out:
        out.write(template)


def add_end_tokens(folder: str | Path, model: str | Path, own: Sequence[int], added: Sequence[int]) -> None:
    """Writes generation_config.json into `folder` with more end tokens than in the folder `model`, the start of
    training.

    own: the model's end tokens, if its files name none.
    """
    if not added:
        return
    file = Path(model) / GENERATION
    if file.is_file():
        content = read_json(file)
    else:  # transformers takes these from config.json as long as there is no such file
        config = read_json(Path(model) / "config.json")
        content = {name: config[name] for name in SPECIAL if config.get(name) is not None}
    content.pop("_from_model_config", None)  # else transformers 4 takes config.json's end token for its
    before = content.get("eos_token_id")
    if not isinstance(before, list):
        before = list(own) if before is None else [before]
    content["eos_token_id"] = [*before, *(token for token in added if token not in before)]
    (Path(folder) / GENERATION).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_pad_token(folder: str | Path, token: int, text: str) -> None:
    """Makes `token`, whose text is `text`, the padding of the model and of the tokenizer in `folder`.

    A folder of adapters has no config.json.
    """
    changes: dict[str, dict[str, int | str]] = {
        "config.json": {"pad_token_id": token},
        "tokenizer_config.json": {"pad_token": text},
        "special_tokens_map.json": {"pad_token": text},
    }
    for name, fields in changes.items():
        file = Path(folder) / name
        if not file.is_file():
            continue
        content = read_json(file)
        part = content.get("text_config") or content
        if any(part.get(field) != value for field, value in fields.items()):
            part.update(fields)
            file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
