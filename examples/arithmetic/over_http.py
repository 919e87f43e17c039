"""GRPO over HTTP: the loop is this file, which needs no torch; the model is on a server that `tinker` clients train.

    mrl serve examples/arithmetic/serve.yaml             the half-trained model of `make quickstart`, in runs/arithmetic-half
    python examples/arithmetic/over_http.py [STEPS]      after the exports that the server prints

Every step samples G answers to each of P sums, rewards the right ones, and trains on what is better than the others of its group.
Dimensions: P prompts, G samples of each.
"""

from __future__ import annotations

import json
import pathlib
import random
import sys
import time

import tinker
from tinker import types

DATA, BASE = pathlib.Path("runs/arithmetic-data"), "runs/arithmetic-half/hf"
P, G, MAX_TOKENS = 32, 8, 8
HELD_OUT = 500
LEARNING_RATE, RANK = 2e-3, 32


def read_rows(name: str) -> list[tuple[str, str]]:
    """Returns question and answer of each row of a file."""
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [(row["messages"][0]["content"], row["answer"]) for row in map(json.loads, lines)]


def datum(prompt: list[int], sample: types.SampledSequence, advantage: float) -> types.Datum:
    """A sampled sequence as data of `importance_sampling`: position i predicts token i + 1, and those of the prompt weigh nothing."""
    ids, before = prompt + list(sample.tokens), [0.0] * (len(prompt) - 1)
    columns = {"logprobs": [*before, *(sample.logprobs or [])], "advantages": before + [advantage] * len(sample.tokens)}
    length = len(ids) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": types.TensorData(data=ids[1:], dtype="int64", shape=[length])}
        | {name: types.TensorData(data=of, dtype="float32", shape=[length]) for name, of in columns.items()},
    )


def main(steps: int = 100) -> list[float]:
    """Trains adapters. Returns the mean reward of each step."""
    service = tinker.ServiceClient()
    base = BASE
    client = service.create_lora_training_client(base_model=base, rank=RANK)
    client = client.result() if hasattr(client, "result") else client  # a client itself before tinker 0.37
    tokenizer, train, held_out = client.get_tokenizer(), read_rows("train.jsonl"), read_rows("eval.jsonl")[:HELD_OUT]

    def sample(questions: list[str], count: int, temperature: float, seed: int) -> tuple[list[list[int]], list]:
        """Returns the prompts, and samples of each, from the weights as they are now."""
        sampler = client.save_weights_and_get_sampling_client()
        sampler = sampler.result() if hasattr(sampler, "result") else sampler
        chats = [[{"role": "user", "content": question}] for question in questions]
        prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
        params = [
            types.SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=seed + i)
            for i in range(len(prompts))
        ]
        futures = [
            sampler.sample(types.ModelInput.from_ints(prompt), count, one)
            for prompt, one in zip(prompts, params, strict=True)
        ]  # all are on their way before the first is done: the server draws them together
        return prompts, [future.result().sequences for future in futures]

    def is_right(sampled: types.SampledSequence, answer: str) -> float:
        return float(tokenizer.decode(sampled.tokens, skip_special_tokens=True) == answer)

    def accuracy() -> float:
        """Returns the share of greedy answers to held-out sums that are right."""
        _, found = sample([question for question, _ in held_out], 1, 0.0, 0)
        return sum(is_right(one, answer) for [one], (_, answer) in zip(found, held_out, strict=True)) / len(held_out)

    before, began_s, mean_rewards = accuracy(), time.monotonic(), []
    numbers = random.Random(0)
    for step in range(steps):
        rows = numbers.sample(train, P)
        prompts, groups = sample([question for question, _ in rows], G, 1.0, 1000 * step)
        data = []
        for prompt, group, (_, answer) in zip(prompts, groups, rows, strict=True):
            rewards_G = [is_right(one, answer) for one in group]
            mean = sum(rewards_G) / G
            mean_rewards.append(mean)
            data += [
                datum(prompt, one, reward - mean)
                for one, reward in zip(group, rewards_G, strict=True)
                if reward != mean
            ]
        passed = client.forward_backward(data, "importance_sampling")
        stepped = client.optim_step(types.AdamParams(learning_rate=LEARNING_RATE * (1 - step / steps)))
        norm = stepped.result().metrics["grad_norm"]
        if step % 5 == 4:
            reward = sum(mean_rewards[-5 * P :]) / (5 * P)
            print(
                f"step {step + 1:3}  reward {reward:.3f}  datums {len(data)}  norm {norm:.2f}  {time.monotonic() - began_s:.0f} s",
                flush=True,
            )
        passed.result()
    print(
        f"over HTTP: exact match {before:.1%} before, {accuracy():.1%} after {steps} steps, of {HELD_OUT} held-out sums"
    )
    return mean_rewards


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
