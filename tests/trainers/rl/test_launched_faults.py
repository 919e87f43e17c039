"""Servers that misbehave while the run trains: `rollout.async_level` 1 and 2.

What a server of level 0 may answer is in tests/rollout/test_servers.py. Here the run ends by it with one line after a save,
and goes on; or the batch is repaired, and nothing shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.forks import forks
from tests.rollout.policy_server import PolicyServer, listen
from tests.tiers import in_tiers
from tests.trainers.rl import tiny_policies
from tests.trainers.rl.test_launched import ADAPTERS, config_of, indices_of, made_of

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


def late(seconds: float) -> Fault:
    def fault(server: Hostile, handler: Any, answer: Any) -> Any:
        time.sleep(seconds)
        return answer

    return fault


def twice(server: Hostile, handler: Any, answer: Any) -> Any:
    PolicyServer.send(server, handler, answer)
    return answer


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


def choice(change: Callable[[dict[str, Any]], object]) -> Fault:
    def fault(server: Hostile, handler: Any, answer: Any) -> Any:
        change(answer["choices"][0])
        return answer

    return fault


def started_again(server: Hostile, handler: Any, answer: Any) -> Any:
    """Its weights are those of its start."""
    server.version = "default"
    server.adapted.clear()
    return answer


@dataclasses.dataclass(frozen=True)
class Case:
    fault: Fault
    says: str | None = None  # with which words the run ends; None if it does not


CASES = {
    "late": Case(late(0.5)),
    "twice": Case(twice),
    "dies in a body": Case(half(0)),
    "two choices": Case(lambda server, handler, answer: {"choices": answer["choices"] * 2}),
    "too late": Case(late(TIMEOUT_S + 1), f"gave no answer in {TIMEOUT_S} s"),
    "hangs in a body": Case(half(TIMEOUT_S + 1), f"gave no answer in {TIMEOUT_S} s"),
    "no choice": Case(lambda server, handler, answer: {"choices": []}, "answered otherwise than expected (IndexError"),
    "a log-prob too few": Case(choice(lambda c: c["logprobs"]["token_logprobs"].pop()), " log-probs for at most 8 tokens"),
    "a token too many": Case(choice(lambda c: c["token_ids"].append(3)), " log-probs for at most 8 tokens"),
    "not a number": Case(choice(lambda c: c["logprobs"].update(token_logprobs=[float("nan")] * len(c["token_ids"]))), "gave a log-prob that is not finite"),
    "of no vocabulary": Case(choice(lambda c: c["token_ids"].__setitem__(0, 10**6)), "gave the token 1000000, and the actor's model has"),
    "started again": Case(started_again, "has the weights 'default' and not '"),
}  # fmt: skip
LEVELS = {"level 1": {}, "level 2": ADAPTERS}


def make_config(inputs, output_dir, server, level: str) -> dict[str, Any]:
    parts = LEVELS[level] | {"log": {"samples": {"every": 1, "tokens": True}}}
    config = config_of(inputs, output_dir, server, **parts)
    return tiny_policies.merge(config, {"rollout": {"server": {"timeout_s": TIMEOUT_S}}, "train": {"steps": 8}})


def command(folder: pathlib.Path, config: dict[str, Any]) -> tuple[int, str]:
    """The exit code of `mrl ppo`, and what it said."""
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    log = folder / "log"
    log.write_text("")
    code = forks().start(folder, log, os.environ, ["ppo", "config.yaml", "--nproc", "1"]).wait(60)
    return code, log.read_text()


@pytest.fixture(scope="module")
def unbroken(inputs, tmp_path_factory):
    """The folders of unbroken runs, by level."""
    made = {}

    def of(level: str) -> pathlib.Path:
        if level not in made:
            folder = tmp_path_factory.mktemp("unbroken")
            with serving(inputs / "model") as server:
                code, said = command(folder, make_config(inputs, folder / "run", server, level))
            assert code == 0, said
            made[level] = folder / "run"
        return made[level]

    return of


PAIRS = [(name, level) for name in CASES for level in LEVELS]
IN_CI = [(name, list(LEVELS)[i % len(LEVELS)]) for i, name in enumerate(CASES)]
"""Each fault once, and at each level faults of both kinds."""


@pytest.mark.parametrize("name, level", in_tiers([], IN_CI, PAIRS))
def test_a_hostile_server_is_one_line_or_nothing(inputs, unbroken, tmp_path, name, level):
    """After the line the steps are saved, and the run goes on: with adapters to the bits of the unbroken one."""
    case, run, expected = CASES[name], tmp_path / "run", unbroken(level)
    with serving(inputs / "model", case.fault) as server:
        config = make_config(inputs, run, server, level)
        code, said = command(tmp_path, config)
        assert server.left <= 0
    assert "Traceback" not in said, said
    if case.says is not None:
        lines = [line for line in said.splitlines() if case.says in line]
        assert (code, len(lines)) == (2, 1), said
        assert f"rollout.server.urls: {server.url} " in lines[0], said
        with serving(inputs / "model") as server:
            code, said = command(tmp_path, make_config(inputs, run, server, level))
    assert code == 0, said
    if case.says is None or "adapter" in str(config["rollout"]["server"]):
        assert made_of(run) == made_of(expected)
    assert indices_of(run) == indices_of(expected)
