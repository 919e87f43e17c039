"""Real vLLM servers on the CPU, and the cases that test_vllm.py runs in worlds of mrl's engines against them."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed import distributed_c10d
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from mrl.batch import make_batch
from mrl.config.ppo import ServerConfig
from mrl.config.schema import RoleConfig
from mrl.engine.base import Completion
from mrl.engine.registry import build_engine
from mrl.engine.sampling import GREEDY, SamplingKey, SamplingParams
from mrl.rollout.adapters import AdapterTraining
from mrl.rollout.base import SampleRequest
from mrl.rollout.fleet import Probe
from mrl.rollout.vllm import VLLMServerSampler
from mrl.weights.safetensors_io import SafetensorsReader
from tests.engine import tiny
from tests.engine.contract import loss_fn, train
from tests.engine.harness import close_worlds

ROOT = pathlib.Path(__file__).resolve().parents[2]
VENV = pathlib.Path(os.environ.get("MRL_TEST_VLLM_VENV", ROOT / ".venv-vllm"))
"""Where vLLM is installed: `make vllm-venv` makes it."""

CPU = torch.device("cpu")
MAX_LENGTH = 512
TEXT = [5, 9, 40, 41, 77, 12]
FIRST_REQUEST_S = 600
"""Longest wait for a case: a server's first requests compile, which took 65 s beside other work, and more on a busier machine."""

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # the first request would compile for 13 s
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # each server's worker would be on the machine's first core, and wait there
}  # fmt: skip


SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"intermediate_size": 256},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
"""Of the families that are served. vLLM's experts on a CPU take hidden sizes that are multiples of 32 alone."""


def make_model(
    folder: str, seed: int, *, tied: bool = False, family: str = "qwen3", dtype: torch.dtype = torch.float32
) -> str:
    """A random Qwen3 of two megabytes, so that a hand-over has buckets, and a tokenizer of one word per token."""
    tiny.make_model(
        folder, family, seed=seed, head_dim=32, hidden_size=128, initializer_range=0.06,
        max_position_embeddings=MAX_LENGTH, tied=tied, **SIZES[family],
    )  # fmt: skip
    if dtype != torch.float32:
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, tiny.VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    return folder


KV_BYTES = 128 << 20
"""Of a server's KV cache: 64 sequences of MAX_LENGTH tokens take a quarter of it. Two files of tests have two servers each at once."""

LINKED = (
    "--worker-extension-cls", "tests.rollout.noting_worker.Worker", "--weight-transfer-config", '{"backend": "mrl"}',
)  # fmt: skip
"""Flags of a server that takes weights by broadcast and ipc."""


class RealServer:
    """A process that serves `model`; `flags` are vLLM's, `variables` of its environment."""

    def __init__(self, model: str, log: pathlib.Path, *flags: str, **variables: str) -> None:
        python = VENV / "bin" / "python"
        assert python.exists(), (
            f"no vLLM in {VENV}: run `make vllm-venv`, or set MRL_TEST_VLLM_VENV to a venv that has it"
        )
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.url, self.log, self.model = f"http://127.0.0.1:{port}", log, model
        command = [
            str(python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            model,
            "--served-model-name",
            "tiny",
        ]
        command += ["--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port), *flags]
        command += ["--kv-cache-memory-bytes", str(KV_BYTES)]
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)} | variables
        close_worlds()  # what earlier tests left there has a GiB a rank, and a server as much
        del environment["VLLM_CPU_KVCACHE_SPACE"]  # it would win, and knows whole GiB alone, all of which vLLM writes
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=log.parent
            )

    def wait(self, seconds: float = 400.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-4000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            time.sleep(0.2)

    def running(self) -> int:
        """Returns how many requests the server draws tokens for."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running")))

    def kill(self) -> None:
        if self.process.poll() is not None:  # by itself: a test that fails for it shows what the server said
            print(f"{self.url} has ended with {self.process.returncode}:\n{self.log.read_text()[-8000:]}")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


_OF_ADAPTERS: list[RealServer] = []
ADAPTERS = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")


def adapter_server() -> RealServer:
    """A server that takes two adapters of a rank of 8 at most. The tests of a process share it (tests/conftest.py)."""
    if not _OF_ADAPTERS:
        folder = pathlib.Path(tempfile.mkdtemp())
        model = make_model(str(folder / "model"), seed=0)
        server = RealServer(model, folder / "log", *ADAPTERS, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
        _OF_ADAPTERS.append(server)
        server.wait()
    return _OF_ADAPTERS[0]


def end_adapter_server() -> None:
    for server in _OF_ADAPTERS:
        server.kill()
        shutil.rmtree(server.log.parent)
    _OF_ADAPTERS.clear()


@contextlib.contextmanager
def logs_of(servers: list[RealServer]) -> Iterator[None]:
    """Shows the end of the servers' logs where what is done here fails."""
    try:
        yield
    except AssertionError:
        for server in servers:
            print(f"--- {server.url}, alive: {server.process.poll() is None}", server.log.read_text()[-3000:], sep="\n")
        raise


def sampler_of(
    urls: list[str], weights_dir: str, *, is_main=True, on_main=lambda fn: fn(), probe=None, adapted=None,
    device=CPU, say=lambda line: None, **config,
):  # fmt: skip
    settings = ServerConfig(**{"urls": tuple(urls), "bucket_mb": 1, **config})
    return VLLMServerSampler(
        settings, is_main=is_main, on_main=on_main, weights_dir=weights_dir, max_length=MAX_LENGTH, probe=probe,
        adapted=adapted, device=device, say=say,
    )  # fmt: skip


def requests(
    sampling: SamplingParams, *, prompts: int = 3, samples: int = 2, new: int = 12, **fields
) -> list[SampleRequest]:
    return [
        SampleRequest([5 + p, 40, 9 + p][: 1 + p], new, sampling, SamplingKey(7, 1, p, s), **fields)
        for p in range(prompts)
        for s in range(samples)
    ]


def engine_log_probs(engine, asked: list[SampleRequest], completions: list[Completion]) -> list[float]:
    """Of all new tokens, by a forward of the engine at the requests' temperature."""
    whole = make_batch(
        [[*r.tokens, *c.tokens] for r, c in zip(asked, completions, strict=True)],
        [[0.0] * len(r.tokens) + [1.0] * len(c.tokens) for r, c in zip(asked, completions, strict=True)],
    )
    share = engine.shard_data(whole)
    with engine.eval_mode():
        ctx = {"temperature": asked[0].sampling.temperature or 1.0}
        predictions, _ = engine.forward_backward_step(share, ctx, forward_only=True)
    return engine.unshard_data(predictions, whole)["log_probs"].cpu()[whole.loss_mask.bool()].tolist()


def check(engine, sampler, sampling: SamplingParams) -> list[Completion]:
    asked = requests(sampling)
    completions = sampler.sample(asked)
    ours = torch.tensor([x for c in completions for x in c.log_probs])
    torch.testing.assert_close(ours, torch.tensor(engine_log_probs(engine, asked, completions)), rtol=0, atol=1e-5)
    return completions


def follows_the_actor(
    config: RoleConfig, urls: list[str], weights_dir: str, handovers: list[str], checkpoint: str
) -> tuple[list[list[Completion]], list[list[float]]]:
    """Log-probs of completions are those of the actor's weights, before and after it is trained. All ranks take part.

    It begins at `checkpoint`, where there is one, and saves what it ends with there. urls, handovers: of the raw and
    the processed server. Returns the completions, and the actor's log-probs of TEXT at the beginning and at the end.
    """
    distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=FIRST_REQUEST_S))  # the others wait for rank 0
    engine = build_engine(config)
    engine.init_model()
    if engine.on_main(lambda: os.path.exists(checkpoint)):
        engine.load_checkpoint(checkpoint)
    own, seen = functools.partial(own_log_probs, engine), []
    first = own(TEXT)
    with contextlib.ExitStack() as stack:
        for url, handover, samplings in zip(
            urls, handovers,
            ([SamplingParams(), SamplingParams(top_k=9, top_p=0.9, min_p=0.01), GREEDY],
             [SamplingParams(), SamplingParams(0.7), GREEDY]),
            strict=True,
        ):  # fmt: skip
            sampler = sampler_of(
                [url],
                f"{weights_dir}/{len(seen)}",
                is_main=engine.is_main,
                on_main=engine.on_main,
                probe=Probe(TEXT, own, 1e-5),
                handover=handover,
            )
            stack.callback(sampler.close)
            before = None
            for _ in range(2):
                sampler.update_weights(engine.hf_weights())
                before = said_as_by_the_actor(sampler, own, TEXT, before)
                seen += [check(engine, sampler, sampling) for sampling in samplings]
                engine.set_loss_fn(loss_fn)
                train(engine, 1)
    engine.save_checkpoint(checkpoint, global_step=len(seen))
    return engine_everywhere(engine, seen), [first, own(TEXT)]


def adapters_follow_the_actor(config: RoleConfig, url: str, weights_dir: str) -> None:
    """As `follows_the_actor`, of a server that holds the base and gets the adapters alone."""
    distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=FIRST_REQUEST_S))
    engine = build_engine(config)
    engine.init_model()
    own, before = functools.partial(own_log_probs, engine), None
    sampler = sampler_of(
        [url], weights_dir, is_main=engine.is_main, on_main=engine.on_main, probe=Probe(TEXT, own, 1e-5),
        adapted=AdapterTraining(config.model.path, config.model.lora),
    )  # fmt: skip
    with contextlib.closing(sampler):
        for _ in range(3):
            sampler.update_weights(engine.adapter_weights())
            before = said_as_by_the_actor(sampler, own, TEXT, before)
            for sampling in (SamplingParams(), GREEDY):
                engine_everywhere(engine, [check(engine, sampler, sampling)])
            engine.set_loss_fn(loss_fn)
            train(engine, 1)


def said_as_by_the_actor(sampler, own, text, before: list[float] | None) -> list[float]:
    """Returns the server's log-probs of a text, which are the actor's, and not those before."""
    found = sampler.log_probs(text)[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(own(text)), rtol=0, atol=1e-5)
    assert found != before
    return found


def own_log_probs(engine, tokens) -> list[float]:
    whole = make_batch([list(tokens)], [[1.0] * len(tokens)])
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(engine.shard_data(whole), forward_only=True)
    return engine.unshard_data(predictions, whole)["log_probs"].tolist()


def engine_everywhere(engine, seen: list[list[Completion]]) -> list[list[Completion]]:
    """`seen` where rank 0 has the same as this one."""
    assert engine.on_main(lambda: seen) == seen
    return seen


def hf_stream(folder: str, *, wrong_shape: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model folder. wrong_shape: a tensor that comes smaller than it is."""
    with SafetensorsReader(folder) as reader:
        for name in sorted(reader.tensors):
            tensor = reader(name)[()]
            yield name, tensor[:3] if name == wrong_shape else tensor
