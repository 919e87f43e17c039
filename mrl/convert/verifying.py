"""Compares two models, tensor by tensor and bit by bit, and then by their logits (`mrl convert verify`).

Logits are computed on the CPU in fp32:

    a Hugging Face folder                 by transformers
    a checkpoint of the Megatron engine   by megatron-core
    a checkpoint of the FSDP engine       by transformers, on the tensors as read here

Two engines round differently, so logits may differ a little even if every bit of the weights is the same.

If both sides are adapters, these and their bases are compared. A folder of peft's does not say in which dtype they are
added.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import psutil
import torch
from rich.filesize import decimal
from torch import Tensor

from mrl.convert.adapters import MergedReader
from mrl.convert.sources import Source
from mrl.convert.workspace import Progress, no_progress, silent
from mrl.errors import DataError
from mrl.weights.accounting import SCORE, follows_from_config
from mrl.weights.json_file import plain_data
from mrl.weights.mcore_weights import (
    McoreReader,
    architecture,
    blocks_of_rows,
    differing_fields,
)
from mrl.weights.safetensors_io import tensor_bytes
from mrl.weights.tokenizer_files import TOKENIZER_FILES

PROMPTS = (
    "The capital of France is",
    "Question: What is 17 + 25? Answer:",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a small village by the sea, there lived",
    "The lighthouse had stood at the end of the harbour wall for more than two hundred years, and in all that time its "
    "lamp had gone out only twice. The first time was in the winter of 1847, when a storm from the north broke three "
    "of the great panes and the keeper, a man called Thomas Arden, climbed the stairs with a lantern in each hand and "
    "stood there until morning. The second time nobody could explain. It was a quiet night in June, the sea lay flat, "
    "and 14 boats were on their way home with the tide. At ten minutes past two the light simply stopped turning, and "
    "then it was dark. The fishermen say that they steered by the sound of a bell, although the church had sold its "
    "own bell long before. In the book which the keepers had to fill in every day, the page for that night is there, "
    "with the weather, the wind and the names of the ships, but under the heading where the cause of any failure was "
    "to be written down, somebody has drawn, very carefully, with blue ink,",
)
PROMPT_TOKENS = 200
"""Most tokens of each of our texts. The last has as many, so windows and rotary factors that end before that act."""
RANDOM_TOKENS = (24, 24, 24, 24, PROMPT_TOKENS)
TOLERANCE = 1e-3
"""Largest difference of two logits, as a part of the logits' spread (their standard deviation), that two engines'
rounding explains.
"""


@dataclasses.dataclass(frozen=True)
class LogitsRow:
    """Says how two sets of logits over one prompt compare."""

    prompt: str
    tokens: int
    max_difference: float
    mean_difference: float
    top1_agreement: float
    kl: float  # KL(A || B) in nats, the mean over the tokens
    spread: float  # standard deviation of A's logits

    @property
    def alike(self) -> bool:
        return self.max_difference <= TOLERANCE * self.spread


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Is the result of a comparison of two models."""

    a: str
    b: str
    tensors: int
    bytes: int
    differences: list[str]  # of tensors, one line each
    config: list[str]  # differences of config.json
    logits: list[LogitsRow]  # of each prompt
    no_logits: str | None  # why there are none

    @property
    def same(self) -> bool:
        return not (self.differences or self.config) and all(row.alike for row in self.logits)

    def as_json(self) -> dict[str, Any]:
        """Returns plain data (`plain_data`)."""
        return plain_data(self) | {"same": self.same}


def compare(
    a: Source,
    b: Source,
    *,
    prompts: Sequence[str] = (),
    logits: bool = True,
    progress: Progress = silent,
) -> Comparison:
    """Compares two models. prompts: texts to compute logits of, by default a few of ours. logits: False compares
    tensors only."""
    if isinstance(a.reader, MergedReader) and isinstance(b.reader, MergedReader):
        differences, count, total = _adapters(a, a.reader, b, b.reader, progress)
        b = dataclasses.replace(b, reader=b.reader.in_dtype(a.reader.dtype))
    else:
        differences, count, total = _tensors(a, b, progress)
    a.check()
    b.check()
    rows: list[LogitsRow] = []
    why = None
    if not logits:
        why = "not asked for"
    elif a.head != "lm" or b.head != "lm":
        why = "a value head has none"
    elif a.hf_config["vocab_size"] != b.hf_config["vocab_size"]:
        why = "the vocabularies differ"
    elif a.quantised or b.quantised:
        why = f"{(a if a.quantised else b).folder} is quantised, and transformers computes such a model in another way"
    else:
        why = _no_room(a)
        rows = [] if why else _logits(a, b, prompts)
    return Comparison(_name(a), _name(b), count, total, differences, _configs(a, b), rows, why)


def _configs(a: Source, b: Source) -> list[str]:
    """Returns a line for each field of config.json that makes the same weights another model."""
    of_a, of_b = (architecture(source.family, source.hf_config) for source in (a, b))
    if "value" in (a.head, b.head):  # it is never tied, and config.json says so where one was exported
        del of_a["tie_word_embeddings"], of_b["tie_word_embeddings"]
    return differing_fields(of_a, of_b, f"in {a.companion_folder}", f"in {b.companion_folder}")


def _no_room(source: Source) -> str | None:
    """Returns why logits cannot be computed on this machine: the model does not fit in its memory in fp32."""
    needed = 4 * sum(math.prod(info.shape) for info in source.reader.tensors.values())
    free = psutil.virtual_memory().available
    if needed <= free:
        return None
    return f"the model needs {decimal(needed)} of memory in fp32, and {decimal(free)} are free"


def _name(source: Source) -> str:
    return f"{source.folder} ({source.what})"


def _tensors(a: Source, b: Source, progress: Progress) -> tuple[list[str], int, int]:
    """Returns a line for each differing tensor, how many tensors there are, and bytes compared."""
    ours, theirs = _names(a), _names(b)
    both, differences = _matched(a, ours, b, theirs)
    total = sum(tensor_bytes(a.reader.tensors[name]) for name in both)
    advance = progress(total)
    for name in both:
        of_a, of_b = a.reader.tensors[name], b.reader.tensors[name]
        if (of_a.shape, of_a.dtype) == (of_b.shape, of_b.dtype):
            differences += _bits(name, a.reader(name), b.reader(name), of_a.shape, advance)
        else:
            differences.append(f"{name}: {of_a.dtype} {list(of_a.shape)} and {of_b.dtype} {list(of_b.shape)}")
            advance(tensor_bytes(of_a))
    return differences, len({*ours, *theirs}), total


def _adapters(
    a: Source, of_a: MergedReader, b: Source, of_b: MergedReader, progress: Progress
) -> tuple[list[str], int, int]:
    """Compares two sets of adapters, and their bases unless these are one folder.

    Returns a line for each tensor that differs, the number of tensors, and bytes compared.
    """
    ours, theirs = of_a.adapter, of_b.adapter
    both, differences = _matched(a, ours, b, theirs)
    infos = {name: info for name, info in of_a.tensors.items() if name != SCORE}
    bases = {} if os.path.samefile(a.companion_folder, b.companion_folder) else infos
    known = of_b.tensors
    differences += [f"base {n}: another shape" for n in bases if n not in known or known[n].shape != bases[n].shape]
    total = sum(ours[name].nbytes for name in both) + sum(map(tensor_bytes, bases.values()))
    advance = progress(total)
    scales = [{shape.b_name: shape.scale for shape in reader.shapes.values()} for reader in (of_a, of_b)]
    for name in both:
        x, y = ours[name], theirs[name]
        scale_a, scale_b = (found.get(name, 1.0) for found in scales)
        if x.shape != y.shape:
            differences.append(f"{name}: shape {list(x.shape)} and {list(y.shape)}")
        elif line := _bits(name, x, y, x.shape, no_progress):
            differences += line
        elif scale_a != scale_b:
            differences.append(f"{name}: scale {scale_a:g} and {scale_b:g}")
        advance(x.nbytes)
    for name, info in bases.items():
        if name in known and known[name].shape == info.shape:
            differences += [
                f"base {line}" for line in _bits(name, of_a.base(name), of_b.base(name), info.shape, no_progress)
            ]
        advance(tensor_bytes(info))
    return differences, len(ours.keys() | theirs.keys()) + len(bases), total


def _matched(a: Source, ours: Collection[str], b: Source, theirs: Collection[str]) -> tuple[list[str], list[str]]:
    """Returns the names on both sides, and a line for each that is on one."""
    lines = [f"{name}: only in {a.folder}" for name in ours if name not in theirs]
    lines += [f"{name}: only in {b.folder}" for name in theirs if name not in ours]
    return [name for name in ours if name in theirs], lines


def _names(source: Source) -> list[str]:
    """Returns the names of tensors to compare.

    Copies were compared when the folder was opened. A checkpoint has no buffers that follow from config.json.
    """
    return [n for n in source.reader.tensors if n not in source.copies and not follows_from_config(n)]


def _bits(name: str, a: Any, b: Any, shape: tuple[int, ...], advance: Callable[[int], None]) -> list[str]:
    """Returns a line with the number of entries that differ and the largest difference; none if there are none."""
    count, largest = 0, 0.0
    rows = zip(blocks_of_rows(a, shape, 0, shape[0]), blocks_of_rows(b, shape, 0, shape[0]), strict=True)
    for of_a, of_b in rows:
        advance(of_a.numel() * of_a.element_size())
        if of_a.dtype != of_b.dtype:
            return [f"{name}: dtype {of_a.dtype} and {of_b.dtype}"]
        same = torch.equal(of_a.contiguous().view(torch.uint8), of_b.contiguous().view(torch.uint8))
        if not same:
            width = of_a.element_size()
            bits = [t.contiguous().reshape(-1).view(torch.uint8).view(-1, width) for t in (of_a, of_b)]
            count += int((bits[0] != bits[1]).any(1).sum())
            gap = (of_a.double() - of_b.double()).abs()
            largest = max(largest, float(gap.nan_to_num(nan=float("inf")).max()))
    return [f"{name}: {count} entries differ, by up to {largest:.3g}"] if count else []


def _logits(a: Source, b: Source, prompts: Sequence[str]) -> list[LogitsRow]:
    named = _tokens(a, b, prompts)
    tokens = [ids for _, ids in named]
    of_a = _run(a, tokens)
    of_b = _run(b, tokens)
    return [_row(name, x, y) for (name, _), x, y in zip(named, of_a, of_b, strict=True)]


def _tokens(a: Source, b: Source, prompts: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Returns (name, token ids) of each prompt: by the tokenizer of one of the models, else seeded tokens."""
    vocabulary = a.hf_config["vocab_size"]
    most = min(PROMPT_TOKENS, *(source.hf_config["max_position_embeddings"] for source in (a, b)))
    folder = next(
        (s.companion_folder for s in (a, b) if any((s.companion_folder / name).is_file() for name in TOKENIZER_FILES)),
        None,
    )
    if folder is None:
        if prompts:
            raise DataError(
                "--prompt",
                why=f"neither {a.companion_folder} nor {b.companion_folder} has a tokenizer",
                fix="leave it out to use seeded tokens",
            )
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randint(vocabulary, (min(n, most),), generator=generator).tolist() for n in RANDOM_TOKENS]
        return [(f"{len(ids)} seeded tokens", ids) for ids in drawn]
    from mrl.data.tokenizer import load_tokenizer  # transformers is slow to import, and comparing bits needs none

    tokenizer = load_tokenizer(str(folder))
    named = [(text, tokenizer(text)["input_ids"][: None if prompts else most]) for text in prompts or PROMPTS]
    for text, ids in named:
        if not ids or max(ids) >= vocabulary:
            raise DataError(
                folder,
                why=f"its tokenizer makes no tokens of {text!r}, or some that are not of the model's {vocabulary}",
                fix="give a longer --prompt, or the model's own tokenizer",
            )
    return named


def _run(source: Source, tokens: list[list[int]]) -> list[Tensor]:
    """Returns logits for each prompt. One model is in memory at a time."""
    path = str(source.companion_folder)
    if isinstance(source.reader, McoreReader):
        from mrl.engine.megatron.logits import logits  # megatron is slow to import, and most of this needs none

        return logits(path, source.reader, tokens)
    from mrl.engine.fsdp.logits import logits_of_folder, logits_of_weights

    if source.as_published:
        return logits_of_folder(path, tokens)
    return logits_of_weights(path, source.reader, tokens)


def _row(name: str, a: Tensor, b: Tensor) -> LogitsRow:
    """Returns how two sets of logits compare."""
    a, b = a.double(), b.double()
    gap, log_a, log_b = (a - b).abs(), a.log_softmax(-1), b.log_softmax(-1)
    kl = float((log_a.exp() * (log_a - log_b)).sum()) / len(a)
    return LogitsRow(
        prompt=name,
        tokens=len(a),
        max_difference=float(gap.max()),
        mean_difference=float(gap.mean()),
        top1_agreement=float((a.argmax(-1) == b.argmax(-1)).double().mean()),
        kl=max(kl, 0.0),  # rounding alone makes it negative; NaN stays
        spread=float(a.std()),
    )


def table(found: Comparison, most: int = 20) -> str:
    """Returns a comparison as a person reads it."""
    lines = [f"A  {found.a}", f"B  {found.b}", ""]
    same = found.tensors - len(found.differences)
    lines.append(f"tensors  {same} of {found.tensors} the same, bit for bit ({found.bytes} bytes compared)")
    lines += [f"  {line}" for line in found.differences[:most]]
    if len(found.differences) > most:
        lines.append(f"  and {len(found.differences) - most} more (--json lists all)")
    if found.config:
        lines += ["config   another model:", *(f"  {line}" for line in found.config)]
    if found.no_logits is not None:
        lines.append(f"logits   not compared: {found.no_logits}")
    else:
        lines += ["", "logits   max difference  mean difference   top-1 same  KL(A||B)  tokens  prompt"]
        for row in found.logits:
            shown = row.prompt.replace("\n", " ")
            shown = shown if len(shown) <= 40 else shown[:37] + "..."
            mark = "" if row.alike else "  DIFFERENT"
            lines.append(
                f"         {row.max_difference:14.3g}  {row.mean_difference:15.3g}  {row.top1_agreement:10.1%}  "
                f"{row.kl:8.2g}  {row.tokens:6d}  {shown}{mark}"
            )
    lines += ["", "the same" if found.same else "DIFFERENT"]
    return "\n".join(lines)
