"""Exact match of a model's greedy answers on held-out problems, with transformers alone.

python examples/arithmetic/evaluate.py runs/arithmetic/hf runs/arithmetic-data/eval.jsonl
"""

from __future__ import annotations

import json
import math
import pathlib
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

logging.disable_progress_bar()


def load(folder: str | pathlib.Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a folder and its tokenizer; where the folder has no weights, random ones from a fixed seed."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if any(pathlib.Path(folder).glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(folder), tokenizer
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)), tokenizer


def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[str]) -> list[str]:
    """The model's greedy answer to each question."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    tokenizer.padding_side = "left"
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    model.eval()
    output = model.generate(
        input_ids=prompts["input_ids"], attention_mask=prompts["attention_mask"], max_new_tokens=8, do_sample=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)


def in_words(score: float, count: int) -> str:
    """A share of `count` problems, and how far that of all problems may be from it: two standard errors."""
    return f"{score:.1%} (+- {2 * math.sqrt(score * (1 - score) / count):.1%}) of {count:,} problems"


def exact_match(folder: str | pathlib.Path, problems: str | pathlib.Path) -> tuple[float, list[tuple[str, str, str]]]:
    """The share of problems answered exactly, and (question, right answer, the model's) of each."""
    rows = [json.loads(line)["messages"] for line in pathlib.Path(problems).read_text(encoding="utf-8").splitlines()]
    questions, right = [row[0]["content"] for row in rows], [row[1]["content"] for row in rows]
    given = answers(*load(folder), questions)
    table = list(zip(questions, right, given, strict=True))
    return sum(r == g for _, r, g in table) / len(table), table


if __name__ == "__main__":
    score, table = exact_match(sys.argv[1], sys.argv[2])
    for question, right, given in table[:5]:
        print(f"{question}{given!r}  ({'right' if given == right else 'it is ' + right})")
    print(f"exact match: {in_words(score, len(table))}")
