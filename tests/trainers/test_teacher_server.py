"""A teacher on a server. In `make test` a server of the tests' own that answers in vLLM's form, from transformers; in the
slow tier `mrl serve` itself (and, in tests/rollout/test_vllm.py, vLLM)."""

from __future__ import annotations

import contextlib
import http.server
import json
import pathlib
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl.batch import make_batch
from mrl.config.schema import TeacherServerConfig
from mrl.errors import ConfigError, ServerError
from mrl.roles.frozen import TeacherServer
from tests.engine.harness import run_case
from tests.serve.serving import serving
from tests.trainers import test_distill

MOST = 20  # log-probs of a token that vLLM gives by default


class Handler(http.server.BaseHTTPRequestHandler):
    """`/v1/models` and `prompt_logprobs`, in the form of tests/rollout/traffic/vllm.json."""

    def do_GET(self) -> None:
        if self.server.secret and self.headers["Authorization"] != f"Bearer {self.server.secret}":
            self.answer(401, {"error": {"message": f"{self.headers['Authorization']} is not the key"}})
            return
        self.answer(200, {"data": [{"id": name} for name in self.server.names]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, count = body["prompt"], body["prompt_logprobs"]
        if isinstance(ids, str):
            ids = self.server.tokenizer(ids, add_special_tokens=body.get("add_special_tokens", True))["input_ids"]
            self.answer(
                200, {"choices": [{"prompt_logprobs": [None, *({str(i): {"logprob": -1.0}} for i in ids[1:])]}]}
            )
            return
        with self.server.lock:
            self.server.asked.append(body["model"])
            self.server.left -= 1
            dies = self.server.left < 0
            self.server.under_way += 1
            self.server.at_once = max(self.server.at_once, self.server.under_way)
        self.server.together.wait(timeout=20)
        with self.server.lock:
            self.server.under_way -= 1
        if dies:
            self.answer(400, {"error": {"message": "no memory left"}})
            return
        if count > MOST:
            self.answer(400, {"error": {"message": f"Requested prompt logprobs of {count}, which is greater than max"}})
            return
        with torch.no_grad():
            log_probs = self.server.hf(torch.tensor([ids])).logits[0].log_softmax(-1)
        found: list[Any] = [None]
        for token, of_place in zip(ids[1:], log_probs, strict=False):
            values, likeliest = of_place.topk(count)
            every = {token: float(of_place[token]), **dict(zip(likeliest.tolist(), values.tolist(), strict=True))}
            ranks = {str(i): int((of_place > value).sum()) + 1 for i, value in every.items()}
            found.append(
                {str(i): {"logprob": v, "rank": ranks[str(i)], "decoded_token": "x"} for i, v in every.items()}
            )
        self.answer(200, {"choices": [{"text": "y", "prompt_logprobs": found}]})

    def answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


places = test_distill.places


@contextlib.contextmanager
def answering(folder: pathlib.Path) -> Iterator[http.server.ThreadingHTTPServer]:
    """Yields a server of the model in a folder, which tests may hold up, count the requests of, or let fail."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        server.tokenizer = AutoTokenizer.from_pretrained(folder)
        server.names, server.asked, server.lock = ["tiny"], [], threading.Lock()
        server.at_once, server.under_way, server.secret, server.left = 0, 0, "", 10**6
        server.together = threading.Event()  # until it is set nothing is answered
        server.together.set()
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.together.set()
            server.shutdown()


@pytest.fixture
def server(places):
    with answering(places / "teacher") as server:
        yield server


def batch():
    return make_batch([[5, 9, 4, 7], [3, 8, 6], [2, 2]], [[0, 0, 1, 1], [0, 1, 1], [0, 1]])


def expected(server, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = []
    for ids, places_of in (([5, 9, 4, 7], (1, 2)), ([3, 8, 6], (0, 1)), ([2, 2], (0,))):
        with torch.no_grad():
            rows += server.hf(torch.tensor([ids])).logits[0].log_softmax(-1)[list(places_of)]
    values, ids = torch.stack(rows).topk(count)
    return ids, values


def test_the_likeliest_tokens_after_each_trained_place(server):
    """In the batch's order, though requests are answered in any; a token that is told beside them is not one of them."""
    client = TeacherServer(TeacherServerConfig(url=server.url, concurrency=3))
    server.together.clear()
    threading.Timer(0.3, server.together.set).start()
    ids, values = client.top_and_labels(batch(), 2)[:2]
    of_hf, values_of_hf = expected(server, 2)
    assert ids.tolist() == of_hf.tolist() and ids.dtype == torch.int32
    torch.testing.assert_close(values, values_of_hf)
    assert server.asked == ["tiny"] * 3 and server.at_once == 3
    server.at_once = 0
    TeacherServer(TeacherServerConfig(url=server.url, concurrency=1)).top_and_labels(batch(), 2)
    assert server.at_once == 1


def test_what_is_wrong_with_a_server_is_one_line(server):
    server.names = ["one", "two"]
    with pytest.raises(ConfigError) as caught:
        TeacherServer(TeacherServerConfig(url=server.url)).name  # noqa: B018
    says = "teacher.server.name: value null leaves open which model is asked; give one of one, two"
    assert str(caught.value) == says
    with pytest.raises(ConfigError, match="is not served there; give one of one, two"):
        TeacherServer(TeacherServerConfig(url=server.url, name="three")).name  # noqa: B018
    two = TeacherServer(TeacherServerConfig(url=server.url, name="two"))
    assert two.name == "two"
    with pytest.raises(ServerError, match="HTTP 400: .*greater than max"):
        two.top_and_labels(batch(), MOST + 1)[:2]
    server.together.clear()
    slow = TeacherServer(TeacherServerConfig(url=server.url, name="two", timeout_s=0.3))
    with pytest.raises(ServerError, match=r"gave no answer in 0.3 s; raise teacher\.server\.timeout_s"):
        slow.top_and_labels(batch(), 2)[:2]
    server.together.set()


def test_a_key_is_read_from_the_environment_and_told_nobody(places, tmp_path, server, monkeypatch):
    """Neither config.yaml nor a message has it, though the server tells it."""
    server.secret = "sk-right"
    served = TeacherServerConfig(url=server.url, key_variable="TEACHER_KEY")
    with pytest.raises(ConfigError) as missing:
        TeacherServer(served).name  # noqa: B018
    assert str(missing.value).startswith('teacher.server.key_variable: value "TEACHER_KEY" names no variable of')
    monkeypatch.setenv("TEACHER_KEY", "sk-wrong")
    with pytest.raises(ServerError, match="HTTP 401") as refused:
        TeacherServer(served).name  # noqa: B018
    assert "sk-wrong" not in str(refused.value)
    monkeypatch.setenv("TEACHER_KEY", "sk-right\nsk-é")
    with pytest.raises(
        ConfigError, match=r'value "TEACHER_KEY" names no .* of printable ASCII; set the variable[^\n]*$'
    ):
        TeacherServer(served).name  # noqa: B018
    monkeypatch.setenv("TEACHER_KEY", "sk-right\n")
    assert TeacherServer(served).name == "tiny"


@pytest.mark.parametrize("change", ["ids", "a token", "a special token"])
def test_a_server_with_another_tokenizer_is_refused(places, server, change):
    """One that gives two digits each other's ids, and those that have a token more or less. None is asked for a BOS."""
    own, there = (AutoTokenizer.from_pretrained(places / "teacher") for _ in range(2))
    server.tokenizer = there
    client = TeacherServer(TeacherServerConfig(url=server.url))
    client.check_tokenizer(own)
    if change == "a special token":
        own.add_special_tokens({"eos_token": "<|end|>"})
        differs = "'a <|end|> a'"
    elif change == "a token":
        there.add_tokens(["quick"])
        differs = "'\\nThe quick brown fox'"
    else:
        content = json.loads(there.backend_tokenizer.to_str())
        vocabulary = content["model"]["vocab"]
        vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
        there._tokenizer = type(there.backend_tokenizer).from_str(json.dumps(content))
        differs = "'\\n0123456789 1,000.5'"
    with pytest.raises(ConfigError) as caught:
        client.check_tokenizer(own)
    says = f"teacher.server.url: value '{server.url}' has another tokenizer: {differs} has other ids there than by teacher.model.path; "
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value), str(caught.value)


def losses_by(places, folder, url: str, world: int = 1, **teacher: Any) -> list[float]:
    keys = {"server": {"url": url}, "top_k": 5, **teacher}
    config = test_distill.make_config(places, folder, teacher=keys, data={"eval": str(places / "eval.jsonl")})
    assert run_case(world, test_distill.CASE, config=config)[:2] == ("done", "")
    return test_distill.numbers(folder)


def test_a_run_by_a_server_is_the_run_by_an_engine(places, tmp_path, server):
    """The two round apart; once what the server said is kept, it is asked no more."""
    own = test_distill.oracle(places, {"loss": "reverse_kl", "top_k": 5})
    live = losses_by(places, tmp_path / "live", server.url, loss="reverse_kl")
    assert live == pytest.approx(own, rel=2e-5)
    asked = len(server.asked)
    assert losses_by(places, tmp_path / "kept", server.url, loss="reverse_kl", cache=True) == live
    rows = test_distill.ROWS + test_distill.tiny_runs.EVAL_ROWS
    assert len(server.asked) == asked + rows


@pytest.mark.slow
def test_a_run_whose_server_dies_saves_what_it_trained(places, tmp_path, server):
    """In a step, and in the evaluation after one: started again it has the losses of a run whose server was there."""
    keys = {"server": {"url": server.url}, "top_k": 5}
    more = {"data": {"eval": str(places / "eval.jsonl"), "shuffle": True}, "train": {"steps": 3, "eval_every": 2}}
    whole, broken = (test_distill.make_config(places, tmp_path / run, teacher=keys, **more) for run in ("whole", "run"))
    assert run_case(1, test_distill.CASE, config=whole)[:2] == ("done", "")
    held_out = len((places / "eval.jsonl").read_text().splitlines())
    server.left = held_out + test_distill.BATCH + 1  # of the second step one row is answered
    for of, left in (("1", 1), ("1", 2 * test_distill.BATCH + 1), ("2", 10**6)):  # step 1 is saved over itself
        ended, said = run_case(1, test_distill.CASE, config=broken)[:2]
        assert ended == "ServerError" and "HTTP 400: no memory left" in said and "\n" not in said
        saved = tmp_path / "run" / "checkpoints" / f"step_0000000{of}"
        assert said.endswith(f"; steps 1 to {of} are saved in {saved}"), said
        logged, rows = (test_distill.tiny_runs.steps(tmp_path / run)[1:] for run in ("run", "whole"))
        assert [row["train/loss"] for row in logged] == [row["train/loss"] for row in rows[: int(of)]]
        server.left = left
    assert run_case(1, test_distill.CASE, config=broken)[:2] == ("done", "")
    assert test_distill.tiny_runs.steps(tmp_path / "run") == test_distill.tiny_runs.steps(tmp_path / "whole")


@pytest.mark.slow
def test_mrl_serve_is_a_teacher(places, tmp_path):
    """On loopback; of two ranks the main process alone asks."""
    own = test_distill.oracle(places, {"loss": "forward_kl", "top_k": 5})
    shutil.copytree(places / "teacher", tmp_path / "served")
    with serving(tmp_path, str(tmp_path / "served")) as served:
        found = losses_by(places, tmp_path / "by", f"http://127.0.0.1:{served.port}", world=2)
    assert found == pytest.approx(own, rel=2e-5)
