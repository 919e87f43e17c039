"""The models and rows of test_keys_reach.py, made once: `make(folder)`."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import datasets
import torch
from safetensors.torch import load_file, save_file

from tests.engine import mtp, tiny
from tests.trainers import tiny_runs

PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
CODE = """
from transformers import PreTrainedTokenizerFast, Qwen3Config


class CodedTokenizer(PreTrainedTokenizerFast):
    def apply_chat_template(self, messages, *args, **kwargs):
        messages = [{**m, "content": m["content"].replace("0=", "1=")} for m in messages]
        return super().apply_chat_template(messages, *args, **kwargs)


class CodedConfig(Qwen3Config):
    pass
"""


def make(folder: pathlib.Path) -> None:
    make_models(folder)
    make_rows(folder)


def make_models(folder: pathlib.Path) -> None:
    """dense, with weights and with others; four layers; experts; dropout; an output layer of zeros; MTP layers; code of its own."""
    tokenizer = tiny_runs.load_example("arithmetic/make_data.py").make_tokenizer()

    def model(name: str, family: str = "qwen3", **options: Any) -> None:
        tiny.make_model(str(folder / name), family, vocab=len(tokenizer), **options)
        tokenizer.save_pretrained(folder / name)

    model("dense")
    model("other", seed=1)
    model("deep", layers=4)
    model("experts", "mixtral")
    model("dropout", attention_dropout=0.5)
    model("dead")
    mtp.make_model(str(folder / "mtp"), "glm4_moe", vocab=len(tokenizer))
    tokenizer.save_pretrained(folder / "mtp")
    weights = folder / "dead" / "model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, "lm_head.weight": torch.zeros_like(tensors["lm_head.weight"])}, weights, {"format": "pt"})
    shutil.copytree(folder / "dense", folder / "coded")
    (folder / "coded" / "code.py").write_text(CODE)
    for file, changes in {
        "tokenizer_config.json": {
            "tokenizer_class": "CodedTokenizer", "auto_map": {"AutoTokenizer": [None, "code.CodedTokenizer"]},
        },
        "config.json": {"auto_map": {"AutoConfig": "code.CodedConfig"}},
    }.items():  # fmt: skip
        path = folder / "coded" / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def make_rows(folder: pathlib.Path) -> None:
    def write(name: str, rows: Sequence[Any]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def sums(first: int, count: int) -> list[dict[str, Any]]:
        return [tiny_runs.chat([first + i] * (1 + i % 3)) for i in range(count)]

    def tokens(count: int) -> dict[str, Any]:
        return {"input_ids": list(range(3, 3 + count))}

    write("sums.jsonl", sums(0, 4))
    write("six.jsonl", sums(0, 6))
    write("hundreds.jsonl", sums(100, 4))
    write("even.jsonl", [tokens(17)] * 4)
    write("uneven.jsonl", [tokens(count) for count in (17, 5, 12, 9)])
    (folder / "plain.jinja").write_text(PLAIN_TEMPLATE)
    splits = {name: datasets.Dataset.from_list(sums(first, 4)) for name, first in (("train", 0), ("test", 300))}
    datasets.DatasetDict(splits).save_to_disk(str(folder / "saved"))
