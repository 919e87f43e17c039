"""The vLLM servers that test_handover.py and test_vllm.py share, in one process of the tests (tests/conftest.py); a server takes half a minute to start."""

from __future__ import annotations

import pytest

from mrl.rollout import http
from tests.rollout import host_gpu
from tests.rollout.real_vllm import LINKED, RealServer, hf_stream, make_model, sampler_of
from tests.rollout.replay import WEIGHTS, Replay


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> list[str]:
    """Two models that differ in their weights only."""
    root = tmp_path_factory.mktemp("models")
    return [make_model(str(root / str(seed)), seed) for seed in (0, 1)]


@pytest.fixture(scope="session")
def servers(folders, tmp_path_factory):
    """(one with raw, one with processed log-probs), both started with the first model."""
    logs = tmp_path_factory.mktemp("logs")
    flags = [(), ("--logprobs-mode", "processed_logprobs")]
    started = [RealServer(folders[0], logs / f"{i}.log", *LINKED, *each) for i, each in enumerate(flags)]
    try:
        for server in started:
            server.wait()
        yield started
    finally:
        for server in started:
            server.kill()


@pytest.fixture
def sampler(servers, folders, tmp_path):
    """Of the raw server, with the first model's weights."""
    sampler = sampler_of([servers[0].url], str(tmp_path / "weights"))
    sampler.update_weights(hf_stream(folders[0]))
    yield sampler
    sampler.close()


@pytest.fixture
def gpu(monkeypatch):
    """The device of a GPU that CUDA IPC reaches."""
    return host_gpu.stand_in(monkeypatch)


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.01)


@pytest.fixture
def replay(short_waits):
    """Starts servers, which log to one list."""
    started, shared = [], []

    def start(**kwargs) -> Replay:
        started.append(Replay("vllm.json", name=str(len(started)), shared=shared, **kwargs))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def two(replay, tmp_path):
    """(two servers, their sampler with weights handed over once); what happened until then is forgotten."""
    servers = [replay(), replay()]
    sampler = sampler_of([s.url for s in servers], str(tmp_path / "weights"), concurrency=2)
    sampler.update_weights(iter(WEIGHTS))
    for server in servers:
        server.calls.clear()
        server.shared.clear()
    return servers, sampler
