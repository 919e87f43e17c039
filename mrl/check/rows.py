"""The batch that is checked: the first rows of the user's data, through the code that training reads them with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mrl.batch import Batch
from mrl.config.ppo import PPOConfig
from mrl.config.schema import SFTConfig
from mrl.converters.hf_config import read_hf_config, vocab_size_of
from mrl.data.batches import BatchSource, batch_of
from mrl.data.dataset import Example, Rejected, SFTDataset
from mrl.data.prompts import PromptDataset, PromptSource
from mrl.data.tokenizer import load_tokenizer
from mrl.data.vision import load_vision
from mrl.errors import DataError
from mrl.rollout.base import Trajectory, trajectories_to_batch

NEW_TOKENS = 24
"""Tokens that the actor samples after each prompt, or rollout.max_new_tokens where that is less."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """What both sides compute on."""

    examples: Sequence[Example]  # as the reference takes them: labels not shifted
    fields: Sequence[Mapping[str, Tensor]]  # of each example's labels; () for none
    batch: Batch  # as engines take them
    words: str

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(example.ids) for example in self.examples)

    def problems(self) -> list[str]:
        """Returns how the batch differs from its rows, whose labels are shifted here anew."""
        batch, lengths = self.batch, [len(example.ids) - 1 for example in self.examples]
        if batch.lengths.tolist() != lengths:
            return [f"lengths: the sequences have {batch.lengths.tolist()} tokens, and should have {lengths}"]
        masks = [[float(trains) for trains in example.mask[1:]] for example in self.examples]
        found = [
            _wrong("tokens", batch.tokens, [example.ids[:-1] for example in self.examples]),
            _wrong("labels", batch.labels, [example.ids[1:] for example in self.examples]),
            _wrong("loss mask", batch.loss_mask, masks),
        ]
        counts = {"tokens": sum(map(sum, masks)), "sequences": sum(any(mask) for mask in masks)}
        for name, count in counts.items():
            if (was := batch.denominators.get(name)) != count:
                found.append(f"denominators: {name} is {was}, and the rows have {count:g}")
        return [text for text in found if text is not None]


def _wrong(name: str, actual: Tensor, expected: Sequence[Sequence[float]]) -> str | None:
    """Returns where a field of the batch differs from rows, in words."""
    for number, (row_T, right) in enumerate(zip(actual.split([len(row) for row in expected]), expected, strict=True)):
        row = row_T.tolist()
        if row != list(right):
            places = sum(a != b for a, b in zip(row, right, strict=True))
            text = f"{name}: wrong at {places} of {len(right)} places of sequence {number}"
            return text + _shift(row, list(right))
    return None


def _shift(actual: list[float], expected: list[float]) -> str:
    """Returns in words by how many places a row is shifted, where that is what is wrong."""
    for places in (-2, -1, 1, 2):
        low, high = max(0, places), len(expected) + min(0, places)
        if len(expected) > 4 and actual[low:high] == expected[low - places : high - places]:
            return f"; they are those {abs(places)} {'earlier' if places > 0 else 'later'}"
    return ""


def sft_rows(config: SFTConfig, folder: str, *, sequences: int, length: int) -> Rows:
    """Returns the first rows of the first global batch. length: tokens of a sequence at most."""
    tokenizer = load_tokenizer(folder, config.model.trust_remote_code, config.data.chat_template)
    hf_config = read_hf_config(folder)
    dataset = SFTDataset(
        config.data, tokenizer, vocab_size=vocab_size_of(hf_config), vision=load_vision(folder, hf_config)
    )
    of_batch = config.train.global_batch_size
    count = min(sequences, of_batch)
    source = BatchSource(
        dataset, global_batch_size=count, seed=config.seed, shuffle=config.data.shuffle, prefetch=False
    )
    batch = source.next()
    loaded = [dataset.load(row) for row in source.rows]
    whole = [example for example in loaded if not isinstance(example, Rejected)]
    shown = [_shortened(example, length) for example in whole]
    words = f"data.train: the first {count} of the {of_batch} sequences of the first batch"
    if any(len(a.ids) != len(b.ids) for a, b in zip(shown, whole, strict=True)):
        batch = batch_of(shown)
        words += f", of each at most {length} tokens around the first that trains"
    return Rows(shown, (), batch, _counted(words, batch))


def ppo_rows(
    config: PPOConfig, folder: str, model: torch.nn.Module, *, sequences: int, length: int
) -> Rows:  # fmt: skip
    """Returns prompts with completions that `model` samples, advantages and returns that are noise. folder: the
    actor's."""
    tokenizer = load_tokenizer(folder, config.actor.model.trust_remote_code, config.data.chat_template)
    dataset = PromptDataset(config.data, tokenizer, vocab_size=vocab_size_of(read_hf_config(folder)))
    samples = min(config.rollout.samples_per_prompt, 2)
    prompts = PromptSource(dataset, seed=config.seed, shuffle=config.data.shuffle).take(max(1, sequences // samples))
    new = min(config.rollout.max_new_tokens, NEW_TOKENS)
    room = max(1, length - new)
    trajectories = []
    torch.manual_seed(config.seed)
    for prompt in prompts:
        ids = prompt.tokens[-room:]
        for sample, completion in enumerate(_sampled(model, ids, samples, new, config.rollout.temperature)):
            mask = [0] * len(ids) + [1] * len(completion)
            log_probs = [0.0] * len(mask)
            trajectories.append(Trajectory(prompt, sample, ids + completion, mask, log_probs, "", False))
    generator = torch.Generator().manual_seed(config.seed)
    fields = [
        {name: torch.randn(len(t.tokens) - 1, generator=generator) for name in ("advantages", "returns")}
        for t in trajectories
    ]
    batch = trajectories_to_batch(trajectories)
    noise = {name: torch.cat([of[name] for of in fields]) for name in ("advantages", "returns")}
    batch = dataclasses.replace(batch, token_fields={**noise, "old_values": torch.zeros(batch.num_tokens)})
    words = f"data.train: the first {len(prompts)} prompts, {samples} completions of each of at most {new} tokens"
    if any(len(prompt.tokens) > room for prompt in prompts):
        words += f", of each prompt the last {room} tokens"
    examples = [Example(t.tokens, t.mask, False) for t in trajectories]
    return Rows(examples, fields, batch, _counted(f"{words}; advantages and returns are noise", batch))


@torch.no_grad()
def _sampled(
    model: torch.nn.Module, ids: list[int], samples: int, new: int, temperature: float
) -> list[list[int]]:  # fmt: skip
    """Returns completions of a prompt, drawn by transformers."""
    device = next(model.parameters()).device
    made = model.generate(  # type: ignore[operator]
        torch.tensor([ids], device=device), do_sample=True, temperature=temperature, max_new_tokens=new, top_k=0,
        num_return_sequences=samples, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return [row[len(ids) :].tolist() for row in made]


def _shortened(example: Example, length: int) -> Example:
    """Returns at most `length` tokens of a row, some of which train. One with images stays whole."""
    if len(example.ids) <= length or example.multi_modal_inputs:
        return example
    first = next(i for i, trains in enumerate(example.mask) if trains and i > 0)
    start = max(0, min(first - length // 2, len(example.ids) - length))
    stop = start + length
    return Example(example.ids[start:stop], example.mask[start:stop], True)


def _counted(words: str, batch: Batch) -> str:
    if not batch.num_tokens:
        raise DataError("data.train", why="gives no tokens", fix="check the first rows")
    return f"{words} ({batch.num_tokens:,} tokens, {int((batch.loss_mask != 0).sum()):,} labels train)"
