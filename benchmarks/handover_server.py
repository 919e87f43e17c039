"""The vLLM server of handover.py."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import torch
import workload
from measure import Failed, free_port

ROOT = pathlib.Path(__file__).resolve().parents[1]
START_S = 600.0  # longest wait for the server
KV_MB = 256


@contextlib.contextmanager
def serving(root: pathlib.Path, options: argparse.Namespace, *flags: str) -> Iterator[tuple[str, int]]:
    """(url, process id) of a vLLM server of the model, which ends with the block. flags: vLLM's, beside those of all."""
    python = options.vllm_venv.absolute() / "bin" / "python"
    port, log = free_port(), root / "server.log"
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(root / "model"), "--dtype", options.dtype,
        "--enforce-eager", "--host", "127.0.0.1", "--port", port,
        "--max-model-len", str(workload.ROW), "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(KV_MB << 20),
        "--worker-extension-cls", "benchmarks.worker_handover_vllm.Worker", "--weight-transfer-config", '{"backend": "mrl"}',
        *flags,
    ]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }  # fmt: skip
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over --kv-cache-memory-bytes
    if options.device == "cuda":
        command += ["--gpu-memory-utilization", "0.4"]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(server_gpus())
    with log.open("w") as out:
        server = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, cwd=root, start_new_session=True
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not answers(url):
            if server.poll() is not None or time.monotonic() > deadline:
                print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
                raise Failed("the server did not start; what it said is above")
            time.sleep(0.5)
        yield url, server.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


class Server:
    """A vLLM server of root's model: started where the first path needs it, and anew after one failed.

    The old one may wait for the rest of what that path sent, or hold weights that nobody knows.
    """

    def __init__(self, root: pathlib.Path, options: argparse.Namespace, *flags: str) -> None:
        self._root, self._options, self._flags = root, options, flags
        self._running = contextlib.ExitStack()
        self._at: tuple[str, int] | None = None

    def at(self) -> tuple[str, int]:
        """(url, process id). Raises Failed where it does not start."""
        if self._at is None:
            self._at = self._running.enter_context(serving(self._root, self._options, *self._flags))
        return self._at

    def end_after_failure(self) -> None:
        if self._at is not None:
            print((self._root / "server.log").read_text(errors="replace")[-4000:], file=sys.stderr)
        self.close()

    def close(self) -> None:
        self._at = None
        self._running.close()


def server_gpus() -> list[str]:
    """Returns the GPUs of the server, the trainer's last: it computes on another one where there is one."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    return [*gpus[1:2], gpus[0]]


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return True
