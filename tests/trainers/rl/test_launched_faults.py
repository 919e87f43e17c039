"""Servers that misbehave while the run trains: `rollout.async_level` 1.

What a server of level 0 may answer is in tests/rollout/test_servers.py. Here the run ends by it with one line after a save,
and goes on; or the batch is repaired, and nothing shows.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.forks import forks
from tests.rollout.policy_server import PolicyServer, Running, listen
from tests.tiers import nightly_but
from tests.trainers.rl import test_launched, tiny_policies
from tests.trainers.rl.test_launched import ADAPTERS, PER_ITERATION, config_of, indices_of, made_of
from tests.trainers.rl.tiny_policies import train
from tests.trainers.tiny_runs import read_rows, steps

TIMEOUT_S = 2
Fault = Callable[["Hostile", Any, Any], Any]
"""`fn(server, handler, answer)`: the answer, or None once the fault has sent it itself."""


class Hostile(PolicyServer):
    """Does `fault` to its answer to one request for a completion, the `at`-th."""

    url: str

    def __init__(self, model: pathlib.Path, fault: Fault | None = None, at: int = 20) -> None:
        super().__init__(str(model))
        self.fault, self.left = fault, at

    def send(self, handler: Any, answer: Any) -> None:
        fault = None
        if isinstance(answer, dict) and "token_ids" in answer.get("choices", [{}])[0]:
            with self.lock:
                self.left -= 1
                fault = self.fault if self.left == 0 else None
        if fault is not None:
            answer = fault(self, handler, answer)
        if fault is None or answer is not None:
            super().send(handler, answer)


@contextlib.contextmanager
def serving(model: pathlib.Path, fault: Fault | None = None) -> Iterator[Hostile]:
    policy = Hostile(model, fault)
    with listen(policy) as server:
        policy.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield policy
        finally:
            server.shutdown()


def half(then_s: float) -> Fault:
    """Half of a body; the connection ends after `then_s` seconds."""

    def fault(server: Hostile, handler: Any, answer: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        handler.wfile.write(b'{"choices": [')
        handler.wfile.flush()
        time.sleep(then_s)
        handler.close_connection = True

    return fault


def odd_token(server: Hostile, handler: Any, answer: Any) -> Any:
    answer["choices"][0]["token_ids"][0] = 10**6
    return answer


# fault, with which words the run ends; None if it does not
CASES: dict[str, tuple[Fault, str | None]] = {
    "dies in a body": (half(0), None),
    "hangs in a body": (half(TIMEOUT_S + 1), f"gave no answer in {TIMEOUT_S} s"),
    "of no vocabulary": (odd_token, "gave the token 1000000, and the actor's model has"),
}


def make_config(inputs, output_dir, server) -> dict[str, Any]:
    config = config_of(inputs, output_dir, server)
    return tiny_policies.merge(config, {"rollout": {"server": {"timeout_s": TIMEOUT_S}}})


def command(folder: pathlib.Path, config: dict[str, Any]) -> tuple[int, str]:
    """The exit code of `mrl ppo`, and what it said."""
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    log = folder / "log"
    log.write_text("")
    code = forks().start(folder, log, os.environ, ["ppo", "config.yaml", "--nproc", "1"]).wait(60)
    return code, log.read_text()


unbroken = test_launched.unbroken


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but(["dies in a body", "of no vocabulary"], CASES))
def test_a_hostile_server_is_one_line_or_nothing(inputs, unbroken, tmp_path, name):
    """After the line the steps are saved, and the run goes on. All odd answers are in tests/rollout/test_servers.py."""
    (fault, says), run = CASES[name], tmp_path / "run"
    with serving(inputs / "model", fault) as server:
        code, said = command(tmp_path, make_config(inputs, run, server))
        assert server.left <= 0
    assert "Traceback" not in said, said
    if says is not None:
        lines = [line for line in said.splitlines() if says in line]
        assert (code, len(lines)) == (2, 1), said
        assert f"rollout.server.urls: {server.url} " in lines[0], said
        with serving(inputs / "model") as server:
            code, said = command(tmp_path, make_config(inputs, run, server))
    assert code == 0, said
    if says is None:
        assert made_of(run) == made_of(unbroken("whole"))
    assert indices_of(run) == indices_of(unbroken("whole"))


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
