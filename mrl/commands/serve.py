"""`mrl serve`: training over HTTP."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.config.command import (
    Part,
    Phase,
    Phases,
    RowsRunConfig,
    TrainingCommand,
    describe_layout,
    describe_micro_batch,
)
from mrl.config.schema import OptimizerConfig
from mrl.config.serve import ServeConfig, check_serve
from mrl.errors import ConfigError, UserError
from mrl.parallel import ParallelDims


class Serve(TrainingCommand[ServeConfig]):
    name = "serve"
    help = """Train and sample over HTTP, with the `tinker` client: the loop runs there, the model here.

    The YAML file CONFIG names the base model, its adapters and the layout. KEY=VALUE sets any config key; `mrl config
    serve` lists them. Where others than this machine can ask (--host), the variable MRL_SERVE_KEY has the key that they
    send.
    """
    examples = """
        mrl serve serve.yaml
        mrl serve serve.yaml --port 8001 engine.parallel.tp=2 --nproc 2
        mrl serve serve.yaml --host 0.0.0.0
        mrl serve serve.yaml --dry-run"""
    root = ServeConfig
    trainer = "mrl.serve.server:run"
    order = 3
    generates = True
    options = {"--host": "serve.host", "--port": "serve.port"}

    def check(self, config: ServeConfig) -> None:
        check_serve(config)

    def check_files(self, config: ServeConfig) -> None:
        from mrl.launch.preflight import read_model_config

        for package in ("starlette", "uvicorn", "google.protobuf"):
            if importlib.util.find_spec(package.partition(".")[0]) is None:
                raise UserError(
                    "mrl serve", why=f"needs the package {package}", fix="pip install starlette uvicorn protobuf"
                )
        check_positions(config, read_model_config(config.model, "model"))

    def on_rows(self, config: ServeConfig) -> RowsRunConfig | None:
        return None

    def packing(self, config: ServeConfig) -> bool:
        return config.serve.packing

    def parts(self, config: ServeConfig) -> list[Part]:
        return [Part("", config.model, config.engine, optimizer=OptimizerConfig())]

    def longest(self, config: ServeConfig) -> tuple[int, str]:
        return config.serve.max_length, "serve.max_length"

    def smallest_batch(self, config: ServeConfig, role: str) -> tuple[str, int]:
        return "serve.max_waiting", config.serve.max_waiting  # a replica may have nothing to do

    def describe(self, config: ServeConfig, parts: Sequence[Part], layouts: Sequence[ParallelDims]) -> list[str]:
        [dims], lora = layouts, config.model.lora
        models = "one model, of which all weights train" if lora is None else f"adapters of rank 1 to {lora.rank}"
        return [
            f"layout: {describe_layout(dims)}",
            f"micro-batch: {describe_micro_batch(config.engine, config.serve.max_length)}",
            f"models: {models}",
        ]

    def phases(self, config: ServeConfig) -> Phases:
        room: dict[str, Any] = {
            "cache_tokens": config.serve.cache_tokens,
            "prefill_tokens": config.serve.prefill_tokens,
        }
        return Phases((Phase("sampling", "", "sample", 1, **room), Phase("update of the model", "", "train", 1)))


def check_positions(config: ServeConfig, hf_config: Mapping[str, Any]) -> None:
    """Raises ConfigError for sequences that are longer than the model of a config.json has positions."""
    from mrl.inference.places import limit_of  # it imports torch

    limit, limited_by = limit_of(hf_config)
    if limit is not None and config.serve.max_length > limit:
        why = f"is above {limited_by}"
        raise ConfigError("serve.max_length", config.serve.max_length, why, f"give at most {limit}")


COMMAND = Serve()
