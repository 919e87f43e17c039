"""The model and the data of the benchmark, made from a seed in a folder: nothing is downloaded.

model/         a Qwen3-like model of about 20 M parameters with random fp32 weights, and a tokenizer with a chat template
packed.json    steps of packed rows: for each step, rows of exactly `ROW` tokens; a row is a list of documents
chats.jsonl    chats of 41 to 225 tokens, mean about 131
lengths.json   tokens of each chat, as a trainer's shifted batch counts them (one fewer than the chat has)

For reinforcement learning (`make_rl`): model/ of one of two sizes, without a chat template, and prompts.jsonl.
"""

from __future__ import annotations

import json
import pathlib
import random
from collections.abc import Mapping
from typing import Any

VOCABULARY, ROW, ROWS = 8192, 512, 4
SHORTEST, LONGEST = 41, 225
CHATS_PER_STEP = 16
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = "{% for message in messages %}{{ '<|im_start|> ' + message.role + ' ' + message.content + ' <|im_end|> ' }}{% endfor %}"
MODEL = {
    "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 8, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip


SMALL_VOCABULARY = 1024
SMALL = MODEL | {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
"""About 3.7 M parameters with its vocabulary."""

SIZES = {"3.7 M": (SMALL, SMALL_VOCABULARY), "20 M": (MODEL, VOCABULARY)}
PROMPTS_PER_ITERATION, SAMPLES_PER_PROMPT, NEW_TOKENS = 4, 8, 64
SHORTEST_PROMPT, LONGEST_PROMPT = 20, 30


def make_rl(folder: pathlib.Path, *, size: str, iterations: int, seed: int = 0) -> None:
    """A model of `SIZES` and prompts for so many iterations of `PROMPTS_PER_ITERATION`.

    The end token's id is the first one past the model's vocabulary: no sampler can draw it, and every completion has
    exactly as many tokens as it may have, at no cost to anyone.
    """
    sizes, vocabulary = SIZES[size]
    make_model(folder / "model", seed, sizes=sizes, vocabulary=vocabulary, end_drawn=False)
    numbers = random.Random(seed)
    count = iterations * PROMPTS_PER_ITERATION
    prompts = [words(numbers.randint(SHORTEST_PROMPT, LONGEST_PROMPT), vocabulary, numbers) for _ in range(count)]
    rows = "".join(json.dumps({"prompt": " ".join(prompt)}) + "\n" for prompt in prompts)
    (folder / "prompts.jsonl").write_text(rows, encoding="utf-8")


def make(folder: pathlib.Path, *, steps: int, seed: int = 0) -> None:
    """Writes everything above into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model", seed)
    numbers = random.Random(seed)
    packed = [[[document(n, numbers) for n in row_lengths(numbers)] for _ in range(ROWS)] for _ in range(steps)]
    (folder / "packed.json").write_text(json.dumps(packed), encoding="utf-8")
    sizes = [numbers.randint(SHORTEST, LONGEST) for _ in range(steps * CHATS_PER_STEP)]
    chats = "".join(json.dumps({"messages": chat(size, numbers)}) + "\n" for size in sizes)
    (folder / "chats.jsonl").write_text(chats, encoding="utf-8")
    (folder / "lengths.json").write_text(json.dumps([size - 1 for size in sizes]), encoding="utf-8")


def make_model(
    folder: pathlib.Path, seed: int, *, sizes: Mapping[str, Any] = MODEL, vocabulary: int = VOCABULARY,
    end_drawn: bool = True, dtype: str = "float32",
) -> None:  # fmt: skip
    """end_drawn: chats, whose end token the model can draw; otherwise plain text and an end token that it cannot.

    Then config.json names no padding token: it is drawn like all others, and transformers starts its row of the embedding
    at zero, whose RMSNorm has a gradient a thousand times the others', and never trains it.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

    special = SPECIAL if end_drawn else SPECIAL[:2]
    known = [*special, "user", "assistant"]
    known += [f"w{i}" for i in range(vocabulary - len(known))] + ([] if end_drawn else [SPECIAL[2]])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    fast.chat_template = CHAT_TEMPLATE if end_drawn else None
    fast.save_pretrained(folder)
    kind, name = (Qwen3MoeConfig, "Qwen3Moe") if "num_experts" in sizes else (Qwen3Config, "Qwen3")
    config = kind(
        architectures=[f"{name}ForCausalLM"], vocab_size=vocabulary, dtype=dtype, bos_token_id=None,
        eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id if end_drawn else None, **sizes,
    )  # fmt: skip
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)


def row_lengths(numbers: random.Random) -> list[int]:
    """Lengths of documents from `SHORTEST` to `LONGEST` that fill a row of `ROW` tokens exactly."""
    lengths, left = [], ROW
    while left > LONGEST:
        lengths.append(numbers.randint(SHORTEST, min(LONGEST, left - SHORTEST)))
        left -= lengths[-1]
    return [*lengths, left]


def document(length: int, numbers: random.Random) -> list[int]:
    """Ids of a document that gives `length` shifted tokens. A tenth of the vocabulary, so that the loss falls."""
    return [numbers.randrange(5, VOCABULARY // 10) for _ in range(length + 1)]


def chat(size: int, numbers: random.Random) -> list[dict]:
    """One question and answer of `size` tokens, markers and roles included."""
    said = words(size - 6, VOCABULARY, numbers)
    cut = len(said) // 3
    return [
        {"role": "user", "content": " ".join(said[:cut])},
        {"role": "assistant", "content": " ".join(said[cut:])},
    ]


def words(count: int, vocabulary: int, numbers: random.Random) -> list[str]:
    return [f"w{numbers.randrange(vocabulary // 10)}" for _ in range(count)]
