"""New weights through links into real vLLM servers on the CPU (slow tier): gloo, and memory that they map.

Where vLLM comes from is in test_vllm.py, whose servers these are (conftest.py). vLLM packs linear weights on a CPU and
cannot give them back, so what is compared bit for bit is what came to its loader (noting_worker.py), what can be read
of the model (/weight_checker), and log-probs with those of the same weights from files.
"""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

import pytest

from mrl.engine import links
from mrl.engine.sampling import SamplingParams
from mrl.errors import ServerError
from tests.rollout.digest import digest
from tests.rollout.real_vllm import RealServer, hf_stream, logs_of, requests, sampler_of
from tests.rollout.test_vllm import close, log_probs

pytestmark = pytest.mark.slow

TEXT = [5, 9, 40, 41, 77, 12, *range(3, 60)]
WRONG = "model.layers.1.mlp.down_proj.weight"


def post(server: RealServer, path: str, body: Any) -> Any:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def paused(server: RealServer) -> bool:
    with urllib.request.urlopen(f"{server.url}/is_paused", timeout=60) as answer:
        return json.load(answer)["is_paused"]


def checksums(server: RealServer) -> dict[str, str]:
    return post(server, "/weight_checker", {"action": "checksum"})["checksums"]


def linked(servers: list[RealServer], folder, way: str, bucket_bytes: int = 2**20):
    sampler = sampler_of([server.url for server in servers], str(folder), handover=way)
    sampler.fleet.handover._bucket_bytes = bucket_bytes
    return sampler


@pytest.fixture(scope="module")
def by_disk(servers, folders, tmp_path_factory) -> list[tuple[list[dict[str, str]], list[list[float]]]]:
    """(checksums, log-probs of TEXT) of both servers with the weights of each folder, from files."""
    sampler = sampler_of([server.url for server in servers], str(tmp_path_factory.mktemp("weights")))
    found = []
    for folder in folders:
        sampler.update_weights(hf_stream(folder))
        found.append(([checksums(server) for server in servers], sampler.log_probs(TEXT)))
    sampler.close()
    assert found[0][1] != found[1][1]
    return found


@pytest.mark.parametrize(
    ("way", "buckets"),
    [
        ("broadcast", (1, -1)), ("ipc", (2**30,)), pytest.param("broadcast", (0, 2**30), marks=pytest.mark.nightly),
        pytest.param("ipc", (-1,), marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_every_bit_arrives_whatever_the_buckets(servers, folders, by_disk, tmp_path, way, buckets):
    """At two servers. Buckets: smaller than a tensor, exactly the first five (0), one byte less (-1), and one for all."""
    models = [dict(hf_stream(folder)) for folder in folders]
    first = sum(t.numel() * t.element_size() for t in list(models[0].values())[:5])
    has = int(by_disk[0][0] != [checksums(server) for server in servers])  # the servers' weights
    for turn, size in enumerate(buckets, 1):
        model, (sums, scores) = models[(has + turn) % 2], by_disk[(has + turn) % 2]
        sampler = linked(servers, tmp_path, way, size if size > 0 else first + size)
        for server in servers:
            post(server, "/collective_rpc", {"method": "note"})
        sampler.update_weights(iter(model.items()))
        for server in servers:
            [came] = post(server, "/collective_rpc", {"method": "what_was_noted"})["results"]
            assert came == [[name, *digest(tensor)] for name, tensor in model.items()]
        assert [checksums(server) for server in servers] == sums
        assert sampler.log_probs(TEXT) == scores
        sampler.sample(requests(SamplingParams(), prompts=1, samples=1))
        sampler.close()
    assert not list(links._SHM.glob(f"mrl-{links.os.getpid()}-*"))


@pytest.mark.parametrize("fault", ["a tensor lacks", pytest.param("a wrong shape", marks=pytest.mark.nightly)])
def test_what_cannot_be_loaded_leaves_all_paused_until_whole_weights_come(servers, folders, tmp_path, fault):
    """Of a layer, a part is loaded already where a tensor has a wrong shape."""
    sampler = linked(servers, tmp_path, "broadcast", 50_000)
    stream, said = hf_stream(folders[1], wrong_shape=WRONG), r"/\w+_weights? says HTTP 500"
    if fault == "a tensor lacks":
        stream, said = (pair for pair in stream if pair[0] != WRONG), f"no weights have come for 1 .*{WRONG}"
    start = time.monotonic()
    with logs_of(servers), pytest.raises(ServerError, match=said) as caught:
        sampler.update_weights(stream)
    assert time.monotonic() - start < 30 and "\n" not in str(caught.value)
    assert "no server samples: their weights are partly new" in str(caught.value)
    assert all(paused(server) for server in servers)
    again = linked(servers, tmp_path, "broadcast", 50_000)  # as of the next start of the command
    again.update_weights(hf_stream(folders[1]))
    for found in again.log_probs(TEXT):
        close(found, log_probs(folders[1], TEXT))
    again.close()
    sampler.close()


def test_a_trainer_that_is_killed_leaves_servers_that_another_can_use(servers, folders, tmp_path):
    """It is gone after `begin`, and after a bucket of which the servers have a layer's part."""
    for sent in (0, 1):
        killed = linked(servers, tmp_path, "broadcast")
        handover = killed.fleet.handover
        link = handover._joined()
        for server in killed.fleet._servers:
            server.pause()
            server.begin()
        for bucket in list(links.buckets(hf_stream(folders[1]), 300_000, link.buffer))[:sent]:
            handover._send_one(bucket, link)
        link.close()  # as its end closes what it had open
        del link, handover, killed
        sampler = linked(servers, tmp_path, "broadcast")
        with logs_of(servers):
            sampler.update_weights(hf_stream(folders[sent]))
        for found in sampler.log_probs(TEXT):
            close(found, log_probs(folders[sent], TEXT))
        sampler.close()
