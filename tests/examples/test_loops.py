"""The two flat loops compute what `mrl sft` and `mrl ppo` compute on the same config, bit for bit, and resume.

A loop that is shown to readers and not run beside the trainer drifts from it: other batches, another order, another loss.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mrl.algorithms.recipes import actor_loss, recipe
from mrl.batch import make_batch
from tests.engine import harness
from tests.tiers import nightly_but
from tests.trainers import tiny_runs
from tests.trainers.rl import tiny_policies
from tests.trainers.rl.tiny_policies import weights_of

REWARD = """
def reward(completion):
    return sum(character in "0123456789" for character in completion) / 8
"""
LINES = 150


def loop(name: str, path: str, reward: str | None = None, stop_after: int | None = None) -> list[dict[str, float]]:
    """The rows of a loop's main. stop_after: ends it when so many steps are shown, as Ctrl-C does."""
    example, shown = tiny_runs.load_example(f"{name}.py"), []

    def show(*words: Any, **_: Any) -> None:
        shown.append(words)
        if len(shown) == stop_after:
            raise KeyboardInterrupt

    example.print = show
    if reward is not None:
        scope: dict[str, Any] = {}
        exec(reward, scope)
        example.reward = lambda completion, row: scope["reward"](completion)
    try:
        return example.main(path)
    except KeyboardInterrupt:
        return []


def run_loop(name: str, config: dict[str, Any], folder: Any, world: int = 1, **how: Any) -> list[dict[str, float]]:
    path = tiny_runs.write_config(folder / "config.yaml", config)
    return harness.run_case(world, "tests.examples.test_loops:loop", name=name, path=str(path), **how)


@pytest.fixture(scope="module")
def rows_and_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft-inputs")
    tiny_runs.make_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl-inputs")
    tiny_policies.make_inputs(folder)
    (folder / "rewards.py").write_text(REWARD)
    return folder


def sft_config(inputs: Any, output: Any, backend: str, **parallel: int) -> dict[str, Any]:
    engine = {"backend": backend, "device": "cpu", "micro_batch": {"size": 2}, "parallel": parallel}
    return tiny_runs.make_config(inputs, output, engine=engine, checkpoint={"every": 3})


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_the_loop_of_sft_is_that_of_the_command(rows_and_model, tmp_path, backend):
    config = sft_config(rows_and_model, tmp_path / "mrl", backend)
    assert harness.run_case(1, "tests.trainers.cases:train", config=config)[:2] == ("done", "")
    mrl = [
        {"loss": row["train/loss"], "norm": row["train/grad_norm"], "lr": row["train/lr"]}
        for row in tiny_runs.steps(tmp_path / "mrl")
    ]
    config = sft_config(rows_and_model, tmp_path / "loop", backend)
    assert run_loop("engine_loop", config, tmp_path) == mrl
    assert same(weights_of(tmp_path / "loop" / "hf"), weights_of(tmp_path / "mrl" / "hf"))

    config = sft_config(rows_and_model, tmp_path / "killed", backend)
    run_loop("engine_loop", config, tmp_path, stop_after=5)
    assert run_loop("engine_loop", config, tmp_path) == mrl[3:]  # from the checkpoint of step 3
    assert same(weights_of(tmp_path / "killed" / "hf"), weights_of(tmp_path / "mrl" / "hf"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "degrees"), nightly_but([("megatron", {"tp": 2})], [("megatron", {"tp": 2}), ("fsdp", {})])
)
def test_the_loop_of_sft_gives_the_same_losses_on_every_layout(rows_and_model, tmp_path, backend, degrees):
    alone = run_loop("engine_loop", sft_config(rows_and_model, tmp_path / "one", "megatron"), tmp_path)
    config = sft_config(rows_and_model, tmp_path / "two", backend, **degrees)
    for row, other in zip(run_loop("engine_loop", config, tmp_path, world=2), alone, strict=True):
        assert row == pytest.approx(other, rel=1e-4)


def rl_config(
    inputs: Any, output: Any, backend: str, kl_in: str = "loss", algorithm: Any = None, **parallel: int
) -> dict[str, Any]:
    """Three iterations of two epochs, each of two steps."""
    return tiny_policies.make_config(
        inputs, output, actor={"engine": tiny_policies.engine(backend, **parallel)},
        algorithm=algorithm or {"epochs": 2, "kl_in": kl_in}, rewards={"functions": [{"function": f"{inputs}/rewards.py:reward"}]},
        train={"steps": 12}, checkpoint={"every": 4},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "kl_in"), nightly_but([("megatron", "loss")], [("megatron", "loss"), ("fsdp", "none")])
)
def test_the_loop_of_grpo_is_that_of_the_command(policy, tmp_path, backend, kl_in):
    config = rl_config(policy, tmp_path / "mrl", backend, kl_in)
    assert harness.run_case(1, "tests.trainers.rl.cases:train", config=config)[:2] == ("done", "")
    mrl, reward = [], 0.0
    for row in tiny_runs.steps(tmp_path / "mrl"):
        reward = row.get("reward/mean", reward)
        mrl.append({"reward": reward, "loss": row["train/loss"], "norm": row["train/grad_norm"]})
    assert all(row["norm"] for row in mrl) and len({row["reward"] for row in mrl}) == 3, "nothing is learned from"

    config = rl_config(policy, tmp_path / "loop", backend, kl_in)
    assert run_loop("rl_loop", config, tmp_path, reward=REWARD) == mrl
    assert same(weights_of(tmp_path / "loop" / "hf"), weights_of(tmp_path / "mrl" / "hf"))

    config = rl_config(policy, tmp_path / "killed", backend, kl_in)
    run_loop("rl_loop", config, tmp_path, reward=REWARD, stop_after=6)
    assert run_loop("rl_loop", config, tmp_path, reward=REWARD) == mrl[4:]  # from the checkpoint of step 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "degrees"), nightly_but([("megatron", {"tp": 2})], [("megatron", {"tp": 2}), ("fsdp", {})])
)
def test_the_loop_of_grpo_samples_the_same_on_every_layout(policy, tmp_path, backend, degrees):
    alone = run_loop("rl_loop", rl_config(policy, tmp_path / "one", "megatron"), tmp_path, reward=REWARD)
    config = rl_config(policy, tmp_path / "two", backend, **degrees)
    for row, other in zip(run_loop("rl_loop", config, tmp_path, world=2, reward=REWARD), alone, strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-6)


def test_the_loss_of_the_loop_is_grpo():
    example = tiny_runs.load_example("rl_loop.py")
    torch.manual_seed(0)
    batch = make_batch([[1, 2, 3, 4], [5, 6], [7, 8, 9]], [[0, 0, 1, 1], [0, 1], [0, 1, 1]])
    names = ("old_log_probs", "ref_log_probs", "advantages")
    fields = {name: torch.randn(batch.num_tokens) * batch.loss_mask for name in names}
    batch, predictions = dataclasses.replace(batch, token_fields=fields), {"log_probs": -torch.rand(batch.num_tokens)}
    library = actor_loss(recipe("grpo", {"kl_coef": 0.1}), max_response_length=8)
    assert library.denominator == "sequences"
    ctx = {"clip_low": library.clip.low, "clip_high": library.clip.high, "kl_coef": 0.1}
    assert example.grpo_loss(batch, predictions, ctx)[0].item() == pytest.approx(
        library(batch, predictions, {})[0].item()
    )


@pytest.mark.parametrize(
    "other",
    [
        {"name": "rloo"}, {"kl_in": "reward", "kl_coef": 0.1}, {"kl_estimator": "k2"}, {"aggregation": "token_mean"},
        {"whiten": True}, {"entropy_coef": 0.1}, {"correction": "truncate"}, {"dynamic_sampling": True}, {"kl_target": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_an_algorithm_that_the_loop_does_not_compute_is_refused(policy, tmp_path, other):
    config = rl_config(policy, tmp_path / "loop", "megatron", algorithm=other)
    path = tiny_runs.write_config(tmp_path / "config.yaml", config)
    with pytest.raises(AssertionError, match="and the config asks for"):
        loop("rl_loop", str(path))


@pytest.mark.parametrize("name", ["engine_loop", "rl_loop"])
def test_a_loop_is_short_and_uses_public_names(name):
    text = (tiny_runs.REPO / "examples" / f"{name}.py").read_text()
    assert len(text.splitlines()) < LINES
    assert "._" not in text and "import _" not in text


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
