"""Environments as a user writes them, and a sampler that says what it is told."""

import contextlib
from unittest import mock

from mrl.config.ppo import RolloutConfig
from mrl.data.formats import parse_prompt
from mrl.data.prompts import Prompt, TurnEncoder
from mrl.engine.base import Completion
from mrl.rollout.base import Sampler
from mrl.rollout.rollouts import Rollouts
from tests.data import tiny_tokenizers

ENVIRONMENTS = '''
import asyncio, os, threading, time


class Count:
    """Tells how long what it heard was; done when it heard `last`. The reward of a step is 1."""

    def reset(self, row):
        assert os.environ.get("RANK", "0") == "0", "only the main process has environments"
        self.last = row.get("last")

    def step(self, text):
        return f"{len(text)} fox", 1.0, text == self.last


class Guess:
    """Takes the place of the prompt and answers as a tool."""

    def reset(self, row):
        return [{"role": "user", "content": "dog " + row["prompt"]}]

    def step(self, text):
        return {"role": "tool", "content": text.upper()}, len(text) / 8, False


class Slow(Count):
    async def reset(self, row):
        await asyncio.sleep(0.2)
        self.loop = asyncio.get_running_loop()

    async def step(self, text):
        assert self.loop is asyncio.get_running_loop()
        await asyncio.sleep(0.2)
        return "fox", 0.5, True


class SlowPlain(Count):
    def reset(self, row):
        time.sleep(0.2)
        self.thread = threading.get_ident()

    def step(self, text):
        assert self.thread == threading.get_ident()
        time.sleep(0.2)
        return "fox", 0.5, True


class Answers:
    """Gives what the row says."""

    def reset(self, row):
        self.row = row
        return row.get("reset")

    def step(self, text):
        match self.row["answer"]:
            case "raise":
                raise ValueError("no such fox")
            case "exit":
                raise SystemExit(3)
            case "hang":
                time.sleep(60)
            case "nan":
                return "fox", float("nan"), False
            case "object":
                return {"role": "user", "content": "fox", "more": self}, 1, False
            case answer:
                return answer


class Hangs:
    async def reset(self, row):
        await asyncio.sleep(60)

    async def step(self, text):
        return "fox", 1, True


class NoStep:
    def reset(self, row):
        pass


class WrongStep(NoStep):
    def step(self):
        pass


class Needs(Count):
    def __init__(self, what):
        pass


def function(row):
    pass
'''


def write_environments(folder) -> str:
    path = folder / "envs.py"
    path.write_text(ENVIRONMENTS)
    return str(path)


def config(**keys) -> RolloutConfig:
    return RolloutConfig(**{"samples_per_prompt": 2, "max_new_tokens": 60, "environment_parts": 1, **keys})


def make_prompts(rows, tokenizer):
    """Prompts of rows that have a `prompt`."""
    encoder, prompts = TurnEncoder(tokenizer), []
    for i, row in enumerate(rows):
        tokens = encoder.prompt(parse_prompt(row, "prompt"))
        prompts.append(Prompt(i, f"train.jsonl:{i + 1}", row, row["prompt"], tokens))
    return prompts


class Says(Sampler):
    """Says the next of `turns` in each of its turns, and ends it with `end` where there is room; keeps the requests."""

    def __init__(self, tokenizer, *turns, end="<|im_end|>"):
        self.tokenizer, self.turns, self.end, self.rounds = tokenizer, turns, end, []

    def sample(self, requests):
        text = self.turns[len(self.rounds) % len(self.turns)] + self.end
        self.rounds.append(list(requests))
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        cut = [ids[: r.max_new_tokens] for r in requests]
        return [Completion(c, [-(i + 1) / 8 for i in range(len(c))], len(c) == len(ids)) for c in cut]


class ByTokens(Says):
    """Says dog, and what it heard last."""

    def sample(self, requests):
        self.rounds.append(list(requests))
        heard = [
            self.tokenizer.decode(r.tokens).split("<|im_start|>user\n")[-1].split("<|im_end|>")[0] for r in requests
        ]
        said = ["dog" if "fox" not in text else f"dog {text}" for text in heard]
        ids = [self.tokenizer(text + self.end, add_special_tokens=False)["input_ids"] for text in said]
        return [Completion(i, [-1.0] * len(i), True) for i in ids]


def make_rollouts(sampler, *, template=tiny_tokenizers.CHATML, **keys):
    """environment: a class, or as in a config."""
    options = {k: keys.pop(k) for k in ("system", "max_prompt_length") if k in keys}
    tokenizer, given = tiny_tokenizers.make_tokenizer(template), keys.get("environment")
    ends = tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>"])
    with contextlib.ExitStack() as patches:
        if isinstance(given, type):
            patches.enter_context(mock.patch("mrl.rollout.rollouts.load_environment", lambda spec: given))
            keys["environment"] = given.__name__
        return Rollouts(sampler, tokenizer, config(**keys), seed=5, end_tokens=ends, **options)
