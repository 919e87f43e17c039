"""The model and the data of the benchmark, made from a seed in a folder: nothing is downloaded.

model/         a Qwen3-like model of about 20 M parameters with random fp32 weights, and a tokenizer with a chat template
packed.json    steps of packed rows: for each step, rows of exactly `ROW` tokens; a row is a list of documents
chats.jsonl    chats of 41 to 225 tokens, mean about 131
lengths.json   tokens of each chat, as a trainer's shifted batch counts them (one fewer than the chat has)
"""

from __future__ import annotations

import json
import pathlib
import random

VOCABULARY, ROW, ROWS = 8192, 512, 4
SHORTEST, LONGEST = 41, 225
CHATS_PER_STEP = 16
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = "{% for message in messages %}{{ '<|im_start|> ' + message.role + ' ' + message.content + ' <|im_end|> ' }}{% endfor %}"
MODEL = {
    "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 8, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip


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


def make_model(folder: pathlib.Path, seed: int) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    words = [*SPECIAL, "user", "assistant", *(f"w{i}" for i in range(VOCABULARY - len(SPECIAL) - 2))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"], vocab_size=VOCABULARY, dtype="float32", bos_token_id=None,
        eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id, **MODEL,
    )  # fmt: skip
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


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
    words = [f"w{numbers.randrange(VOCABULARY // 10)}" for _ in range(size - 6)]
    cut = len(words) // 3
    return [
        {"role": "user", "content": " ".join(words[:cut])},
        {"role": "assistant", "content": " ".join(words[cut:])},
    ]
