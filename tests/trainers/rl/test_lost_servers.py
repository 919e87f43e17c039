"""A server that ends within a run, and is started again: the others of its group do its requests, to the same bits."""

from __future__ import annotations

import threading

import pytest

from tests.rollout.policy_server import Running
from tests.trainers.rl.test_launched import ADAPTERS, PER_ITERATION, config_of, made_of, train

LEVELS = {"level 0": {"rollout": {"async_level": 0}}, "level 1": {}, "adapters at level 2": ADAPTERS}


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_run_goes_on_without_a_server_and_with_it_again(inputs, tmp_path, level):
    servers = [Running(inputs / "model", seconds=0.3) for _ in range(2)]
    urls, again = [server.url for server in servers], []

    def restart():
        servers[1].process.join()
        again.append(Running(inputs / "model", port=int(urls[1].rpartition(":")[2])))

    restarting = threading.Thread(target=restart)
    restarting.start()
    more = {"checkpoint": {"every": None}}
    unbroken, config = (config_of(inputs, tmp_path / run, servers[0], **LEVELS[level], **more) for run in ("a", "b"))
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
    assert said.count(f"rollout.server.urls: {urls[1]} ") == 2, said
    assert f"{urls[1]} is there again, and gets the newest weights" in said
    assert made_of(tmp_path / "a") == made_of(tmp_path / "b")
