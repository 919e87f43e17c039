"""`mrl serve` that samples from a real vLLM: snapshots are adapters there, and training goes on meanwhile."""

import json
import shutil

import pytest
from tinker import types

from tests.rollout.real_vllm import MAX_LENGTH, adapter_server
from tests.serve.serving import Serving, rows, serving, step

pytestmark = pytest.mark.slow  # vLLM starts
PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])
GREEDY = types.SamplingParams(max_tokens=12, temperature=0.0, stop=[])


@pytest.fixture(scope="module")
def vllm():
    return adapter_server()


@pytest.fixture(scope="module")
def model(vllm):
    return vllm.model


def keys(url):
    return (f"serve.servers={{kind: vllm, urls: ['{url}']}}", f"serve.max_length={MAX_LENGTH // 2}")


def drawn(sampler, params=GREEDY, count=1):
    return [(one.tokens, one.logprobs) for one in sampler.sample(PROMPT, count, params).result().sequences]


def test_snapshots_are_adapters_of_the_servers(model, vllm, tmp_path):
    """What vLLM draws of a snapshot is what the trainer's engine draws and scores, whatever is trained later."""
    with serving(tmp_path, model, *keys(vllm.url)) as server:
        client = server.train(seed=1)
        base = drawn(server.client().create_sampling_client(base_model=model))
        for seed in range(3):
            step(client, rows(seed))
        unnamed = client.save_weights_and_get_sampling_client()
        named = client.create_sampling_client(client.save_weights_for_sampler(name="n").result().path)
        first = drawn(unnamed)
        assert first[0][0] == drawn(named)[0][0] != base[0][0]
        whole = types.ModelInput.from_ints([5, 6, 7, 8, *first[0][0]])
        scored = named.compute_logprobs(whole).result()[4:]  # by the trainer's engine
        assert first[0][1] == pytest.approx(scored, abs=2e-5)
        step(client, rows(7))
        assert drawn(unnamed)[0][0] == first[0][0]
        later = client.create_sampling_client(client.save_weights_for_sampler(name="n").result().path)
        assert drawn(later)[0][1] != first[0][1], "the name was saved anew, and is another adapter"
        seeded = types.SamplingParams(max_tokens=6, seed=3, temperature=1.0)
        assert (
            drawn(unnamed, seeded, 4) == drawn(unnamed, seeded, 4)
            and len({tuple(t) for t, _ in drawn(unnamed, seeded, 4)}) > 1
        )


@pytest.mark.parametrize(("url", "length", "says"), [
    (None, 4096, "takes sequences of 512 tokens; start it with room for 4096"),
    ("http://127.0.0.1:9", 64, "cannot be reached"),
])  # fmt: skip
def test_a_server_that_will_not_do(model, vllm, tmp_path, url, length, says):
    longer = shutil.copytree(model, tmp_path / "longer")  # with more positions than vLLM has room for
    about = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps(about | {"max_position_embeddings": 8192}))
    server = Serving(tmp_path, str(longer), *keys(url or vllm.url), f"serve.max_length={length}")
    with pytest.raises(AssertionError, match=f"serve.servers.urls: {url or vllm.url} .*{says}"):
        server.start()
    assert server.process.wait(60) == 2
