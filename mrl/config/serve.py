"""Every key of `mrl serve`: one model that clients train over HTTP."""

from __future__ import annotations

import dataclasses
from typing import Literal

from mrl.config.schema import MAX_DEGREE, MAX_SECONDS, REQUIRED, EngineConfig, LogConfig, ModelConfig, key


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServersConfig:
    kind: Literal["vllm", "sglang"] | None = key(
        None, "kind of the servers that draw samples; null draws them with the model's own engine"
    )
    urls: tuple[str, ...] = key((), "servers, as http://host:8000, that see output_dir under the same path")
    concurrency: int = key(128, "requests at a time at each server", minimum=1, maximum=MAX_DEGREE)
    timeout_s: float = key(600.0, "longest wait for an answer", above=0, maximum=MAX_SECONDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeKeys:
    host: str = key("127.0.0.1", "address to listen on; one that others reach needs a key in MRL_SERVE_KEY")
    port: int = key(8000, "port to listen on; 0 takes a free one", minimum=0, maximum=65535)
    name: str | None = key(None, "name of the model for clients; null is model.path as written")
    max_length: int = key(4096, "longest sequence in tokens: a datum, or a prompt with its completion", minimum=2)
    packing: bool = key(True, "pack sequences end to end without padding; false pads")
    max_models: int = key(64, "models that train at once; waiting ones are in host memory. More are refused", minimum=1)
    max_waiting: int = key(
        2000, "samples and model calls that wait at once; above it clients are told to retry", minimum=1
    )
    max_body_mb: int = key(64, "longest body of a request, in megabytes", minimum=1, maximum=2048)
    silent_s: float = key(
        600.0, "a client that is silent for this long loses its models, except what was saved", above=0
    )
    guards: bool = key(
        True, "check at each model's first step that gradients exist and are finite, and that replicas agree"
    )
    snapshots: int = key(4, "newest unnamed snapshots that are kept for each model", minimum=1)
    cache_tokens: int = key(65536, "tokens in the KV cache of a replica of the model while it samples", minimum=1)
    prefill_tokens: int = key(4096, "most prompt tokens in one forward", minimum=1)
    servers: ServersConfig = key(
        ServersConfig, "inference servers that draw samples while models train, with model.lora (docs/serve.md)"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    output_dir: str = key("runs/serve", "the server's directory, with all that is saved", may_change=True)
    seed: int = key(0, "seed of dropout", minimum=0, maximum=2**32 - 1)
    model: ModelConfig = key(
        REQUIRED, "the base model. With model.lora clients train adapters over it, else all its weights"
    )
    engine: EngineConfig = key(EngineConfig, "the engine and its layout")
    serve: ServeKeys = key(ServeKeys, "the server", may_change=True)
    log: LogConfig = key(LogConfig, "what is shown", may_change=True)
