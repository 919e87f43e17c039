"""`mrl generate` on every rank: samples completions of prompts, scores those of rows, or talks on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from mrl.config.inference import GenerateConfig
from mrl.data.prompts import Prompt
from mrl.data.turns import TurnEncoder
from mrl.errors import shortened
from mrl.inference.chat import talk
from mrl.inference.loaded import LoadedModel, load_model
from mrl.inference.output import open_console, writing
from mrl.inference.prompts import bound_in_words, prompt_of_text, prompts_of_file, read_tools
from mrl.inference.score import score_rows
from mrl.rollout.base import Trajectory
from mrl.trainers.common import say_all, say_left_out
from mrl.trainers.console import Console
from mrl.words import pluralize

ROWS_AT_ONCE = 256
"""Completions that are sampled together: results of the first are there before the last is begun."""

SHOWN_CHARACTERS = 60


def run(config: GenerateConfig, command_line: str = "") -> None:
    """Runs `config.request`. Collective. Raises UserError for what the user can put right."""
    console = open_console()
    with contextlib.closing(console), load_model(config, config.place, console) as model:
        processes = pluralize(model.dispatch.world_size, "process", "processes")
        console.say(f"{model.place.given}: {model.place.what}, {config.model.dtype} on {processes}")
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
    request, bounded = config.request, bound_in_words(config)
    if request.file is not None:
        prompts, report, rows = prompts_of_file(config, model, bounded=bounded)
        say_all(console, rows.template_notes())
        say_left_out(console, "eval", report.counts, report.notes)
        return prompts
    encoder, tools = TurnEncoder(model.tokenizer, config.data.system), read_tools(request.tools)
    texts = model.dispatch.on_main(lambda: request.prompts)  # which alone has what came on stdin
    found = [prompt_of_text(text, i, config, encoder, tools=tools, bounded=bounded) for i, text in enumerate(texts)]
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
