"""The handlers of OpenAI's interface, with OpenAI's own client."""

import contextlib
import http.client
import json
import shutil
import time

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serve.serving import rows, serving, step

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(one):
    return one


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def reference(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), AutoTokenizer.from_pretrained(model)


def greedy(reference, ids, count):
    hf, _ = reference
    return hf.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None)[
        0, len(ids) :
    ].tolist()


def test_greedy_completions_are_those_of_transformers(client, model, reference):
    _, tokenizer = reference
    prompts = ["What is 2 + 2?", "the quick brown"]
    answer = client.completions.create(
        model=model, prompt=prompts, max_tokens=10, temperature=0, extra_body={"stop": []}
    )
    for i, prompt in enumerate(prompts):
        expected = greedy(reference, tokenizer(prompt)["input_ids"], 10)
        assert answer.choices[i].text == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.usage.completion_tokens == 20


def test_a_prompt_is_scored_without_a_completion(client, model, reference):
    """As evaluation tools do: echo, log-probs, no new token."""
    hf, _ = reference
    ids = [5, 20, 31, 8, 44]
    answer = client.completions.create(model=model, prompt=ids, max_tokens=0, echo=True, logprobs=2, temperature=0)
    found = answer.choices[0].logprobs
    with torch.no_grad():
        log_p = hf(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = log_p[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert found.token_logprobs[0] is None and found.token_logprobs[1:] == pytest.approx(expected, abs=1e-5)
    largest = log_p.max(-1).values.tolist()
    assert [max(top.values()) for top in found.top_logprobs[1:]] == pytest.approx(largest[:-1], abs=1e-5)


def test_the_likeliest_tokens_are_told_by_their_numbers(client, model, reference):
    """As lm-eval reads it: a token is the likeliest where its log-prob equals the largest one bit for bit."""
    prompts = [[5, 20, 31], [8, 44, 12, 60, 7]]
    ids = [prompt + greedy(reference, prompt, 20) for prompt in prompts]
    ids[1][-1] = (ids[1][-1] + 1) % 50  # one that is not
    answer = client.completions.create(model=model, prompt=ids, max_tokens=1, echo=True, logprobs=1, temperature=0)
    likeliest = []
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        found = choice.logprobs
        pairs = zip(found.token_logprobs[len(prompt) :], found.top_logprobs[len(prompt) :], strict=True)
        likeliest.append([log_prob == max(top.values()) for log_prob, top in pairs])
    assert likeliest == [[True] * 21, [True] * 19 + [False, True]]  # the last is the new token


def test_a_chat_streams_what_it_would_answer(client, model):
    asked = {
        "model": model, "messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 24, "seed": 3,
        "temperature": 1.0,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0]
    pieces = list(client.chat.completions.create(**asked, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.message.content
    in_parts = {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "2 + 2?"}]}
    in_lines = {"role": "user", "content": "What is\n2 + 2?"}
    by_parts, by_lines = (
        client.chat.completions.create(**asked | {"messages": [one]}).choices[0].message.content
        for one in (in_parts, in_lines)
    )
    assert by_parts == by_lines
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices][-1] == whole.finish_reason


def test_a_completion_ends_where_the_template_ends_turns(client, server, model):
    """The tokenizer's EOS is another token."""
    line = "end tokens: the chat template ends a turn with '<|im_end|>' (3), no end token of the model's folder"
    assert server.log.read_text().count(line) == 1
    answer = client.completions.create(model=model, prompt=[5, 20], max_tokens=24, n=64, seed=1, logprobs=0)
    tokens = [(choice.finish_reason, choice.logprobs.tokens) for choice in answer.choices]
    ended = [(reason, of.index("<|im_end|>") + 1 - len(of)) for reason, of in tokens if "<|im_end|>" in of]
    assert ended and set(ended) == {("stop", 0)}


def test_a_policy_is_read_while_it_trains(client, server, model):
    """A named save is a model of its own, and stays what it was."""
    trained = server.train(seed=1)
    step(trained, rows(1))
    name = trained.save_weights_for_sampler(name="half").result().path
    assert name in [one.id for one in client.models.list()] and client.models.retrieve(name).id == name
    asked = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "logprobs": 1}
    of_save, of_base = (client.completions.create(model=m, **asked).choices[0] for m in (name, model))
    assert of_save.logprobs.token_logprobs != of_base.logprobs.token_logprobs
    step(trained, rows(2))
    again = client.completions.create(model=name, **asked).choices[0]
    assert (again.text, again.logprobs.token_logprobs) == (of_save.text, of_save.logprobs.token_logprobs)


def test_a_stream_ends_with_how_many_tokens_there_were(client, model):
    asked = {"model": model, "prompt": [[5, 6], [7, 8, 9]], "max_tokens": 4, "seed": 1, "n": 2}
    whole = client.completions.create(**asked).usage
    *pieces, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert not last.choices and last.usage == whole and whole.prompt_tokens == 5
    assert all(piece.usage is None for piece in pieces)
    assert client.completions.create(**asked, stream=True).__next__().usage is None


def test_mistakes_are_told(client, model):
    with pytest.raises(openai.NotFoundError, match="model: value .*nothing.* is not served here; give .*/v1/models"):
        client.completions.create(model="nothing", prompt="a")
    with pytest.raises(openai.BadRequestError, match="tool_choice: value"):
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "a"}], tool_choice="required")


def test_nothing_more_is_drawn_for_a_client_that_hung_up(model, tmp_path):
    """All room of the server is taken by two completions of 20,000 tokens; without their client the next has it at once."""
    model = shutil.copytree(model, tmp_path / "long")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20100}))
    model = str(model)
    with serving(tmp_path, model, "serve.max_length=20100", "serve.max_waiting=2") as server:
        auth = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for stream in (False, True):
            body = {"model": model, "prompt": [[5, 6], [7, 8]], "max_tokens": 20000, "stop": [], "stream": stream}
            line = b""
            for _ in range(20):  # the room of an answer may be given back after it has come
                connection = http.client.HTTPConnection("127.0.0.1", server.port)
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                if not stream:
                    time.sleep(1)
                    break
                line = connection.getresponse().readline()
                if line.startswith(b"data: "):
                    break
                connection.close()
                time.sleep(0.5)
            assert line.startswith(b"data: ") == stream, line
            with pytest.raises(openai.RateLimitError):
                auth.completions.create(model=model, prompt=[5, 6], max_tokens=2)
            connection.close()
            deadline, answer = time.monotonic() + 10, None
            while answer is None and time.monotonic() < deadline:
                with contextlib.suppress(openai.RateLimitError):
                    answer = auth.completions.create(model=model, prompt=[5, 6], max_tokens=2)
            assert answer is not None, (
                f"there is no room 10 s after the client of a {'stream' if stream else 'whole'} went"
            )
