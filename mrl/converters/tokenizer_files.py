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
