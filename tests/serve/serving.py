"""`mrl serve` in a process of its own, and the unmodified `tinker` client that talks to it.

A server is a fork of a process that has imported everything, and so are its ranks (tests/forks.py). test_command.py starts one as a user
does.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

os.environ["TINKER_TELEMETRY"] = "0"  # it would ask the server once more, at the end

import tinker  # noqa: E402
from tinker import types  # noqa: E402

from tests.data.tiny_tokenizers import make_tokenizer  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.forks import Forked, forks  # noqa: E402

KEY = "tml-tests"
RANK = 8
ADAM = types.AdamParams(learning_rate=1e-2)
LAYOUTS = {
    "one": (1, ()),
    "tp2": (2, ("engine.parallel.tp=2",)),
    "pp2": (2, ("engine.parallel.pp=2",)),
    "dp2": (2, ()),
    "fsdp2": (2, ("engine.backend=fsdp",)),
}
"""Name -> (processes, overrides of the config)."""


def make_model(folder: pathlib.Path) -> str:
    """A tiny Qwen3 with a tokenizer, in a folder whose path has not two slashes: the client would cut such a name."""
    tokenizer = make_tokenizer()
    path = tiny.make_model(str(folder), "qwen3", layers=4, vocab=len(tokenizer) + 3)
    tokenizer.save_pretrained(path)
    return path


class Serving:
    """One server at a time, on one directory and port."""

    def __init__(
        self, folder: pathlib.Path, model: str, *overrides: str, nproc: int = 1, full: bool = False,
        key: str | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.model, self.nproc = folder, model, nproc
        self.environment = os.environ | ({} if key is None else {"MRL_SERVE_KEY": key})
        lora = None if full else {"rank": RANK}
        config = {
            "output_dir": str(folder / "run"), "model": {"path": model, "dtype": "float32", "lora": lora},
            "engine": {"device": "cpu"}, "serve": {"max_length": 64, "port": 0}, "log": {"console": "plain"},
        }  # fmt: skip
        (folder / "serve.yaml").write_text(yaml.safe_dump(config))
        self.overrides = list(overrides)
        self.log, self.port = folder / "serve.log", 0
        self.process: Forked | None = None

    def start(self) -> None:
        """Returns when it listens; on the port that it had before."""
        self.log.write_text("")
        words = ["serve", "serve.yaml", "--port", str(self.port), "--nproc", str(self.nproc), *self.overrides]
        self.process = forks().start(self.folder, self.log, self.environment, words)
        deadline = time.monotonic() + 300
        while not (found := re.search(r"TINKER_BASE_URL=http://127.0.0.1:(\d+)", self.log.read_text())):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
        self.port = int(found[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal, to a killed one's ranks too, and returns the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(300)

    def client(self, url: str | None = None) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=url or self.url, api_key=KEY)

    def train(self, url: str | None = None, **options: Any) -> tinker.TrainingClient:
        """A training client of a new model."""
        made = self.client(url).create_lora_training_client(base_model=self.model, **{"rank": 4, **options})
        return made.result() if hasattr(made, "result") else made  # a client of before 0.38 returns no future


@contextlib.contextmanager
def serving(folder: pathlib.Path, model: str, *overrides: str, **options: Any) -> Iterator[Serving]:
    server = Serving(folder, model, *overrides, **options)
    try:
        server.start()
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.process.terminate()
            server.process.wait(60)


def tensor(values: Any, dtype: str = "float32") -> types.TensorData:
    import numpy as np

    array = np.array(values)
    return types.TensorData(data=array.flatten().tolist(), dtype=dtype, shape=list(array.shape))


def datum(ids: Sequence[int], **inputs: Sequence[float]) -> types.Datum:
    """The ids of a sequence, shifted as a client shifts them. inputs: name -> a value for each of its targets."""
    fields = {name: tensor(values) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(ids[:-1])),
        loss_fn_inputs={"target_tokens": tensor(list(ids[1:]), "int64"), **fields},
    )


def rows(seed: int, count: int = 5, vocab: int = 100) -> list[types.Datum]:
    """Sequences of unequal length with fractional and negative weights."""
    import random

    rng = random.Random(seed)
    found = []
    for _ in range(count):
        ids = [rng.randrange(3, vocab) for _ in range(rng.randint(2, 12))]
        found.append(datum(ids, weights=[rng.choice([0.0, 0.5, 1.0, -0.25]) for _ in ids[1:]]))
    return found


def step(client: tinker.TrainingClient, data: list[types.Datum], loss: str = "cross_entropy", **options: Any) -> tuple:
    """One step, both calls on their way at once. Returns (loss, gradient norm)."""
    passed = client.forward_backward(data, loss, **options)
    stepped = client.optim_step(ADAM)
    return passed.result().metrics["loss:sum"], stepped.result().metrics["grad_norm"]


def weights(server: Serving, client: tinker.TrainingClient, name: str) -> dict[str, Any]:
    """The adapter of a model, as peft's file has it."""
    from safetensors.torch import load_file

    client.save_weights_for_sampler(name=name).result()
    return load_file(folder_of(server, client, "sampler_weights", name) / "adapter_model.safetensors")


def folder_of(server: Serving, client: tinker.TrainingClient, part: str, name: str) -> pathlib.Path:
    return server.folder / "run" / "models" / client.get_info().model_id / part / name


def ask(
    server: Serving, path: str, body: bytes | dict = b"", method: str = "POST", **headers: str
) -> tuple[int, bytes]:
    """(status, body) of a request that no client sends."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    connection.request(method, path, data, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()
