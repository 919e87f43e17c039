"""Makes everything that the arithmetic example trains on, in a folder, from a seed: no download.

FOLDER/model/        config.json of a tiny Qwen3-shaped model, and a tokenizer with a chat template; no weights
FOLDER/train.jsonl   chat rows: {"messages": [{"role": "user", "content": "37+45="}, ...], "answer": "82"}
FOLDER/eval.jsonl    1,000 rows with problems that are not in train.jsonl

python examples/arithmetic/make_data.py runs/arithmetic-data
"""

from __future__ import annotations

import json
import pathlib
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

LARGEST = 99
EVAL_ROWS = 1000
"""A share p of them is measured to two standard errors of at most 3.2 points: 2 * sqrt(p * (1 - p) / 1000)."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROLES = ("system", "user", "assistant")
CHARACTERS = "0123456789+= \n"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML. What is between the generation markers trains."""


def problems(seed: int) -> list[tuple[int, int]]:
    """Every pair of numbers from 0 to LARGEST, in a seeded order."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    random.Random(seed).shuffle(pairs)
    return pairs


def row(a: int, b: int) -> dict:
    """A problem as a conversation, and its answer for rewards to look at."""
    question, answer = f"{a}+{b}=", str(a + b)
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "answer": answer}


def write_rows(path: pathlib.Path, pairs: list[tuple[int, int]]) -> None:
    path.write_text("".join(json.dumps(row(a, b)) + "\n" for a, b in pairs), encoding="utf-8")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character, role and marker."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *ROLES, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """About 0.3 million parameters."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"], vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=128,
        tie_word_embeddings=False, initializer_range=0.05, dtype="float32",
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip


def make(folder: str | pathlib.Path, seed: int = 0) -> None:
    """Writes the model folder and both files."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = problems(seed)
    write_rows(folder / "eval.jsonl", pairs[:EVAL_ROWS])
    write_rows(folder / "train.jsonl", pairs[EVAL_ROWS:])
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    make_config(tokenizer).save_pretrained(folder / "model")


if __name__ == "__main__":
    make(sys.argv[1] if len(sys.argv) > 1 else "runs/arithmetic-data")
