"""`mrl generate` on every rank: samples completions of prompts, scores those of rows, or talks on the terminal.

`--score` gives log-probs of completions that rows have, token by token, without sampling.

Dimensions: `T` tokens of a batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl.batch import make_batch
from mrl.config.inference import GenerateConfig
from mrl.config.schema import DataConfig
from mrl.data.dataset import Example, RejectedRow, SFTDataset
from mrl.data.encode import Encoded
from mrl.data.files import BadRow
from mrl.data.formats import Chat, parse_prompt
from mrl.data.prompts import Prompt, TurnEncoder
from mrl.data.stream import Report, usable_rows
from mrl.data.vision import ImageRow
from mrl.errors import DataError, shortened
from mrl.inference.chat import talk
from mrl.inference.loaded import LoadedModel, load_model, prompt_of_text, prompts_of_file, read_tools
from mrl.inference.output import open_console, writing
from mrl.rollout.base import Trajectory
from mrl.trainers.common import say_all, say_left_out
from mrl.trainers.console import Console
from mrl.words import pluralize

ROWS_AT_ONCE = 256
"""Completions that are sampled together, or rows that are scored: the first results come before the last is begun."""

SHOWN_CHARACTERS = 60


def run(config: GenerateConfig, command_line: str = "") -> None:
    """Runs `config.request`. Collective. Raises UserError for what the user can put right."""
    console = open_console()
    with contextlib.closing(console), load_model(config, config.place, console) as model:
        processes = pluralize(model.dispatch.world_size, "process", "processes")
        console.say(f"{config.place.given}: {model.what}, {config.model.dtype} on {processes}")
        if config.request.chat:
            talk(config, model, console)
        elif config.request.score:
            score_rows(config, model, console)
        else:
            sample(config, model, console)


def sample(config: GenerateConfig, model: LoadedModel, console: Console) -> None:
    """Completes all prompts, part by part, and shows or writes each part."""
    prompts = prompts_of(config, model, console)
    samples, greedy = config.rollout.samples_per_prompt, config.request.greedy
    many = len(prompts) * samples > 1
    with writing(config.request.out, model.dispatch) as write:
        size = max(1, ROWS_AT_ONCE // samples)
        for start in range(0, len(prompts), size):
            console.doing(f"sampling: {start} of {len(prompts)} prompts are answered")
            trajectories = model.rollouts.sample(prompts[start : start + size], step=0, samples=samples, greedy=greedy)
            for trajectory in trajectories:
                write(row_of(trajectory))
                if config.request.out is None and model.dispatch.is_main:
                    show(trajectory, samples, many=many)
    if config.request.out is not None:
        console.say(f"{config.request.out}: {len(prompts) * samples} completions")


def prompts_of(config: GenerateConfig, model: LoadedModel, console: Console) -> list[Prompt]:
    """Returns the prompts of the request, on every rank. Collective."""
    request = config.request
    if request.file is not None:
        prompts, report, rows = prompts_of_file(config, model)
        say_all(console, rows.template_notes())
        say_left_out(console, "eval", report.counts, report.notes)
        return prompts
    encoder, tools = TurnEncoder(model.tokenizer, config.data.system), read_tools(request.tools)
    texts = model.dispatch.on_main(lambda: request.prompts)  # which alone has what came on stdin
    found = [prompt_of_text(text, i, config, encoder, tools=tools) for i, text in enumerate(texts)]
    say_all(console, encoder.left_out((prompt.where, prompt.conversation.chat) for prompt in found))
    return found


def finish_reason(trajectory: Trajectory) -> str:
    """Returns why a completion ended: stop (an end token or a stop text), length, or turns (of an environment)."""
    return "stop" if trajectory.cut_by is None else {"tokens": "length", "turns": "turns"}[trajectory.cut_by]


def row_of(trajectory: Trajectory) -> dict[str, Any]:
    """Returns a completion as a row of the results."""
    prompt, start = trajectory.prompt, len(trajectory.prompt.tokens)
    row: dict[str, Any] = {
        "where": prompt.where, "prompt": prompt.content, "sample": trajectory.sample, "completion": trajectory.text,
        "tokens": trajectory.tokens[start:], "log_probs": trajectory.log_probs[start:],
        "finish_reason": finish_reason(trajectory), "prompt_tokens": start,
    }  # fmt: skip
    if trajectory.conversation is not None:
        row |= {"mask": trajectory.mask[start:], "conversation": list(trajectory.conversation)}
    further = {
        name: value for name, value in prompt.row.items() if name not in (*row, "messages", "instruction", "input")
    }
    return row | further


def show(trajectory: Trajectory, samples: int, *, many: bool) -> None:
    """Prints a completion: its text alone where it is the only one."""
    if many:
        prompt = trajectory.prompt
        number = f", sample {trajectory.sample + 1} of {samples}" if samples > 1 else ""
        tokens = pluralize(trajectory.response_length, "token")
        print(f"== {prompt.where}{number}: {in_short(prompt.content)} ({tokens}, {finish_reason(trajectory)})")
    print(trajectory.text, flush=True)
    if many:
        print(flush=True)


def in_short(content: str | Sequence[dict[str, Any]]) -> str:
    """Returns both ends of a prompt, on one line."""
    text = content if isinstance(content, str) else str(content[-1].get("content", ""))
    return repr(shortened(" ".join(text.split()), SHOWN_CHARACTERS))


# ------------------------------------------------------------------------------------------------------------- --score


@dataclasses.dataclass(frozen=True)
class RowScore:
    """A row and the log-probs of what follows its prompt."""

    where: str
    tokens: list[int]  # ids of what is scored: all assistant turns, or the completion
    log_probs: list[float]  # of each of them
    prompt_tokens: int  # before the first that is scored

    @property
    def total(self) -> float:
        """The sum of the log-probs."""
        return math.fsum(self.log_probs)

    @property
    def mean(self) -> float:
        return self.total / len(self.log_probs)

    def as_row(self) -> dict[str, Any]:
        return {
            "where": self.where, "tokens": self.tokens, "log_probs": self.log_probs, "sum": self.total,
            "mean": self.mean, "prompt_tokens": self.prompt_tokens,
        }  # fmt: skip


class CompletedRows(SFTDataset):
    """Reads rows of prompts and completions, as `mrl sft` trains on them.

    It also reads rows of `mrl generate --out`, and scores their tokens as they were sampled. system: a message before
    the prompts of such rows. bounded: the most tokens of a row, in words.
    """

    def __init__(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, system: str | None, vocab_size: int | None,
        bounded: str,
    ) -> None:  # fmt: skip
        self.system, self.bounded = system, bounded
        super().__init__(config, tokenizer, vocab_size=vocab_size)

    def too_long(self, tokens: int) -> str:
        return (
            f"the row has {tokens} tokens, more than {self.bounded}; shorten it, or set data.truncation to left or drop"
        )

    def _begin(self, tokenizer: PreTrainedTokenizerBase) -> None:
        row, where = self.first_row()
        self._prompts = TurnEncoder(tokenizer, self.system) if is_sampled(row) else None
        if self._prompts is None and self.system is not None:
            why = f"has no effect on {where}: a row without sampled tokens is taken as it is"
            raise DataError("data.system", why=why, fix="leave it out")
        if self._prompts is None:
            super()._begin(tokenizer)

    def _make(self, index: int, row: dict[str, Any]) -> Example | RejectedRow:
        if self._prompts is None:
            return super()._make(index, row)
        if not is_sampled(row):
            raise BadRow("has no prompt with tokens, which rows have since the first; give all of them one form")
        prompt, new = self._prompts.prompt(parse_prompt(row, "prompt")), row["tokens"]
        mask = row.get("mask", [1] * len(new))
        if not isinstance(mask, list) or len(mask) != len(new) or any(m not in (0, 1) for m in mask):
            raise BadRow("has a mask that is not 0 or 1 for each of its tokens; leave it out to score all of them")
        return self._fit(index, ImageRow(Encoded(prompt + new, [0] * len(prompt) + mask), {}))

    def _contents(self, row: dict[str, Any]) -> Sequence[Any]:
        return super()._contents(row) if self._prompts is None else [parse_prompt(row, "prompt")]

    def _left_out(self, chats: list[tuple[str, Chat]]) -> list[str]:
        return super()._left_out(chats) if self._prompts is None else self._prompts.left_out(chats)


def is_sampled(row: Mapping[str, Any]) -> bool:
    """Returns whether `mrl generate --out` wrote the row."""
    tokens = row.get("tokens")
    return "prompt" in row and isinstance(tokens, list) and bool(tokens) and all(type(t) is int for t in tokens)


def score_rows(config: GenerateConfig, model: LoadedModel, console: Console) -> None:
    """Scores all rows of the request, part by part."""
    data = config.data
    assert isinstance(data.train, str), "the command line names one path"
    of_user = f"data.max_prompt_length {data.max_prompt_length} and {config.rollout.max_new_tokens} new ones"
    bounded = of_user if config.place.limit is None else config.place.limited_by
    rows = CompletedRows(
        DataConfig(
            train=data.train, columns=data.columns, split=data.split, chat_template=data.chat_template,
            on_bad_row=data.on_bad_row, max_length=config.max_length, truncation=data.truncation,
        ),
        model.tokenizer, system=data.system, vocab_size=model.vocab_size, bounded=bounded,
    )  # fmt: skip
    say_all(console, rows.template_notes())
    report = Report()
    usable = [(rows.where(index), example) for index, example in usable_rows(rows, report)]
    say_left_out(console, "train", report.counts, report.notes)
    scores: list[RowScore] = []
    with writing(config.request.out, model.dispatch) as write:
        for start in range(0, len(usable), ROWS_AT_ONCE):
            console.doing(f"scoring: {start} of {len(usable)} rows")
            part = score(usable[start : start + ROWS_AT_ONCE], model, temperature=config.rollout.temperature)
            for scored in part:
                write(scored.as_row())
            scores += part
    if model.dispatch.is_main:
        show_scores(scores, listed=config.request.out is None)


def score(rows: list[tuple[str, Example]], model: LoadedModel, *, temperature: float) -> list[RowScore]:
    """Returns rows, each with its place, with the log-probs of the tokens that would train. Collective; equal on all
    ranks."""
    examples = [example for _, example in rows]
    padded = examples + [examples[-1]] * (-len(examples) % model.dispatch.lcm_dp_size)  # no replica has none
    batch = make_batch([example.ids for example in padded], [[float(m) for m in example.mask] for example in padded])
    log_probs_T = model.dispatch.forward("actor", batch, {"temperature": temperature})["log_probs"].tolist()
    found, start = [], 0
    for where, example in rows:
        count = len(example.ids) - 1  # labels are shifted once, in the batch: place i has the token i + 1
        at = [i for i in range(count) if example.mask[i + 1]]
        tokens = [example.ids[i + 1] for i in at]
        found.append(RowScore(where, tokens, [log_probs_T[start + i] for i in at], at[0] + 1))
        start += count
    return found


def show_scores(found: list[RowScore], *, listed: bool) -> None:
    """Prints a table, or its last line alone."""
    width = max([len("row"), *(len(scored.where) for scored in found)])
    print(f"{'row':{width}}  {'tokens':>7}  {'sum':>10}  {'per token':>10}  {'perplexity':>10}")
    for scored in found if listed else ():
        print(_line(scored.where, len(scored.tokens), scored.total, width))
    tokens = sum(len(scored.tokens) for scored in found)
    print(_line(f"{len(found)} rows", tokens, math.fsum(scored.total for scored in found), width), flush=True)


def _line(name: str, tokens: int, total: float, width: int) -> str:
    mean = total / tokens
    perplexity = math.exp(min(-mean, 700.0))
    return f"{name:{width}}  {tokens:7d}  {total:10.3f}  {mean:10.4f}  {perplexity:10.4g}"
