"""Training through the client is the training of `mrl sft` and `mrl ppo`: losses, gradient norms and weights."""

import contextlib
import json
import os
import pathlib
import random

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tinker import types

from tests.forks import forks
from tests.serve.serving import LAYOUTS, RANK, datum, folder_of, serving
from tests.tiers import nightly_but

pytestmark = pytest.mark.slow  # each starts a run and a server
STEPS, BATCH = 4, 4
OPTIMIZER = {
    "lr": 1e-2, "schedule": "constant", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip_grad": 1.0,
}  # fmt: skip
ADAM = types.AdamParams(
    learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0
)  # fmt: skip
REWARD = "def score(prompt, completion, row):\n    return float(len(completion) % 5)\n"


def run(command: str, folder: pathlib.Path, config: dict, overrides=(), nproc=1) -> list[dict]:
    """Runs `mrl COMMAND` and returns its rows of metrics."""
    (folder / f"{command}.yaml").write_text(yaml.safe_dump(config))
    words, log = [command, f"{command}.yaml", "--nproc", str(nproc), *overrides], folder / f"{command}.log"
    code = forks().start(folder, log, os.environ, words).wait(300)
    assert code == 0, log.read_text()
    return [json.loads(line) for line in (folder / command / "metrics.jsonl").read_text().splitlines()]


def trained(server, client, full):
    client.save_weights_for_sampler(name="end").result()
    folder = folder_of(server, client, "sampler_weights", "end")
    return load_file(folder / ("model.safetensors" if full else "adapter_model.safetensors"))


@pytest.mark.parametrize(
    ("layout", "full"),
    nightly_but([("one", False)], [("one", False), ("tp2", False), ("pp2", True), ("fsdp2", True)]),
)
def test_fine_tuning(request, layout, full, model, tmp_path):
    """Both are fp32 and differ in the order of sums alone."""
    rng, rows = random.Random(0), []
    for _ in range(STEPS * BATCH):
        ids = [rng.randrange(3, 100) for _ in range(rng.randint(3, 20))]
        rows.append((ids, [0] + [rng.randint(0, 1) for _ in ids[2:]] + [1]))
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n" for ids, mask in rows)
    )
    nproc, overrides = LAYOUTS[layout]
    config = {
        "output_dir": "sft", "seed": 5, "model": {"path": model, "dtype": "float32"}, "optimizer": OPTIMIZER,
        "engine": {"device": "cpu"}, "data": {"train": "rows.jsonl", "shuffle": False, "max_length": 64},
        "train": {"steps": STEPS, "global_batch_size": BATCH},
    }  # fmt: skip
    if not full:
        config["model"]["lora"] = {"rank": RANK}
    metrics = [row for row in run("sft", tmp_path, config, overrides, nproc) if "train/loss" in row]
    with (
        serving(tmp_path, model, *overrides, nproc=nproc, full=full)
        if layout != "one"
        else contextlib.nullcontext(request.getfixturevalue("one"))
    ) as server:
        client = server.train(rank=RANK, seed=5)
        for step in range(STEPS):
            batch = rows[step * BATCH : (step + 1) * BATCH]
            count = sum(sum(mask[1:]) for _, mask in batch)
            data = [datum(ids, weights=[m / count for m in mask[1:]]) for ids, mask in batch]
            passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)
            found = passed.result().metrics["loss:sum"], stepped.result().metrics["grad_norm"]
            expected = metrics[step]["train/loss"], metrics[step]["train/grad_norm"]
            assert found == pytest.approx(expected, rel=1e-6), step
        actual = trained(server, client, full)
    name = "model.safetensors" if full else "adapter_model.safetensors"
    expected = load_file(tmp_path / "sft" / "hf" / name)
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-6, atol=1e-6)


def of_samples(file: pathlib.Path) -> list[types.Datum]:
    """The samples of a step of `mrl ppo`, with the advantages that they had there."""
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    data = []
    for one in samples:
        share = one["advantage"] / sum(one["mask"]) / len(samples)  # a mean over tokens, then over samples
        log_probs = [m * lp for m, lp in zip(one["mask"], one["log_probs"], strict=True)]
        advantages = [m * share for m in one["mask"]]
        data.append(datum(one["tokens"], logprobs=log_probs[1:], advantages=advantages[1:]))
    return data


def test_samples_of_grpo(one, model, tmp_path):
    """The samples of `mrl ppo`, replayed by the client with importance_sampling."""
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"What is {i} + 2?"}) + "\n" for i in range(40))
    )
    (tmp_path / "reward.py").write_text(REWARD)
    config = {
        "output_dir": "ppo", "seed": 5,
        "actor": {
            "model": {"path": model, "dtype": "float32", "lora": {"rank": RANK}}, "engine": {"device": "cpu"},
            "optimizer": OPTIMIZER,
        },
        "algorithm": {"name": "grpo", "kl_in": "none"}, "rollout": {"samples_per_prompt": 4, "max_new_tokens": 6},
        "rewards": {"functions": [{"function": "reward.py:score"}], "workers": 1},
        "data": {"train": "prompts.jsonl", "max_prompt_length": 40},
        "train": {"steps": STEPS, "global_batch_size": 16},
        "log": {"samples": {"every": 1}},
    }  # fmt: skip
    metrics = [row for row in run("ppo", tmp_path, config) if "actor/loss" in row]
    client = one.train(rank=RANK, seed=5)
    for step in range(STEPS):
        data = of_samples(tmp_path / "ppo" / "samples" / f"step_{step + 1:08d}.jsonl")
        passed, stepped = client.forward_backward(data, "importance_sampling"), client.optim_step(ADAM)
        found = passed.result().metrics["loss:sum"], stepped.result().metrics["grad_norm"]
        expected = metrics[step]["actor/loss"], metrics[step]["train/grad_norm"]
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5), step
    actual = trained(one, client, full=False)
    expected = load_file(tmp_path / "ppo" / "hf" / "adapter_model.safetensors")
    for name in expected:
        # AdamW divides a small gradient by itself: where the sampler's log-probs differ by 1e-7 from the trainer's, what
        # they make of it may be 1 % of the largest update, four of which are 0.04
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-3, atol=1e-4)
