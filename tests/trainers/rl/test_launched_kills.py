"""Kills of the trainer and of servers that sample beside it: `rollout.async_level` 1 and 2."""

from __future__ import annotations

import collections
import os
import pathlib
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.forks import Forked, forks
from tests.rollout.policy_server import Running
from tests.tiers import in_tiers, nightly_but
from tests.trainers.rl import test_launched, tiny_policies
from tests.trainers.rl.test_launched import PER_ITERATION, RUNS, config_of, indices_of, made_of, running, train

LONGEST_S = 60
"""Of a wait for anything."""

whole, two_ahead, two_groups = test_launched.whole, test_launched.two_ahead, test_launched.two_groups


class Killed:
    """A run of the command, which is started again when it has ended, and its server."""

    def __init__(self, folder: pathlib.Path, config: dict[str, Any], server: Running, model: pathlib.Path) -> None:
        self.folder, self.server, self.model = folder, server, model
        self.log, self.metrics = folder / "log", folder / "run" / "metrics.jsonl"
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        self.log.write_text("")
        self.run = self.start()

    def start(self) -> Forked:
        return forks().start(self.folder, self.log, os.environ, ["ppo", "config.yaml", "--nproc", "1"])

    def until(self, ready: Callable[[], bool]) -> None:
        """Waits until it is ready or done. It may end meanwhile by a dead server, with one line, and goes on."""
        began_s = time.monotonic()
        while self.run.poll() != 0 and not ready():
            assert time.monotonic() - began_s < LONGEST_S, f"hangs: {self.log.read_text()}"
            if self.run.poll() == 2:
                assert "rollout.server.urls: " in self.log.read_text().splitlines()[-1], self.log.read_text()
                self.run, began_s = self.start(), time.monotonic()
            assert self.run.poll() in (None, 0, 2), self.log.read_text()
            time.sleep(0.02)

    def made(self, lines: int) -> bool:
        return self.metrics.exists() and len(self.metrics.read_text().splitlines()) >= lines

    def kill_trainer(self) -> None:
        self.run.send_signal(9)
        assert self.run.wait(LONGEST_S) in (-9, 0, 2)
        self.run = self.start()

    def kill_server(self) -> None:
        self.server.close()
        self.server = Running(self.model, port=self.server.port)


@pytest.mark.parametrize(
    "run, seed", in_tiers([], [("two_ahead", 0)], [*(("two_ahead", i) for i in range(20)), *(("whole", i) for i in range(4))])
)  # fmt: skip
def test_kills_of_trainer_and_server_lose_nothing(inputs, request, tmp_path, run, seed):
    """SIGKILL at random moments, of either. With adapters the run ends with the bits of the unbroken one; with whole
    weights a rollout that is lost with its server is sampled by newer ones, from the same prompts."""
    expected, draw = request.getfixturevalue(run), random.Random(seed)
    server = Running(inputs / "model")
    config = config_of(inputs, tmp_path / "run", server, **RUNS[run])
    config = tiny_policies.merge(config, {"rollout": {"server": {"timeout_s": 20}}})
    killed = Killed(tmp_path, config, server, inputs / "model")
    try:
        who = draw.sample(["kill_trainer", "kill_server"] * 2, 4)
        for one, lines in zip(who, sorted(draw.choices(range(config["train"]["steps"]), k=4)), strict=True):
            killed.until(lambda: killed.made(lines))  # noqa: B023 (it is called here)
            time.sleep(draw.random() / 2)
            getattr(killed, one)()
        killed.until(lambda: False)
    finally:
        killed.run.send_signal(9)
        killed.server.close()
    assert "Traceback" not in killed.log.read_text()
    assert indices_of(tmp_path / "run") == indices_of(expected)
    if run == "two_ahead":
        assert made_of(tmp_path / "run") == made_of(expected)


@pytest.mark.slow
@pytest.mark.parametrize("run", nightly_but(["two_groups"], RUNS))
def test_no_prompt_is_lost_and_none_is_trained_twice(inputs, request, tmp_path, run):
    """Over a rollout that is given up as the trainer waits for it, a SIGKILL, and more steps than at first."""
    expected = request.getfixturevalue(run)
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
