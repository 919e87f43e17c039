"""A teacher on a server. In `make test` a server of the tests' own that answers in vLLM's form, from transformers; in the
slow tier `mrl serve` itself (and, in tests/rollout/test_vllm.py, vLLM)."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.batch import make_batch
from mrl.config.schema import TeacherServerConfig
from mrl.errors import ConfigError, ServerError
from mrl.trainers.teacher_server import TeacherServer
from tests.engine.harness import run_case
from tests.serve.serving import serving
from tests.trainers import test_distill

MOST = 20  # log-probs of a token that vLLM gives by default


class Handler(http.server.BaseHTTPRequestHandler):
    """`/v1/models` and `prompt_logprobs`, in the form of tests/rollout/traffic/vllm.json."""

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": name} for name in self.server.names]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, count = body["prompt"], body["prompt_logprobs"]
        with self.server.lock:
            self.server.asked.append(body["model"])
            self.server.under_way += 1
            self.server.at_once = max(self.server.at_once, self.server.under_way)
        self.server.together.wait(timeout=20)
        with self.server.lock:
            self.server.under_way -= 1
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


@pytest.fixture
def server(places):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hf = AutoModelForCausalLM.from_pretrained(places / "teacher", dtype=torch.float32)
    server.names, server.asked, server.lock = ["tiny"], [], threading.Lock()
    server.at_once = server.under_way = 0
    server.together = threading.Event()  # until it is set nothing is answered
    server.together.set()
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.together.set()
    server.shutdown()
    server.server_close()


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
    ids, values = client.top(batch(), 2)
    of_hf, values_of_hf = expected(server, 2)
    assert ids.tolist() == of_hf.tolist() and ids.dtype == torch.int32
    torch.testing.assert_close(values, values_of_hf)
    assert server.asked == ["tiny"] * 3 and server.at_once == 3


def test_concurrency_bounds_the_requests_under_way(server):
    client = TeacherServer(TeacherServerConfig(url=server.url, concurrency=1))
    client.top(batch(), 2)
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
        two.top(batch(), MOST + 1)
    server.together.clear()
    slow = TeacherServer(TeacherServerConfig(url=server.url, name="two", timeout_s=0.3))
    with pytest.raises(ServerError, match=r"gave no answer in 0.3 s; raise teacher\.server\.timeout_s"):
        slow.top(batch(), 2)
    server.together.set()
    with pytest.raises(ConfigError, match=r"teacher\.server\.url: value .* is not a server"):
        TeacherServer(TeacherServerConfig(url="http://"))


def losses_by(places, folder, url: str, world: int = 1, **teacher: Any) -> list[float]:
    keys = {"server": {"url": url}, "top_k": 5, **teacher}
    config = test_distill.make_config(places, folder, teacher=keys, data={"eval": str(places / "eval.jsonl")})
    assert run_case(world, test_distill.CASE, config=config)[:2] == ("done", "")
    return test_distill.losses(folder)


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
@pytest.mark.parametrize("world", [1, 2])
def test_mrl_serve_is_a_teacher(places, tmp_path, world):
    """On loopback, on two ranks the main process alone asks."""
    own = test_distill.oracle(places, {"loss": "forward_kl", "top_k": 5})
    shutil.copytree(places / "teacher", tmp_path / "served")
    with serving(tmp_path, str(tmp_path / "served")) as served:
        found = losses_by(places, tmp_path / "by", f"http://127.0.0.1:{served.port}", world)
    assert found == pytest.approx(own, rel=2e-5)
