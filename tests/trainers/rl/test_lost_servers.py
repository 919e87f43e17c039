"""A server that ends within a run, and is started again: the others of its group do its requests, to the same bits."""

from __future__ import annotations

import threading

import pytest

from tests.rollout.policy_server import Running
from tests.trainers.rl import tiny_policies
from tests.trainers.rl.test_launched import ADAPTERS, PER_ITERATION, config_of, made_of
from tests.trainers.rl.tiny_policies import train
from tests.trainers.tiny_runs import read_rows, steps


@pytest.mark.slow
def test_a_run_goes_on_without_a_server_and_with_it_again(inputs, tmp_path):
    """With adapters, two iterations ahead; what a sampler does without one is in tests/rollout/test_lost_servers.py."""
    servers = [Running(inputs / "model", seconds=0.3) for _ in range(2)]
    urls, again = [server.url for server in servers], []

    def restart():
        servers[1].process.join()
        again.append(Running(inputs / "model", port=int(urls[1].rpartition(":")[2])))

    restarting = threading.Thread(target=restart)
    restarting.start()
    parts = ADAPTERS | {"checkpoint": {"every": None}, "train": {"steps": 8}}
    unbroken, config = (config_of(inputs, tmp_path / run, servers[0], **parts) for run in ("a", "b"))
    config["rollout"]["server"]["urls"] = urls
    ends = {"step": PER_ITERATION + 1, "pid": servers[1].process.pid, "url": urls[1], "at": 2 * PER_ITERATION + 1}
    try:
        train(unbroken)
        said = train(config, happening="server_comes_back", **ends)
    finally:
        servers[1].close()
        restarting.join()
        for server in [*servers, *again]:
            server.close()
    assert f"{urls[1]} is there again, and gets the newest weights" in said
    assert made_of(tmp_path / "a") == made_of(tmp_path / "b")


@pytest.mark.slow
def test_a_row_that_fails_at_every_resume_is_named_and_can_be_left_out(inputs, tmp_path):
    """A reward function that cannot take one prompt of the second iteration, sampled while the first one trains."""
    file = tmp_path / "score.py"
    file.write_text("def one(prompt, completion, row):\n    return 1 / (prompt != '9=')\n")
    server = Running(inputs / "model")
    config = config_of(inputs, tmp_path / "run", server, checkpoint={"every": None})
    config["rewards"] = {"functions": [{"function": f"{file}:one"}], "workers": 1}
    line = 1 + [row["prompt"] for row in read_rows(inputs / "train.jsonl")].index("9=")
    try:
        for _ in range(2):
            message = train(config, ended="RewardError")
            assert f"train.jsonl:{line}" in message and "or set rewards.on_error: zero" in message
        said = train(tiny_policies.merge(config, {"rewards": {"on_error": "zero"}}))
    finally:
        server.close()
    assert f"train.jsonl:{line}" in said and steps(tmp_path / "run")[-1]["step"] == 8
