"""Records what a real vLLM server answers, for test_servers.py: `python -m tests.rollout.record` writes traffic/vllm.json.

It starts a server of its own (see test_vllm.py for where vLLM comes from).
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

from mrl.engine.sampling import SamplingKey, SamplingParams
from mrl.errors import ServerError
from mrl.rollout.base import SampleRequest
from mrl.rollout.http import HttpClient
from mrl.rollout.vllm import VLLMServer
from tests.rollout.real_vllm import RealServer, make_model

FILE = pathlib.Path(__file__).parent / "traffic" / "vllm.json"
SCORED = [5, 9, 40, 41]


def asked() -> list[SampleRequest]:
    """What was recorded: three prompts of two samples."""
    return [
        SampleRequest([5 + p, 40, 9 + p], 4, SamplingParams(), SamplingKey(7, 1, p, s), stop_tokens=(2,))
        for p in range(3)
        for s in range(2)
    ]


OUT_OF_VOCABULARY = SampleRequest([5, 7000], 4, SamplingParams(), SamplingKey(), stop_tokens=(2,))


class Recorder(HttpClient):
    def __init__(self, url: str) -> None:
        super().__init__(url, timeout_s=60)
        self.exchanges: list[dict[str, Any]] = []

    def _send(self, method: str, path: str, body: Any) -> tuple[int, str]:
        status, text = super()._send(method, path, body)
        answer = json.loads(text)
        if path.startswith("/server_info"):  # the rest tells about the machine
            config = answer["vllm_config"]["model_config"]
            kept = {k: config[k] for k in ("dtype", "max_model_len", "logprobs_mode", "enable_sleep_mode")}
            answer = {"vllm_config": {"model_config": kept}}
        self.exchanges.append({"method": method, "path": path, "body": body, "status": status, "answer": answer})
        return status, text


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        model = make_model(str(root / "model"), 0)
        server = RealServer(model, root / "log")
        try:
            server.wait()
            http = Recorder(server.url)
            http.get("/version")
            talk(VLLMServer(http), model)
        finally:
            server.kill()
        text = json.dumps(http.exchanges, indent=1).replace(str(root), "/models")
    FILE.write_text(text + "\n", encoding="utf-8")


def talk(client: VLLMServer, model: str) -> None:
    client.inspect(sleeps=False)
    for request in asked():
        client.complete(request)
    client.score(SCORED)
    client.pause()
    for path in ("/nowhere", model):
        try:
            client.load(path, "00000001-abcdef01")
        except ServerError:
            assert path == "/nowhere"
    client.resume()
    try:
        client.complete(OUT_OF_VOCABULARY)
    except ServerError as error:
        assert error.status == 400


if __name__ == "__main__":
    main()
