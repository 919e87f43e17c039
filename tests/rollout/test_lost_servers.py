"""Servers that are lost, or started again: the others of their group do their requests. On recorded traffic."""

from __future__ import annotations

import threading
import time

import pytest

from mrl.errors import ServerError
from tests.rollout.real_vllm import sampler_of
from tests.rollout.record import asked
from tests.rollout.replay import WEIGHTS, Replay, hang_up, says
from tests.rollout.test_servers import BUSY, COMPLETIONS, recorded

RESTARTED = says(200, {"weight_version": "default"})


def closes(server: Replay):
    """A fault: the server ends at this request."""

    def close(body, recorded):
        threading.Thread(target=server.close).start()

    return close


LOST = {
    "ends": lambda server: {COMPLETIONS: [closes(server)] + [hang_up] * 100},
    "hangs": lambda server: {COMPLETIONS: [server.hang] * 100},
    "stays busy": lambda server: {COMPLETIONS: [BUSY] * 100},
    "started again before": lambda server: {"/weight_info": [RESTARTED] * 100},
    "started again meanwhile": lambda server: {"/weight_info": [lambda body, told: told, *[RESTARTED] * 100]},
    "started again and refuses": lambda server: {
        COMPLETIONS: [says(404, {"message": "no such adapter"})] * 100,
        "/weight_info": [lambda body, told: told, *[RESTARTED] * 100],
    },
}


@pytest.fixture
def pair(replay, tmp_path):
    """(two servers, their sampler with weights, the lines that it says)."""
    servers, said = [replay(), replay()], []
    urls = [server.url for server in servers]
    sampler = sampler_of(urls, str(tmp_path / "weights"), concurrency=2, timeout_s=1.0, say=said.append)
    sampler.update_weights(iter(WEIGHTS))
    return servers, sampler, said


def sampled(sampler):
    return [(c.tokens, c.log_probs, c.finished) for c in sampler.sample(asked())]


@pytest.mark.parametrize("case", LOST)
def test_the_others_do_the_requests_of_a_lost_server(pair, case):
    (kept, lost), sampler, said = pair
    lost.faults = LOST[case](lost)
    assert sampled(sampler) == recorded()
    assert len(said) == 1 and said[0].startswith(f"rollout.server.urls: {lost.url} ")
    assert said[0].endswith("; it is left out until it is there again")
    asked_before = lost.paths().count(COMPLETIONS)
    assert sampled(sampler) == recorded()
    assert lost.paths().count(COMPLETIONS) == asked_before and len(said) == 1
    if case.startswith("started again"):
        assert kept.paths().count(COMPLETIONS) == 2 * len(asked()), "what it sampled by other weights does not count"
    assert not [t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")]


@pytest.mark.slow
def test_requests_of_a_lost_server_do_not_wait_for_their_time_out(replay, tmp_path):
    kept, lost = replay(delay_s=0.3), replay()
    sampler = sampler_of([kept.url, lost.url], str(tmp_path / "weights"), concurrency=2, timeout_s=50)
    sampler.update_weights(iter(WEIGHTS))
    lost.faults = {COMPLETIONS: [lost.hang, *[BUSY] * 100]}
    start = time.monotonic()
    assert sampled(sampler) == recorded()
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_server_that_is_there_again_gets_the_next_weights(pair, replay, is_closed):
    """Started again on its port, or one that only hung."""
    (_, lost), sampler, said = pair
    lost.faults = LOST["ends" if is_closed else "hangs"](lost)
    assert sampled(sampler) == recorded()
    if is_closed:
        sampler.update_weights(iter(WEIGHTS))
        assert len(said) == 1 and sampler.fleet.present == sampler.fleet.handover.servers != (), "still away"
        lost = replay(port=int(lost.url.rpartition(":")[2]))
    lost.faults.clear()
    sampler.update_weights(iter(WEIGHTS))
    assert said[1:] == [f"rollout.server.urls: {lost.url} is there again, and gets the newest weights"]
    assert lost.version == sampler.fleet.version
    assert sampled(sampler) == recorded() and lost.paths().count(COMPLETIONS)


@pytest.mark.slow
def test_a_server_that_hangs_stays_away(pair):
    """Also one that says which weights it has: a hung engine behind a server that answers."""
    (_, lost), sampler, said = pair
    lost.faults = LOST["hangs"](lost)
    for _ in range(2):
        assert sampled(sampler) == recorded()
        sampler.update_weights(iter(WEIGHTS))
    assert lost.version != sampler.fleet.version and "gets the newest weights" not in str(said)


def test_a_server_that_was_started_again_between_rollouts_gets_the_next_weights(pair):
    (_, restarted), sampler, said = pair
    restarted.faults["/weight_info"] = [RESTARTED]
    sampler.update_weights(iter(WEIGHTS))
    assert said == [f"rollout.server.urls: {restarted.url} is there again, and gets the newest weights"]
    assert sampled(sampler) == recorded() and restarted.paths().count(COMPLETIONS)


def test_a_server_that_ended_between_rollouts_gets_no_weights(pair):
    (kept, lost), sampler, said = pair
    lost.close()
    sampler.update_weights(iter(WEIGHTS))
    assert kept.version == sampler.fleet.version and "cannot be reached" in said[0]
    assert sampled(sampler) == recorded()


def test_one_that_was_started_again_otherwise_stays_away(pair, replay):
    """Here with room for shorter sequences."""
    (_, lost), sampler, said = pair
    lost.close()
    other = replay(port=int(lost.url.rpartition(":")[2]))
    answer = other._recorded("GET", "/v1/models", None)[1]
    answer["data"][0]["max_model_len"] = 3
    other.faults["/v1/models"] = [says(200, answer)] * 10
    for _ in range(2):
        sampler.update_weights(iter(WEIGHTS))
    assert len(said) == 1 and f"{other.url} takes 3 tokens" in said[0]
    assert sampled(sampler) == recorded()
    assert not [body for path, body in other.calls if path == COMPLETIONS and "prompt_logprobs" not in body]


def test_the_last_server_ends_the_run_with_one_line(pair):
    servers, sampler, said = pair
    servers[1].faults = LOST["stays busy"](servers[1])
    servers[0].faults = {COMPLETIONS: [closes(servers[0])] + [hang_up] * 100}
    start = time.monotonic()
    with pytest.raises(ServerError, match=r"^rollout.server.urls: http://[^\n]*; left out before: http://[^\n]*$"):
        sampler.sample(asked())
    assert time.monotonic() - start < 40 and len(said) == 1
    assert not [t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")]


@pytest.mark.parametrize("when", [1, 2])
def test_a_server_alone_with_other_weights_is_an_error(replay, tmp_path, when):
    """Before the requests or after them: it was started again meanwhile."""
    server = replay()
    sampler = sampler_of([server.url], str(tmp_path / "weights"))
    sampler.update_weights(iter(WEIGHTS))
    server.faults["/weight_info"] = [*[lambda body, told: told] * (when - 1), RESTARTED]
    with pytest.raises(ServerError, match=rf"{server.url} has the weights 'default' and not '\S+' of this run"):
        sampler.sample(asked())
    assert (server.paths().count(COMPLETIONS) == 0) == (when == 1)


@pytest.mark.parametrize("fault", ["gives no number", "refuses"])
def test_a_wrong_answer_is_no_loss(pair, fault):
    """Another server would hide a fault of the weights or of the request."""
    servers, sampler, said = pair
    nan = says(
        200,
        {
            "choices": [
                {"finish_reason": "length", "token_ids": [1] * 4, "logprobs": {"token_logprobs": [float("nan")] * 4}}
            ]
        },
    )
    for server in servers:  # whichever answers first
        server.faults[COMPLETIONS] = [nan if fault == "gives no number" else says(400, {"message": "no"})]
    with pytest.raises(ServerError, match="not finite|says HTTP 400"):
        sampler.sample(asked())
    assert not said
