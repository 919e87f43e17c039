"""The sampler against real vLLM servers on the CPU (slow tier): raw log-probs, new weights, stops, seeds, failures.

vLLM lives in a venv of its own, .venv-vllm, which `make vllm-venv` makes; MRL_TEST_VLLM_VENV names another one. Without it
these tests fail. How requests are shared, repeated and given up is in test_servers.py, on recorded traffic.

Trap 31 (weights that are partly new): `test_a_request_in_flight_keeps_its_weights`,
`test_weights_of_a_wrong_shape_are_undone`.
"""

from __future__ import annotations

import concurrent.futures

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl.batch import make_batch
from mrl.config.schema import TeacherServerConfig
from mrl.engine.sampling import GREEDY, SamplingKey, SamplingParams
from mrl.errors import ConfigError, ServerError
from mrl.roles.frozen import TeacherServer
from mrl.rollout.base import SampleRequest
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.rollout.real_vllm import FIRST_REQUEST_S, hf_stream, logs_of, requests, sampler_of

pytestmark = pytest.mark.slow

TEXT = [5, 9, 40, 41, 77, 12]


def log_probs(folder: str, tokens: list[int]) -> torch.Tensor:
    """Of tokens[1:], by Hugging Face."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def close(found: list[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "backend, runs",
    [
        pytest.param("fsdp", [({}, 2, ["disk", "broadcast"])], marks=pytest.mark.always),
        ("megatron", [({"tp": 2}, 2, ["broadcast", "broadcast"]), ({}, 1, ["broadcast", "ipc"])]),
    ],
)
def test_log_probs_are_those_of_the_actor(servers, folders, tmp_path, backend, runs):
    """With an actor that the servers were not started with and that is trained in between; and with the same actor,
    resumed in another layout on another number of processes, which joins the same servers."""
    urls, last = [server.url for server in servers], None
    for parallel, ranks, handovers in runs:
        config = tiny.role(folders[1], backend=backend, parallel=parallel)
        with logs_of(servers):
            seen, (first, trained) = run_case(
                ranks, "tests.rollout.real_vllm:follows_the_actor", timeout_s=FIRST_REQUEST_S, handovers=handovers,
                config=config, urls=urls, weights_dir=str(tmp_path / "weights"), checkpoint=str(tmp_path / "checkpoint"),
            )  # fmt: skip
        assert len(seen) == 12 and all(len(c.tokens) == 12 for completions in seen for c in completions)
        assert first != trained
        if last is not None:
            close(first, torch.tensor(last))
        last = trained


def test_it_is_a_teacher_by_its_likeliest_tokens(sampler, servers, folders):
    """20 of each trained place, the most that a server gives by default; of more it says so in one line."""
    client = TeacherServer(TeacherServerConfig(url=servers[0].url, concurrency=4))
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    client.check_tokenizer(tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    with pytest.raises(ConfigError, match=r"has another tokenizer: 'a <\|end\|> a' has other ids"):
        client.check_tokenizer(tokenizer)
    texts = [TEXT, [7, 7, 30], [50, 2]]
    ids, found = client.top_and_labels(make_batch(texts, [[0, 1, 0, 1, 1, 1], [0, 1, 1], [0, 1]]), 20)[:2]
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    with torch.no_grad():
        every = [model(torch.tensor([text])).logits[0].log_softmax(-1) for text in texts]
    at = torch.cat([every[0][[0, 2, 3, 4]], every[1][[0, 1]], every[2][[0]]])
    torch.testing.assert_close(found, at.topk(20).values, rtol=0, atol=1e-5)
    torch.testing.assert_close(found, at.gather(1, ids.long()), rtol=0, atol=1e-5)
    with pytest.raises(ServerError, match="HTTP 400") as caught:
        client.top_and_labels(make_batch(texts, [[0, 1, 0, 1, 1, 1], [0, 1, 1], [0, 1]]), 21)
    assert "\n" not in str(caught.value)


def test_samples_follow_their_keys(sampler):
    """Those of one prompt differ, the same keys give the same again, and the order of the requests changes nothing."""
    asked = requests(SamplingParams(), prompts=2, samples=4)
    first = sampler.sample(asked)
    assert len({tuple(c.tokens) for c in first[:4]}) == 4
    again = sampler.sample(asked[::-1])[::-1]
    assert [c.tokens for c in again] == [c.tokens for c in first]
    later = [SampleRequest(r.tokens, r.max_new_tokens, r.sampling, r.key._replace(step=2)) for r in asked]
    assert all(a.tokens != b.tokens for a, b in zip(sampler.sample(later), first, strict=True))


def test_what_ends_a_completion_stays_in_it(sampler):
    """A stop token, a stop text that spans two tokens, and neither; the model's own end token ends only what names it."""
    whole = sampler.sample(requests(GREEDY, prompts=1, samples=1, new=20))[0]
    assert len(whole.tokens) == 20 and not whole.finished
    ids = whole.tokens
    end = next(i for i in range(3, 20) if ids[i] not in ids[:i])  # where the pair (end - 1, end) comes first
    stopped = sampler.sample(requests(GREEDY, prompts=1, samples=1, new=20, stop_tokens=(ids[end], 2)))[0]
    assert stopped.tokens == ids[: end + 1] and stopped.finished
    text = f"w{ids[end - 1]} w{ids[end]}"[1:]
    stopped = sampler.sample(requests(GREEDY, prompts=1, samples=1, new=20, stop=("nowhere", text)))[0]
    assert stopped.tokens == ids[: end + 1] and stopped.finished
    close(stopped.log_probs, torch.tensor(whole.log_probs[: end + 1]))


def test_a_request_in_flight_keeps_its_weights(servers, sampler, folders):
    """It began with the old weights and ends with them; what comes next has the new ones. Cached prefixes are forgotten."""
    asked = SampleRequest([5, 6, 7], 500, SamplingParams(), SamplingKey())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for _ in range(30):  # a busy machine may look when all is drawn
            flying = pool.submit(sampler.fleet._servers[0].complete, asked)
            while not servers[0].running() and not flying.done():
                pass
            if not flying.done():
                break
        assert not flying.done()
        sampler.update_weights(hf_stream(folders[1]))
        completion = flying.result()
    close(completion.log_probs, log_probs(folders[0], [*asked.tokens, *completion.tokens])[2:])
    completion = sampler.sample([asked])[0]
    close(completion.log_probs, log_probs(folders[1], [*asked.tokens, *completion.tokens])[2:])
    close(sampler.log_probs(TEXT)[0], log_probs(folders[1], TEXT))


def test_weights_of_a_wrong_shape_are_undone(servers, folders, tmp_path):
    """vLLM 0.32.0 by itself can load nothing after them: mrl's worker forgets what they have left."""
    urls = [server.url for server in servers]
    sampler = sampler_of(urls, str(tmp_path / "weights"))
    sampler.update_weights(hf_stream(folders[0]))
    before, both = sampler.log_probs(TEXT), sampler.sample(requests(SamplingParams(), samples=4))
    assert len({tuple(c.tokens) for c in both}) == 12
    other, old = sampler_of(urls, str(tmp_path / "other")), sampler.fleet.handover._loaded.values()
    other.fleet.handover._loaded = dict(zip(other.fleet._servers, old, strict=True))
    with pytest.raises(ServerError, match="no server samples from the new weights") as caught:
        other.update_weights(hf_stream(folders[1], wrong_shape="model.layers.1.mlp.down_proj.weight"))
    assert "must be started again" not in str(caught.value)
    assert sampler.log_probs(TEXT) == before
    sampler.update_weights(hf_stream(folders[1]))
    close(sampler.log_probs(TEXT)[0], log_probs(folders[1], TEXT))
    sampler.update_weights(hf_stream(folders[0]))
    assert sampler.log_probs(TEXT) == before
