"""The files of a model folder beside its weights: config.json, tokenizer, chat template, generation config, code.

A link is followed to the file that it leads to, wherever that is: the hub's cache is made of links. What is under such
a name and is no file, or cannot be read, is refused and never passed over; a folder is none of these files.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mrl.converters.json_file import parse_json, read_json
from mrl.errors import ModelError

PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "*.tiktoken",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "*.py",
    "LICENSE*",
)
TEMPLATES = "additional_chat_templates"
"""A folder whose files are chat templates, all of them."""
LFS_POINTER = b"version https://git-lfs"
"""How a file begins that `git clone` left where Git LFS is not installed."""
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def companion_files(source: Path) -> list[Path]:
    """Returns the files beside a model's weights. Raises ModelError on dead links and on what is no file."""
    named = [source / name for name in os.listdir(source) if any(fnmatch.fnmatchcase(name, p) for p in PATTERNS)]
    templates = source / TEMPLATES
    if os.path.lexists(templates) and stat.S_ISDIR(_mode(templates)):
        named += [templates / name for name in os.listdir(templates)]
    return sorted(_regular(named))


def _regular(files: list[Path]) -> Iterator[Path]:
    for file in files:
        mode = _mode(file)
        if stat.S_ISREG(mode):
            yield file
        elif not stat.S_ISDIR(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "no file")
            raise ModelError(
                file, why=f"is {kind}, and a model has a file of that name", fix="get the file again, or remove it"
            )


def _mode(path: Path) -> int:
    try:
        return os.stat(path).st_mode
    except OSError as error:
        what = (
            f"a link that leads to no file ({os.readlink(path)}: {error.strerror})"
            if path.is_symlink()
            else error.strerror
        )
        raise ModelError(path, why=f"is {what}", fix="get the file again, or remove it") from None


def check_companions(folder: Path) -> None:
    """Refuses files beside the weights that a download left as no files: pointers of Git LFS, and JSON that is none."""
    for file in companion_files(folder):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ModelError(file, why=f"cannot be read ({error.strerror})", fix="get the file again") from None
        if content.startswith(LFS_POINTER):
            raise ModelError(
                file, why="is a pointer of Git LFS, not the file", fix="run `git lfs pull` there, or get the file again"
            )
        if file.suffix == ".json" and file.name != "config.json":
            try:
                parse_json(content)
            except ValueError:
                raise ModelError(
                    file, why=f"is cut off or no JSON ({len(content)} bytes)", fix="get the file again"
                ) from None


def copy_companions(
    source: str | Path, out: str | Path, *, dtype: torch.dtype | None = None, changes: Mapping[str, Any] | None = None
) -> list[str]:
    """Copy the `companion_files`.

    Files are copied byte for byte. config.json alone is edited, and only where it would be untrue: its dtype
    (in the spelling it has) when the weights are written in another one, and the keys of `changes`; None removes a key.
    Returns the names of the files copied.
    """
    source, out = Path(source), Path(out)
    files = companion_files(source)
    for file in files:
        target = out / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not (target.exists() and target.samefile(file)):
            shutil.copyfile(file, target)
    config_file = out / "config.json"
    if config_file.is_file():
        config = read_json(config_file)
        wanted = dict(changes or {})
        if dtype is not None:
            wanted |= _dtype_keys(config, dtype)
            text = config.get("text_config")
            if isinstance(text, dict) and "text_config" not in wanted:
                wanted["text_config"] = text | _dtype_keys(text, dtype)
        if any(config.get(key) != value for key, value in wanted.items()):
            edited = {k: v for k, v in (config | wanted).items() if v is not None or k not in wanted}
            config_file.write_text(json.dumps(edited, indent=2) + "\n", encoding="utf-8")
    return [str(file.relative_to(source)) for file in files]


def _dtype_keys(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, str]:
    return {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in config}
