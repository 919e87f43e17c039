"""Rollouts that a server samples while the run trains: `rollout.async_level` 1.

The server is a transformers model behind vLLM's API, in a process of its own (tests/rollout/policy_server.py). It samples
each completion from a seed of its own, so what it gives depends on nothing but the weights that it has.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.data.prompts import Prompt
from mrl.engine.sampling import SamplingKey, noise_key
from mrl.rewards.scorer import Scores
from mrl.rollout.base import Trajectory
from mrl.trainers.rl.collect import ScoredRollout
from mrl.trainers.rl.launched import _rollout_from_state, _rollout_state
from mrl.weights.pt_file import read_pt, write_pt
from tests.engine.harness import run_case
from tests.rollout.policy_server import Running, complete
from tests.tiers import in_tiers, nightly_but
from tests.trainers.rl import tiny_policies
from tests.trainers.rl.tiny_policies import train
from tests.trainers.tiny_runs import steps

STEPS, PER_ITERATION = 8, 2


@pytest.fixture
def server(inputs):
    running = Running(inputs / "model")
    yield running
    running.close()


def config_of(inputs, output_dir, server, **changes) -> dict[str, Any]:
    rollout = {"backend": "vllm", "async_level": 1, "server": {"urls": [server.url], "handover": "disk"}}
    return tiny_policies.merge(make_config(inputs, output_dir, rollout), changes)


def make_config(inputs, output_dir, rollout) -> dict[str, Any]:
    parts = {
        "rollout": rollout,
        "train": {"steps": STEPS, "eval_every": PER_ITERATION},
        "data": {"eval": str(inputs / "eval.jsonl")},
        "checkpoint": {"export_hf": False, "every": PER_ITERATION, "keep": 20},
        "log": {"samples": {"every": 1, "tokens": True}},
    }
    return tiny_policies.make_config(inputs, output_dir, **parts)


def made_of(output_dir) -> tuple[list[dict[str, float]], dict[str, Any]]:
    return tiny_policies.metrics_of(output_dir), tiny_policies.samples_of(output_dir)


ADAPTERS = {
    "actor": {"model": {"lora": {"rank": 4}}, "optimizer": {"lr": 3e-2}},
    "rollout": {"async_level": 2, "server": {"lora": "adapter", "handover": "auto"}},
    "train": {"steps": 12},
}


GROUPS = {"rollout": {"async_level": 2}, "train": {"steps": 12}}


@pytest.fixture(scope="module")
def unbroken(inputs, tmp_path_factory) -> Callable[[str], pathlib.Path]:
    """The folder of an unbroken run, one of RUNS; each is made once."""

    @functools.cache
    def of(run: str) -> pathlib.Path:
        folder = tmp_path_factory.mktemp("unbroken") / "run"
        with running(inputs, folder, run) as (config, _):
            train(config)
        return folder

    return of


RUNS = {"whole": {}, "two_ahead": ADAPTERS, "two_groups": GROUPS}


@contextlib.contextmanager
def running(inputs, output_dir, run, seconds=0.0):
    """The config of one of RUNS, and its servers: of `two_groups` the first and the third are a group."""
    servers = [Running(inputs / "model", seconds) for _ in range(3 if run == "two_groups" else 1)]
    try:
        config = config_of(inputs, output_dir, servers[0], **RUNS[run])
        config["rollout"]["server"]["urls"] = [server.url for server in servers]
        yield config, servers
    finally:
        for server in servers:
            server.close()


@pytest.mark.parametrize(
    "level, run", in_tiers([(1, "whole")], [(2, "two_groups")], [(1, "whole"), (2, "two_ahead"), (2, "two_groups")])
)
def test_each_rollout_is_sampled_by_the_weights_of_the_rule(inputs, unbroken, tmp_path, level, run):
    """Recomputed one after the other: transformers with the weights of the rule and the seeds of the iteration."""
    turns = check_rule(unbroken(run), inputs, tmp_path, level)
    assert set(turns) == {1}


@pytest.mark.slow
def test_later_turns_keep_the_weights_of_the_first(inputs, server, tmp_path):
    """Every conversation that is ahead of training has its second turn after a weight sync."""
    file = tmp_path / "environment.py"
    file.write_text(ENVIRONMENT)
    talks = {"rollout": {"environment": f"{file}:Twice", "max_new_tokens": 40, "max_turn_tokens": 8}}
    changes = tiny_policies.merge(ADAPTERS, talks | {"train": {"steps": 8}})
    config = config_of(inputs, tmp_path / "run", server, **changes)
    train(config, happening="weights_come_between_turns", first=2 * PER_ITERATION + 1)
    assert set(check_rule(tmp_path / "run", inputs, tmp_path, level=2)) == {2}


ENVIRONMENT = """
class Twice:
    def reset(self, row):
        self.heard = 0

    def step(self, text):
        self.heard += 1
        return "1+1=", 0.0, self.heard == 2
"""


def check_rule(run: pathlib.Path, inputs: pathlib.Path, folder: pathlib.Path, level: int) -> list[int]:
    """Recomputes each turn of at most 8 tokens. Returns the turns of each conversation."""
    samples, turns = tiny_policies.samples_of(run), []
    for iteration in range(steps(run)[-1]["step"] // PER_ITERATION):
        made = max(0, iteration - level) * PER_ITERATION
        weights = export(run, made, folder) if made else inputs / "model"
        model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
        step = iteration * PER_ITERATION + 1
        rows = samples[f"step_{step:08d}.jsonl"]
        assert len(rows) == tiny_policies.SEQUENCES and {row["weights"] for row in rows} == {made}
        for row in rows:
            turns.append(0)
            for start, end in turns_of(row["mask"]):
                turns[-1] += 1
                seed = noise_key(SamplingKey(0, step, row["index"], row["sample"]), start) >> 1
                asked = {"prompt": row["tokens"][:start], "seed": seed, "max_tokens": 8, "temperature": 0.8}
                found = complete(model, asked | {"stop_token_ids": [model.config.eos_token_id]})
                assert found["token_ids"] == row["tokens"][start:end], f"step {step}, turn {turns[-1]}"
                assert found["logprobs"]["token_logprobs"] == pytest.approx(row["log_probs"][start:end], abs=1e-5)
    return turns


def turns_of(mask: list[int]) -> list[tuple[int, int]]:
    """Where each turn of the policy starts, and where it ends."""
    edges = [at for at, (before, now) in enumerate(itertools.pairwise([*mask, 0]), start=1) if before != now]
    return list(zip(edges[::2], edges[1::2], strict=True))


def export(run: pathlib.Path, step: int, folder: pathlib.Path) -> pathlib.Path:
    run_case(1, "tests.trainers.rl.test_launched:exported", run=str(run), step=step, out=str(folder / f"at{step}"))
    return folder / f"at{step}"


def exported(run: str, step: int, out: str) -> None:
    from click.testing import CliRunner

    from mrl import cli

    done = CliRunner().invoke(
        cli.main, ["convert", "export", f"{run}/checkpoints/step_{step:08d}", out, "--role", "actor"]
    )
    assert done.exit_code == 0, done.output


AGES = {  # rollout/staleness and rollout/weights_step of each iteration
    "whole": ([0, 1, 1, 1], [0, 0, 2, 4]),
    "two_ahead": ([0, 1, 2, 2, 2, 2], [0, 0, 0, 2, 4, 6]),
    "two_groups": ([0, 1, 2, 2, 2, 2], [0, 0, 0, 2, 4, 6]),
}


@pytest.mark.parametrize("run", in_tiers(["whole"], ["two_groups"], AGES))
def test_metrics_say_how_old_the_weights_are(unbroken, run):
    every = steps(unbroken(run))
    rows = [row for row in every if "rollout/staleness" in row]
    assert tuple([row[f"rollout/{name}"] for row in rows] for name in ("staleness", "weights_step")) == AGES[run]
    assert [row["step"] for row in every if "eval/reward" in row] == list(
        range(0, every[-1]["step"] + 1, PER_ITERATION)
    )
    assert "actor/importance_weight" in rows[1], "older weights are corrected"


@pytest.mark.parametrize(
    ("step", "name"), in_tiers([(3, "SIGTERM")], [(5, "SIGKILL")], [(2, "SIGTERM"), (3, "SIGTERM"), (5, "SIGKILL")])
)
def test_a_run_that_stops_goes_on_to_the_same_bits(inputs, server, unbroken, tmp_path, step, name):
    config = config_of(inputs, tmp_path / "run", server)
    if name == "SIGTERM":
        train(config, ended="stopped", happening="killed_at", step=step, name=name)
    else:
        with pytest.raises(AssertionError, match="died with exit code -9"):
            train(config, happening="killed_at", step=step)
    server.close()  # what was launched is in the checkpoint
    again = Running(inputs / "model")
    try:
        train(tiny_policies.merge(config, {"rollout": {"server": {"urls": [again.url]}}}))
    finally:
        again.close()
    assert made_of(tmp_path / "run") == made_of(unbroken("whole"))


@pytest.mark.slow
@pytest.mark.parametrize("run", nightly_but(["two_groups"], ["two_groups", "whole"]))
def test_the_order_of_answers_changes_nothing(inputs, unbroken, tmp_path, run):
    """Nor does a stop between them."""
    with running(inputs, tmp_path / "run", run, seconds=-1.0) as (config, _):  # a random wait of at most this
        train(config, ended="stopped", happening="killed_at", step=5, name="SIGTERM")
        train(config)
    assert made_of(tmp_path / "run") == made_of(unbroken(run))


@pytest.mark.slow
def test_two_ranks_train_what_one_trains(inputs, server, unbroken, tmp_path):
    train(config_of(inputs, tmp_path / "run", server, actor={"engine": tiny_policies.engine()}), world=2)
    (rows, samples), (expected, _) = made_of(tmp_path / "run"), made_of(unbroken("whole"))
    assert len(samples) == STEPS // PER_ITERATION + len([row for row in rows if "eval/reward" in row])
    for row, one in zip(rows, expected, strict=True):
        assert row == pytest.approx(one, rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_a_rollout_that_broke_off_is_sampled_by_the_newest_weights(inputs, unbroken, tmp_path):
    server = Running(inputs / "model", seconds=1.0)
    said = restarted(config_of(inputs, tmp_path / "run", server), inputs, server)
    assert "iteration 3" in said and "not the unbroken run" in said
    staleness = [row["rollout/staleness"] for row in steps(tmp_path / "run") if "rollout/staleness" in row]
    assert staleness == [0, 1, 0, 1]
    assert indices_of(tmp_path / "run") == indices_of(unbroken("whole")), "no prompt is lost"


def restarted(config, inputs, server, ended="stopped", happening="hurried_at") -> str:
    """The server hangs, or ends, at step 3, and so does the run, which goes on with another one. Returns what is printed then."""
    train(config, ended=ended, happening=happening, pid=server.process.pid, step=3)
    server.close()
    again = Running(inputs / "model")
    try:
        return train(tiny_policies.merge(config, {"rollout": {"server": {"urls": [again.url]}}}))
    finally:
        again.close()


@pytest.mark.nightly
def test_a_server_that_is_lost_after_its_rollout_changes_nothing(inputs, server, unbroken, tmp_path):
    """The checkpoint has the rollout, and a server that was started again gets the weights that are next. Two iterations
    ahead, a rollout that was not taken is sampled from newer weights than in an unbroken run."""
    config = config_of(inputs, tmp_path / "run", server, **RUNS["whole"])
    restarted(config, inputs, server, "ServerError", "server_ends_at_sync")
    assert made_of(tmp_path / "run") == made_of(unbroken("whole"))


def indices_of(run: pathlib.Path) -> list[list[int]]:
    """The prompts of each rollout."""
    return [[row["index"] for row in rows] for rows in tiny_policies.samples_of(run).values()]


@pytest.mark.slow
@pytest.mark.parametrize("run", ["two_groups", "two_ahead"])
def test_no_prompt_is_lost_and_none_is_trained_twice(inputs, unbroken, tmp_path, run):
    """Over a rollout that is given up as the trainer waits for it, a SIGKILL, and more steps than at first."""
    expected = unbroken(run)
    with running(inputs, tmp_path / "run", run) as (config, _):
        few = tiny_policies.merge(config, {"train": {"steps": config["train"]["steps"] - PER_ITERATION}})
        no_saves = {"checkpoint": {"every": 20}}  # which would wait for the rollout before it is taken
        train(tiny_policies.merge(few, no_saves), ended="stopped", happening="hurried_at_take", step=5)
        with pytest.raises(AssertionError, match="died with exit code -9"):
            train(few, happening="killed_at", step=6)
        train(few)
        train(config)
    trained = trained_prompts(tmp_path / "run")
    assert len(trained) == config["train"]["steps"] // PER_ITERATION and trained == trained_prompts(expected)
    order = [index for rollout in trained for index in rollout]
    counts = collections.Counter(order[: len(order) // tiny_policies.TRAIN_ROWS * tiny_policies.TRAIN_ROWS])
    assert set(counts) == set(range(tiny_policies.TRAIN_ROWS)) and len(set(counts.values())) == 1, counts


def trained_prompts(run: pathlib.Path) -> list[list[int]]:
    """The prompts of each iteration."""
    samples = tiny_policies.samples_of(run)
    rollouts = [[row["index"] for row in rows] for name, rows in samples.items() if name.startswith("step_")]
    assert all(count == 3 for rollout in rollouts for count in collections.Counter(rollout).values())
    return [list(dict.fromkeys(rollout)) for rollout in rollouts]


def test_what_rows_and_environments_hold_comes_back_from_a_checkpoint(tmp_path):
    """Dates and numpy's kinds of text and numbers, which a checkpoint's reader refuses."""
    when = datetime.datetime(2026, 11, 28)
    content = [{"role": "user", "content": np.str_("a"), "timestamp": when}]
    prompt = Prompt(3, "rows:4", {"n": np.int64(2), "when": when, "x": np.float32(0.5)}, content, [1, 2])
    talk = [{"role": "assistant", "content": np.str_("b")}]
    trajectory = Trajectory(
        prompt, 0, [1, 2, 3], [0, 0, 1], [0.0, 0.0, -0.5], "b", True, reward=np.float64(1), conversation=talk
    )
    scores = Scores((np.float64(1),), {"f": (np.float64(1),)}, (np.str_("fault"),))
    rollout = ScoredRollout([trajectory], scores, torch.tensor([0]), None, ([], scores), ([], scores), [0], 0.5, 0.5)
    write_pt(tmp_path / "x.pt", {"rollout": _rollout_state(rollout)})
    found = _rollout_from_state(read_pt(tmp_path / "x.pt", fields=("rollout",))["rollout"])
    assert found.scores == rollout.scores and found.trajectories[0].prompt.row == {"n": 2, "when": str(when), "x": 0.5}
    assert dataclasses.replace(found.trajectories[0], prompt=prompt) == trajectory


def test_a_server_that_would_hold_requests_back_is_refused(inputs, server, tmp_path):
    config = config_of(
        inputs, tmp_path / "run", server, **tiny_policies.merge(ADAPTERS, {"rollout": {"async_level": 3}})
    )
    message = train(config, ended="ConfigError")
    assert message.startswith("rollout.async_level: value 3 samples with 3 adapters at a time, and http://")
    assert message.endswith("takes 2: it would hold requests back; start it with --max-loras 3 or more")


@pytest.mark.slow
def test_sampling_and_training_are_at_the_same_time(inputs, tmp_path):
    """A server that takes 2 s for a rollout, and rewards that take none: each step of 0.5 s more is hidden behind it."""
    server = Running(inputs / "model", seconds=2.0)
    few = {"eval_every": None, "steps": 2 * PER_ITERATION}
    config = config_of(inputs, tmp_path / "run", server, train=few, checkpoint={"every": None})
    try:
        train(config, happening="steps_take", seconds=0.5)
    finally:
        server.close()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "perf/rollout_wait_s" in row]
    assert [row["perf/rollout_s"] > 2 for row in rows] == [True] * 2
    assert rows[0]["perf/rollout_wait_s"] > 1.9 and all(row["perf/rollout_wait_s"] < 1.5 for row in rows[1:])
    assert all(row["perf/servers_idle_s"] < 1 for row in rows)


@pytest.mark.slow
def test_dynamic_sampling_and_saves_in_the_background_go_on_to_the_same_bits(inputs, server, tmp_path):
    """What a rollout took beside its first prompts is in the checkpoint, too."""
    parts = {
        "checkpoint": {"background": True},
        "algorithm": {"name": "dapo"},
        "rewards": {"functions": [{"name": "length", "maximum": 7, "slack": 1}]},
    }
    unbroken, stopped = (config_of(inputs, tmp_path / run, server, **parts) for run in ("unbroken", "stopped"))
    train(unbroken)
    train(stopped, ended="stopped", happening="killed_at", step=4, name="SIGTERM")
    train(stopped)
    assert made_of(tmp_path / "stopped") == made_of(tmp_path / "unbroken")
    assert any(row.get("rollout/prompts_rejected") for row in steps(tmp_path / "unbroken"))
    rows = (tmp_path / "unbroken" / "metrics.jsonl").read_text()
    assert "perf/save_write_s" in rows and "perf/save_wait_s" not in rows, "training waits for no save"
    for step in (6, 8):  # the newest is then one that was written in the background
        shutil.rmtree(tmp_path / "unbroken" / "checkpoints" / f"step_{step:08d}")
    train(unbroken)
    assert made_of(tmp_path / "stopped") == made_of(tmp_path / "unbroken")


@pytest.mark.nightly
def test_an_error_of_the_reward_model_is_no_end(inputs, server, tmp_path):
    """The rollout is scored again at the resume, and the one that was launched after it is in the checkpoint, too."""
    model = {"reward": {"model": {"path": str(inputs / "scorer")}}}
    unbroken, broken = (config_of(inputs, tmp_path / run, server, **model) for run in ("unbroken", "broken"))
    train(unbroken)
    message = train(broken, ended="RewardError", happening="reward_model_fails", step=4)
    assert "steps 1 to 4 are saved" in message
    train(broken)
    assert made_of(tmp_path / "broken") == made_of(tmp_path / "unbroken")


@pytest.mark.slow
def test_fewer_steps_end_with_an_evaluation_and_a_save(inputs, server, unbroken, tmp_path):
    """And lose no prompt: more steps again go on with those of the rollout that was not trained on."""
    config = config_of(inputs, tmp_path / "run", server)
    train(config, ended="stopped", happening="killed_at", step=3, name="SIGTERM")
    train(tiny_policies.merge(config, {"train": {"steps": 4}}))
    rows = steps(tmp_path / "run")
    assert rows[-1]["step"] == 4 and "eval/reward" in rows[-1]
    assert (tmp_path / "run" / "checkpoints" / "step_00000004").is_dir()
    train(config)
    assert indices_of(tmp_path / "run") == indices_of(unbroken("whole"))
