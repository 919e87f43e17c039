"""The files of a tokenizer in a model folder: standard library alone, for what has no need of the tokenizer itself."""

from __future__ import annotations

import json
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def write_chat_template(folder: str | Path, template: str) -> None:
    """Makes `template` the one chat template of the tokenizer in `folder`, as transformers saves it."""
    folder = Path(folder)
    for file in (*folder.glob("chat_template*"), *folder.glob("additional_chat_templates/*")):
        file.unlink()
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        content = json.loads(settings.read_text(encoding="utf-8"))
        if content.pop("chat_template", None) is not None:
            settings.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    with open(folder / "chat_template.jinja", "w", encoding="utf-8", newline="") as out:
        out.write(template)


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
        content = json.loads(file.read_text(encoding="utf-8"))
        part = content.get("text_config") or content
        if any(part.get(field) != value for field, value in fields.items()):
            part.update(fields)
            file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
