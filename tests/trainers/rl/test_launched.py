"""Rollouts that a server samples while the run trains: `rollout.async_level` 1.

The server is a transformers model behind vLLM's API, in a process of its own (tests/rollout/policy_server.py). It samples
each completion from a seed of its own, so what it gives depends on nothing but the weights that it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import random
import shutil
import time
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from mrl.data.prompts import Prompt
from mrl.engine.sampling import SamplingKey, noise_key
from mrl.rewards.scorer import Scores
from mrl.rollout.base import Trajectory
from mrl.trainers.rl.collect import ScoredRollout
from mrl.trainers.rl.launched import _rollout_from_state, _rollout_state
from mrl.weights.pt_file import read_pt, write_pt
from tests.engine.harness import run_case
from tests.forks import Forked, forks
from tests.rollout.policy_server import Running, complete
from tests.tiers import in_tiers, nightly_but, slow_but
from tests.trainers.rl import tiny_policies
from tests.trainers.tiny_runs import steps

STEPS, PER_ITERATION = 8, 2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_policies.make_inputs(folder)
    return folder


@pytest.fixture
def server(inputs):
    running = Running(inputs / "model")
    yield running
    running.close()


def config_of(inputs, output_dir, server, level=1, **changes) -> dict[str, Any]:
    parts = {
        "rollout": {"backend": "vllm", "async_level": level, "server": {"urls": [server.url], "handover": "disk"}},
        "train": {"steps": STEPS, "eval_every": PER_ITERATION},
        "data": {"eval": str(inputs / "eval.jsonl")},
        "checkpoint": {"export_hf": False, "every": PER_ITERATION, "keep": 20},
        "log": {"samples": {"every": 1, "tokens": True}},
    }
    return tiny_policies.merge(tiny_policies.make_config(inputs, output_dir, **parts), changes)


def train(config, world=1, ended="done", **happening) -> str:
    found = run_case(world, "tests.trainers.rl.cases:train", config=config, **happening)
    assert found[0] == ended, found
    return found[1] if ended != "done" else found[2]


def made_of(output_dir) -> tuple[list[dict[str, float]], dict[str, Any]]:
    return tiny_policies.metrics_of(output_dir), tiny_policies.samples_of(output_dir)


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """The folder of an unbroken run."""
    folder, running = tmp_path_factory.mktemp("whole") / "run", Running(inputs / "model")
    train(config_of(inputs, folder, running, checkpoint={"every": 1, "keep": 20}))
    running.close()
    return folder


ADAPTERS = {
    "actor": {"model": {"lora": {"rank": 4}}, "optimizer": {"lr": 3e-2}},
    "rollout": {"async_level": 2, "server": {"lora": "adapter", "handover": "auto"}},
    "train": {"steps": 12},
}


GROUPS = {"rollout": {"async_level": 2}, "train": {"steps": 12}}


@pytest.fixture(scope="module")
def two_ahead(inputs, tmp_path_factory):
    """The folder of an unbroken run at level 2."""
    folder, running = tmp_path_factory.mktemp("two_ahead") / "run", Running(inputs / "model")
    train(config_of(inputs, folder, running, **ADAPTERS))
    running.close()
    return folder


@pytest.fixture(scope="module")
def two_groups(inputs, tmp_path_factory):
    """The folder of an unbroken run at level 2, with whole weights on three servers."""
    folder = tmp_path_factory.mktemp("two_groups") / "run"
    with running(inputs, folder, "two_groups") as (config, _):
        train(config)
    return folder


SIGNALS = {"two signals": {"happening": "hurried_at"}, "two at a weight sync": {"happening": "hurried_at_sync"}}
NONE_IS_WHOLE = {"no rollout is whole": {"happening": "killed_as_it_hangs", "hangs_from": 5}}
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


@pytest.mark.parametrize("level, run", slow_but([(1, "whole")], [(1, "whole"), (2, "two_ahead"), (2, "two_groups")]))
def test_each_rollout_is_sampled_by_the_weights_of_the_rule(inputs, request, tmp_path, level, run):
    """Recomputed one after the other: transformers with the weights of the rule and the seeds of the iteration."""
    turns = check_rule(request.getfixturevalue(run), inputs, tmp_path, level)
    assert set(turns) == {1}


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


@pytest.mark.slow
@pytest.mark.parametrize("run", ["two_ahead", "two_groups"])
def test_two_iterations_ahead_are_two_iterations_old(request, run):
    rows = [row for row in steps(request.getfixturevalue(run)) if "rollout/staleness" in row]
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 2, 2, 2, 2]
    assert [row["rollout/weights_step"] for row in rows] == [0, 0, 0, 2, 4, 6]


def test_metrics_say_how_old_the_weights_are(whole):
    rows = [row for row in steps(whole) if "rollout/staleness" in row]
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1]
    assert [row["rollout/weights_step"] for row in rows] == [0, 0, 2, 4]
    assert [row["step"] for row in steps(whole) if "eval/reward" in row] == [0, 2, 4, 6, 8]
    assert "actor/importance_weight" in rows[1], "older weights are corrected"


@pytest.mark.parametrize("step", in_tiers([3], [2], [1, 2, 3, 6]))
def test_a_run_that_stops_goes_on_to_the_same_bits(inputs, server, whole, tmp_path, step):
    config = config_of(inputs, tmp_path / "run", server)
    train(config, ended="stopped", happening="killed_at", step=step, name="SIGTERM")
    server.close()  # what was launched is in the checkpoint
    again = Running(inputs / "model")
    try:
        train(tiny_policies.merge(config, {"rollout": {"server": {"urls": [again.url]}}}))
    finally:
        again.close()
    assert made_of(tmp_path / "run") == made_of(whole)


@pytest.mark.slow
@pytest.mark.parametrize("run", nightly_but(["two_groups"], RUNS))
def test_the_order_of_answers_changes_nothing(inputs, request, tmp_path, run):
    with running(inputs, tmp_path / "run", run, seconds=-1.0) as (config, _):  # a random wait of at most this
        train(config)
    assert made_of(tmp_path / "run") == made_of(request.getfixturevalue(run))


@pytest.mark.slow
def test_two_ranks_train_what_one_trains(inputs, server, whole, tmp_path):
    train(config_of(inputs, tmp_path / "run", server, actor={"engine": tiny_policies.engine()}), world=2)
    (rows, samples), (expected, _) = made_of(tmp_path / "run"), made_of(whole)
    assert len(samples) == STEPS // PER_ITERATION + len([row for row in rows if "eval/reward" in row])
    for row, one in zip(rows, expected, strict=True):
        assert row == pytest.approx(one, rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"after_rollout": True}, SIGNALS["two at a weight sync"]], ids=["ends", "hangs"])
def test_a_server_that_is_lost_after_its_rollout_changes_nothing(inputs, server, whole, tmp_path, how):
    """The checkpoint has the rollout, and a server that was started again gets the weights that are next."""
    restarted(config_of(inputs, tmp_path / "run", server), inputs, server, **how)
    assert made_of(tmp_path / "run") == made_of(whole)


@pytest.mark.slow
@pytest.mark.parametrize("how", nightly_but(["two signals"], ["server ends", "two signals"]))
def test_a_rollout_that_broke_off_is_sampled_by_the_newest_weights(inputs, whole, tmp_path, how):
    server = Running(inputs / "model", seconds=1.0)
    said = restarted(config_of(inputs, tmp_path / "run", server), inputs, server, **SIGNALS.get(how, {}))
    assert "iteration 3" in said and "not the unbroken run" in said
    staleness = [row["rollout/staleness"] for row in steps(tmp_path / "run") if "rollout/staleness" in row]
    assert staleness == [0, 1, 0, 1]
    assert indices_of(tmp_path / "run") == indices_of(whole), "no prompt is lost"


def indices_of(run: pathlib.Path) -> list[list[int]]:
    """The prompts of each rollout."""
    return [[row["index"] for row in rows] for rows in tiny_policies.samples_of(run).values()]


def restarted(config, inputs, server, happening="killed_at", **how) -> str:
    """The server ends or hangs as step 3 begins to train; goes on with another one. Returns what is printed then."""
    ended = "ServerError" if happening.startswith("killed") else "stopped"
    config = tiny_policies.merge(config, {"rollout": {"server": {"timeout_s": 20}}})
    message = train(config, ended=ended, happening=happening, pid=server.process.pid, step=3, **how)
    assert ended == "stopped" or "steps 1 to 4 are saved in" in message
    server.close()
    again = Running(inputs / "model")
    try:
        return train(tiny_policies.merge(config, {"rollout": {"server": {"urls": [again.url]}}}))
    finally:
        again.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", nightly_but(["server ends", *NONE_IS_WHOLE], ["server ends", "SIGTERM", *SIGNALS, *NONE_IS_WHOLE])
)
def test_several_iterations_ahead_go_on_to_the_same_bits(inputs, server, two_ahead, tmp_path, how):
    """With adapters the checkpoint has the weights of rollouts that broke off."""
    config = config_of(inputs, tmp_path / "run", server, **ADAPTERS)
    if how == "SIGTERM":
        train(config, ended="stopped", happening="killed_at", step=5, name="SIGTERM")
        train(config)
    else:
        said = restarted(config, inputs, server, **(SIGNALS | NONE_IS_WHOLE).get(how, {}))
        assert "not the unbroken run" not in said
    assert made_of(tmp_path / "run") == made_of(two_ahead)


@pytest.mark.slow
def test_groups_of_servers_go_on_to_the_same_bits(inputs, two_groups, tmp_path):
    with running(inputs, tmp_path / "run", "two_groups") as (config, _):
        train(config, ended="stopped", happening="killed_at", step=5, name="SIGTERM")
        train(config)
    assert made_of(tmp_path / "run") == made_of(two_groups)


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
    config = config_of(inputs, tmp_path / "run", server, train={"eval_every": None}, checkpoint={"every": None})
    try:
        train(config, happening="steps_take", seconds=0.5)
    finally:
        server.close()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "perf/rollout_wait_s" in row]
    assert [row["perf/rollout_s"] > 2 for row in rows] == [True] * 4
    assert rows[0]["perf/rollout_wait_s"] > 1.9 and all(row["perf/rollout_wait_s"] < 1.5 for row in rows[1:])
    assert all(row["perf/servers_idle_s"] < 1 for row in rows)


VARIANTS: dict[str, dict[str, Any]] = {
    "saves in the background": {"checkpoint": {"background": True}},
    "remax with a reward model": {"algorithm": {"name": "remax"}},
    "dynamic sampling": {
        "algorithm": {"name": "dapo"},
        "rewards": {"functions": [{"name": "length", "maximum": 7, "slack": 1}]},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but([name for name in VARIANTS if "reward model" not in name], VARIANTS))
def test_other_algorithms_go_on_to_the_same_bits(inputs, server, tmp_path, name):
    """What a rollout took beside its first prompts is in the checkpoint, too."""
    parts = VARIANTS[name]
    if "reward model" in name:
        parts = parts | {"reward": {"model": {"path": str(inputs / "scorer")}}}
    unbroken, stopped = (config_of(inputs, tmp_path / run, server, **parts) for run in ("unbroken", "stopped"))
    train(unbroken)
    train(stopped, ended="stopped", happening="killed_at", step=4, name="SIGTERM")
    train(stopped)
    assert made_of(tmp_path / "stopped") == made_of(tmp_path / "unbroken")
    if name == "dynamic sampling":
        assert any(row.get("rollout/prompts_rejected") for row in steps(tmp_path / "unbroken"))
    if "background" in name:
        rows = (tmp_path / "unbroken" / "metrics.jsonl").read_text()
        assert "perf/save_write_s" in rows and "perf/save_wait_s" not in rows, "training waits for no save"
        for step in (6, 8):  # the newest is then one that was written in the background
            shutil.rmtree(tmp_path / "unbroken" / "checkpoints" / f"step_{step:08d}")
        train(unbroken)
        assert made_of(tmp_path / "stopped") == made_of(tmp_path / "unbroken")


@pytest.mark.slow
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
def test_fewer_steps_end_with_an_evaluation_and_a_save(inputs, server, whole, tmp_path):
    """And lose no prompt: more steps again go on with those of the rollout that was not trained on."""
    config = config_of(inputs, tmp_path / "run", server)
    train(config, ended="stopped", happening="killed_at", step=3, name="SIGTERM")
    train(tiny_policies.merge(config, {"train": {"steps": 4}}))
    rows = steps(tmp_path / "run")
    assert rows[-1]["step"] == 4 and "eval/reward" in rows[-1]
    assert (tmp_path / "run" / "checkpoints" / "step_00000004").is_dir()
    train(config)
    assert indices_of(tmp_path / "run") == indices_of(whole)


@pytest.mark.parametrize("seed", in_tiers([], [0], range(10)))
def test_a_killed_run_goes_on_to_the_same_bits(inputs, server, whole, tmp_path, seed):
    """By the command, with SIGKILL at any moment."""
    config, draw = config_of(inputs, tmp_path / "run", server), random.Random(seed)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    metrics = tmp_path / "run" / "metrics.jsonl"
    for lines in sorted(draw.sample(range(1, STEPS), 2)):
        run = start(tmp_path)
        while run.poll() is None and (not metrics.exists() or len(metrics.read_text().splitlines()) < lines):
            time.sleep(0.02)
        time.sleep(draw.random() / 5)
        run.send_signal(9)
        run.wait(60)
    assert start(tmp_path).wait(120) == 0
    assert made_of(tmp_path / "run") == made_of(whole)


def start(folder: pathlib.Path) -> Forked:
    (folder / "log").touch()
    return forks().start(folder, folder / "log", os.environ, ["ppo", "config.yaml", "--nproc", "1"])
