"""The command that starts an inference server for `mrl ppo` on a node of its own (docs/rollout-servers.md)."""

from __future__ import annotations

import shlex

from mrl.config.command import Server
from mrl.launch.slurm.options import SlurmConfig


def server_command(server: Server, options: SlurmConfig) -> str:
    """Returns shell lines that become one server, on all GPUs of its node."""
    servers = options.servers
    gpus = options.servers_gpus
    model, length = server.model, server.max_length
    if server.kind == "sglang":
        words = ["sglang.launch_server", "--model-path", model.path, "--context-length", str(length)]
        words += ["--enable-deterministic-inference", *(["--tp-size", str(gpus)] if gpus > 1 else [])]
    else:
        log_probs = "raw_logprobs" if server.temperature == 1 else "processed_logprobs"
        words = ["vllm.entrypoints.openai.api_server", "--model", model.path, "--max-model-len", str(length)]
        words += ["--logprobs-mode", log_probs, *(["--tensor-parallel-size", str(gpus)] if gpus > 1 else [])]
    words += ["--dtype", model.dtype, "--host", "0.0.0.0"]
    switch = "export VLLM_SERVER_DEV_MODE=1\n" if server.kind == "vllm" else ""
    start = f'{shlex.join([servers.python, "-m", *words])} --port "$MRL_SERVER_PORT"'
    return f"{switch}exec {' '.join([start, *map(shlex.quote, servers.arguments)])}"
