"""A GGUF file as a model to convert: its weights under Hugging Face names, and the config.json and tokenizer that it
tells.
"""

from __future__ import annotations

import collections
import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mrl.convert.sources import Source
from mrl.converters.accounting import check_model
from mrl.converters.companions import copy_companions
from mrl.converters.families import FAMILIES
from mrl.converters.gguf_file import PLAIN, TOKENS, GGUFFile, GGUFWeights, read_gguf
from mrl.converters.gguf_model import config_of, places_of
from mrl.converters.hf_config import normalize
from mrl.converters.json_file import read_json
from mrl.converters.safetensors_io import DTYPES
from mrl.converters.tokenizer_files import TOKENIZER_FILES
from mrl.data.tokenizer import load_tokenizer
from mrl.errors import ModelError, quoted

_SPLITS = (
    "llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken", "qwen2", "deepseek-r1-qwen", "gpt-2",
)  # fmt: skip
"""Values of tokenizer.ggml.pre that transformers knows: it cuts text in another way, in silence, for any other."""


def open_gguf(path: Path, *, tokenizer: str | None = None) -> Source:
    """Opens the model in the GGUF file `path`, every tensor of it accounted for.

    tokenizer: a Hugging Face folder to take the tokenizer from; by default what transformers makes of the file, if it
    can.
    """
    file = read_gguf(path)
    with contextlib.ExitStack() as ends:
        companions = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="mrl-gguf-")))
        config = config_of(file)
        config["dtype"] = str(DTYPES[_embedding(file)]).removeprefix("torch.")
        _write_config(path, companions, config)
        hf_config = normalize(read_json(companions / "config.json"), where=str(path))
        family = FAMILIES[hf_config["model_type"]]
        reader = GGUFWeights(file, *places_of(file, hf_config))
        ends.callback(reader.close)
        check_model(reader, family, hf_config)
        words = _tokenizer(file, companions, tokenizer, hf_config["vocab_size"])
        notes = [_types(file, hf_config), words]
        return Source(
            path, "GGUF file", reader, hf_config, family, "lm", companions, None, {}, notes=notes,
            ends=ends.pop_all(),
        )  # fmt: skip


def _embedding(file: GGUFFile) -> str:
    return file.tensors["token_embd.weight"].dtype


def _write_config(path: Path, folder: Path, fields: dict[str, Any]) -> None:
    model_type = fields["model_type"]
    try:
        config = CONFIG_MAPPING[model_type](**{k: v for k, v in fields.items() if k != "model_type"})
    except Exception as error:  # transformers has no common class for what a config can have wrong
        raise ModelError(
            path, why=f"transformers refuses its sizes: {' '.join(str(error).split())}", fix="get another file"
        ) from None
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    (folder / "config.json").write_text(config.to_json_string(), encoding="utf-8")


def _types(file: GGUFFile, hf_config: dict[str, Any]) -> str:
    """In words, what the file's tensors are read as."""
    counts = collections.Counter(stored.type for stored in file.tensors.values())
    exact = [f"{count} {kind}" for kind, count in counts.items() if kind in PLAIN]
    others = [f"{count} {kind}" for kind, count in counts.items() if kind not in PLAIN]
    parts = [f"{', '.join(exact)} as they are"] * bool(exact) + [f"{', '.join(others)} read as bf16"] * bool(others)
    of = f"GGUF of architecture {file.metadata['general.architecture']}, a {hf_config['model_type']}"
    return f"{of}; tensors: {'; '.join(parts)}"


def _tokenizer(file: GGUFFile, folder: Path, given: str | None, vocab_size: int) -> str:
    """Puts the tokenizer's files into `folder`. Returns a line that says which, or why there are none."""
    if given is not None:
        if not any((Path(given) / name).is_file() for name in TOKENIZER_FILES):
            raise ModelError(
                "--tokenizer", quoted(given), "is no folder with a tokenizer", "give a Hugging Face model folder"
            )
        with tempfile.TemporaryDirectory() as all_files:
            copy_companions(given, all_files)
            for name in ("config.json", "generation_config.json"):
                (Path(all_files) / name).unlink(missing_ok=True)
            shutil.copytree(all_files, folder, dirs_exist_ok=True)
        largest = max(load_tokenizer(str(folder), trust_remote_code=False).get_vocab().values())
        if largest >= vocab_size:
            raise ModelError(
                "--tokenizer",
                quoted(given),
                f"has tokens up to {largest} and the model has {vocab_size}",
                "give the model's own",
            )
        return f"tokenizer: of {given}"
    why = _made_by_transformers(file, folder)
    if why is None:
        return "tokenizer: made of the file by transformers"
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    return f"no tokenizer was written: {why}; give a folder that has the model's own with --tokenizer HF_DIR"


def _made_by_transformers(file: GGUFFile, folder: Path) -> str | None:
    """Writes the tokenizer that transformers makes of the file, and checks it. Returns why there is none, None where
    there is.
    """
    tokens = file.metadata.get(TOKENS)
    if not tokens:
        return "the file has none"
    kind, split = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if kind == "gpt2" and split not in _SPLITS:
        return f"how it cuts text (tokenizer.ggml.pre = {split!r}) is not known to transformers"
    try:
        with (
            tempfile.TemporaryDirectory() as alone
        ):  # transformers would prefer a tokenizer.json that lies beside the file
            (Path(alone) / file.path.name).symlink_to(file.path.resolve())
            made = AutoTokenizer.from_pretrained(alone, gguf_file=file.path.name, trust_remote_code=False)
        made.save_pretrained(folder)
        again = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # whatever transformers meets in a file that it does not know
        return f"transformers cannot make it of the file ({' '.join(str(error).split())[:200]})"
    if again.convert_ids_to_tokens(list(range(len(tokens)))) != tokens or len(again) != len(tokens):
        return "what transformers makes of the file has other tokens than it says"
    return None
