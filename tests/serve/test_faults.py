"""What goes wrong between a client and the server: lost answers, malformed requests, full queues, clients that die."""

import http.client
import json
import re
import socketserver
import threading
import time

import pytest
from tinker import types

from tests.serve.serving import ADAM, ask, rows, serving, step

pytestmark = pytest.mark.slow


@pytest.fixture
def server(one):
    return one


class Losing(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A proxy of HTTP that loses every third answer: the server has done what was asked, and the client hears nothing."""

    daemon_threads, allow_reuse_address = True, True

    def __init__(self, port: int):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.to, self.count, self.lost = port, 0, 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(socketserver.StreamRequestHandler):
    def handle(self):
        first = self.rfile.readline()
        while first:
            method, path, _ = first.decode().split()
            headers = {}
            while line := self.rfile.readline().strip():
                name, _, value = line.decode().partition(": ")
                headers[name.lower()] = value
            body = self.rfile.read(int(headers.get("content-length", 0)))
            connection = http.client.HTTPConnection("127.0.0.1", self.server.to, timeout=60)
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            self.server.count += 1
            if self.server.count % 3 == 0:
                self.server.lost += 1
                return  # the connection closes without a word
            head = f"HTTP/1.1 {answer.status} x\r\ncontent-length: {len(content)}\r\n"
            head += f"content-type: {answer.headers['content-type']}\r\n\r\n"
            self.wfile.write(head.encode() + content)
            first = self.rfile.readline()


def test_lost_answers_change_nothing(server):
    proxy = Losing(server.port)
    plain, through = server.train(seed=1), server.train(url=proxy.url, seed=1)
    assert [step(through, rows(s)) for s in range(4)] == [step(plain, rows(s)) for s in range(4)]
    assert proxy.lost > 3
    proxy.shutdown()


def came_of(server, future):
    """What a promise came to, where that is JSON."""
    found = ask(server, "/api/v1/retrieve_future", {"request_id": future})[1]
    return json.loads(found) if found[:1] == b"{" else {}


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "says"),
    [
        ("/api/v1/create_session", {}, {"origin": "http://other.example"}, 403, "a browser may not ask"),
        ("/api/v1/create_session", {}, {"host": "rebound.example:80"}, 403, "a browser may not ask"),
        ("/api/v1/create_session", b"x" * (2**20 + 1), {}, 413, "more than 1048576 bytes"),
        ("/api/v1/retrieve_future", {"request_id": "gone"}, {}, 410, "there is no promise gone"),
        ("/api/v1/session_heartbeat", {"session_id": "x"}, {}, 410, "there is no session x"),
    ],
)  # fmt: skip
def test_answers_to_what_is_wrong(server, path, body, headers, status, says):
    found, answer = ask(server, path, body, **headers)
    assert found == status and says in json.loads(answer)["detail"], answer


def test_a_client_goes_on_after_its_mistakes(server):
    """Refused at once or in their turn, the calls after them do not wait for them."""
    client = server.train(seed=5)
    client.save_state("taken").result()
    for mistake, says in (
        (lambda: client.optim_step(ADAM), "optim_step: has no gradient"),
        (lambda: client.optim_step(types.AdamParams(learning_rate=-1.0)), "learning_rate: value -1.0 is out of range"),
        (lambda: client.forward_backward(rows(0), "stable_reinforce"), "use importance_sampling"),
        (lambda: client.optim_step(ADAM), r"as a forward_backward failed \(loss_fn: .*\); they are forgotten"),
        (lambda: client.save_state("taken"), "is saved already"),
    ):
        with pytest.raises(Exception, match=says):
            mistake().result(60)
    assert client.forward_backward(rows(0), "cross_entropy").result(60).metrics["loss:sum"] > 0


def test_what_cannot_be_written_ends_no_server(server):
    """As with a full disk: who asked is told, and all go on."""
    client = server.train(seed=6)
    folder = server.folder / "run" / "models" / client.get_info().model_id
    folder.mkdir(parents=True)
    for part in ("weights", "sampler_weights"):
        (folder / part).write_text("in the way")
    for save in (client.save_state, client.save_weights_for_sampler):
        with pytest.raises(Exception, match=f"{folder}.*: cannot be written .*make room there, and ask again"):
            save("a").result(60)
    assert step(client, rows(0))[1] > 0


def called(server, path, **body):
    """What a call that is promised came to."""
    return came_of(server, json.loads(ask(server, f"/api/v1/{path}", body)[1])["request_id"])


def test_one_model_of_which_all_weights_train(model, tmp_path):
    """The next one waits until the client of the last has ended; what could not be made takes no room, and what was
    held for a client goes with it."""
    with serving(tmp_path, model, full=True) as server:
        service = server.client()
        client = service.create_lora_training_client(base_model=model).result()
        id, path = client.get_info().model_id, client.save_state("a").result().path
        sample = {
            "sampling_session_id": client.save_weights_and_get_sampling_client().result()._sampling_session_id,
            "prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_params": {"max_tokens": 1},
        }  # fmt: skip
        with pytest.raises(Exception, match="is one more than the 1 that can be held at once"):
            server.train()
        service.close("success").result()
        service = server.client()
        again = service.create_training_client_from_state(path).result()
        assert step(again, rows(0))[1] > 0
        assert "is gone: newer ones took its place, its client ended" in called(server, "asample", **sample)["error"]
        service.close("success").result()
        files = (server.folder / "run" / "models" / id / "weights" / "a").rglob("*")
        max(files, key=lambda file: file.stat().st_size * file.is_file()).unlink()
        with pytest.raises(Exception, match="holds no whole checkpoint"):
            server.client().create_training_client_from_state(path).result()
        assert step(server.train(), rows(0))[1] > 0


def test_more_samples_than_wait_at_once(server, model):
    """The client is told to come again, and gets them all."""
    sampler = server.client().create_sampling_client(base_model=model)
    params = types.SamplingParams(max_tokens=2, seed=1)
    futures = [sampler.sample(types.ModelInput.from_ints([5 + i % 50]), 1, params) for i in range(150)]
    found = [future.result().sequences[0].tokens for future in futures]
    assert all(found[i] == found[i % 50] for i in range(150)) and len({tuple(one) for one in found}) > 5


def test_an_answer_does_not_wait_for_an_acknowledgement(server):
    """Of which the other side's TCP holds one back for 40 ms: the fastest of a connection's answers shows it."""
    connection, waits = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60), []
    for _ in range(20):
        began = time.perf_counter()
        connection.request("GET", "/api/v1/healthz")
        assert connection.getresponse().read()
        waits.append(time.perf_counter() - began)
    assert min(waits[1:]) < 0.03


def test_what_a_dead_client_held_is_freed(model, tmp_path):
    with serving(tmp_path, model, "serve.silent_s=1") as server:
        status, answer = ask(server, "/api/v1/create_session", {"sdk_version": "0.38.0"})
        session = json.loads(answer)["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": model, "lora_config": {"rank": 2}}
        future = json.loads(ask(server, "/api/v1/create_model", body)[1])
        ask(server, "/api/v1/retrieve_future", {"request_id": future["request_id"]})
        deadline = time.monotonic() + 120
        while True:
            status, answer = ask(server, "/api/v1/optim_step", {"model_id": future["model_id"], "seq_id": 9})
            if status == 400 and re.search("is gone: .*its client was gone for long", answer.decode()):
                break
            assert time.monotonic() < deadline, answer
            time.sleep(0.2)


def test_clients_are_told_what_a_body_may_hold(server):
    status, body = ask(server, "/api/v1/client/config", {})
    assert (status, json.loads(body)["fwdbwd_max_chunk_bytes_count"]) == (200, 2**19), (
        "half of the megabyte that it takes here"
    )
