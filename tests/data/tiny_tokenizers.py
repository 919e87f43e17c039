"""Real tokenizers, trained in the test, and data files. Nothing is downloaded."""

import functools
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mrl.config.schema import DataConfig

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3: the reasoning of an assistant turn is kept only after the last user turn.
STRIPS_REASONING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Phi-3: EOS ends the whole rendering, whatever the last turn is.
EOS_AT_THE_END = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
WITH_TOOLS = (
    "{% if tools %}TOOLS {% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% if loud is defined %}LOUD{{ loud }}{% endif %}" + CHATML
)

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "What is 2 + 2? The answer is 4.",
    "system user assistant tool",
    "You are a helpful assistant. Question: hello there! Answer:",
    "<think>\nhm\n</think>\n\n",
]


@functools.lru_cache
def trained_bpe(bos: bool) -> str:
    """A byte-level BPE of 400 tokens with ChatML's special tokens; `bos`: it puts <s> in front of every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str()


def make_tokenizer(template=CHATML, *, bos=False, eos="</s>"):
    """A fast tokenizer; `bos`: one that begins every text with <s>."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained_bpe(bos)), bos_token="<s>", eos_token=eos, chat_template=template
    )


def turns(*contents, system=None):
    """Messages that alternate user and assistant."""
    head = [{"role": "system", "content": system}] if system else []
    return head + [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def write_jsonl(path, rows) -> str:
    """`rows`: dicts, or strings that go into the file as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def config(train, **keys) -> DataConfig:
    return DataConfig(**{"train": str(train), "max_length": 512, **keys})


def trained_text(tokenizer, example) -> list[str]:
    """What trains, in words: one string per run of trained tokens."""
    runs, previous = [], 0
    for token, trains in zip(example.ids, example.mask, strict=True):
        if trains and not previous:
            runs.append([])
        if trains:
            runs[-1].append(token)
        previous = trains
    return [tokenizer.decode(run) for run in runs]
