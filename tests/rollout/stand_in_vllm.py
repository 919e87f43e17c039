"""A stand-in for the vllm package, for what mrl asks of it in its own process: which parts of its memory are there, by the
rules of vLLM 0.32.0's GPU worker (sleep at level 2, tags). Its completions tell which engine and weights they are of."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

FIRST = 3


class Model(torch.nn.Module):
    """Of the parameters that `names` says."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.full((2,), float("nan"))))
        self.register_buffer("rotary", torch.ones(2))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            if name == "faulty":
                raise ValueError("a tensor of a wrong shape\nsecond line")
            getattr(self, name).data.copy_(tensor)
            loaded.add(name)
        return loaded


class LLM:
    """One engine; `made` has all of them."""

    made: list[LLM] = []
    names = ["a", "b"]
    fails: str | None = None
    no_room: set[str] = set()
    keeps_cache = False

    def __init__(self, **arguments: Any) -> None:
        if self.fails is not None:
            raise ValueError(self.fails)
        self.arguments, self.calls = arguments, ["made"]
        self.there = {"weights", "kv_cache"}
        self.model = Model(self.names)
        self.model_runner = types.SimpleNamespace(get_model=lambda: self.model)
        self.ended = self.cached = self.stale = False
        self.llm_engine = types.SimpleNamespace(engine_core=types.SimpleNamespace(shutdown=self._shutdown))
        self.made.append(self)

    def _shutdown(self) -> None:
        self.ended = True

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        self.there = set()
        if level == 2:
            for buffer in self.model.buffers():
                buffer.cpu()  # kept on the host
            for parameter in self.model.parameters():
                parameter.data.fill_(float("nan"))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags[0]}")
        assert not self.there & set(tags), "vLLM would only warn, and do nothing"
        if self.no_room & set(tags):
            raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62")
        self.there |= set(tags)

    def collective_rpc(self, method: Any, args: tuple) -> None:
        self.calls.append("load")
        assert self.there == {"weights"}, f"{self.there} while the actor's weights are on the device"
        method(self, *args)

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        rotary, self.model.rotary = torch.ones(2), self.model.rotary.to("meta")  # without memory until all is loaded
        self.stale = self.cached
        self.model.load_weights(weights_iterator)
        self.model.rotary = rotary

    def reset_prefix_cache(self) -> bool:
        if not self.keeps_cache:
            self.cached = self.stale = False
        return not self.keeps_cache

    def generate(self, prompts: list[dict], params: list[dict], use_tqdm: bool) -> list[Any]:
        self.calls.append("generate")
        assert self.there == {"weights", "kv_cache"}, f"only {self.there} is awake"
        weight = float(self.model.a.sum())
        assert weight == weight, "samples from weights that were thrown away"
        assert not self.stale, "goes on from keys and values of other weights"
        self.cached = True

        def output(prompt: list[int]) -> Any:
            found = types.SimpleNamespace(logprob=weight)
            return types.SimpleNamespace(
                outputs=[types.SimpleNamespace(token_ids=[*prompt, 7], logprobs=[{t: found} for t in [*prompt, 7]], finish_reason="length")]
            )  # fmt: skip

        return [output(prompt["prompt_token_ids"]) for prompt in prompts]


@contextlib.contextmanager
def installed(*, cpu: bool = True) -> Iterator[type[LLM]]:
    """`import vllm` gives the stand-in inside. cpu: whether it is the build for CPUs."""

    class Made(LLM):
        made: list[LLM] = []

    names = (
        "vllm",
        "vllm.v1",
        "vllm.v1.engine",
        "vllm.v1.engine.core",
        "vllm.v1.executor",
        "vllm.v1.executor.uniproc_executor",
    )
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in (*names, "vllm.platforms")}
    for name in list(modules)[1:]:
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, modules[name])
    modules["vllm"].LLM, modules["vllm"].SamplingParams = Made, dict
    modules["vllm.platforms"].current_platform = types.SimpleNamespace(is_cpu=lambda: cpu)
    modules["vllm"].__version__ = "0.32.0"
    modules["vllm"].__spec__ = importlib.machinery.ModuleSpec("vllm", None)  # for `find_spec`
    modules["vllm.v1.engine.core"].cleanup_dist_env_and_memory = None
    launcher = types.SimpleNamespace(_distributed_args=None)
    modules["vllm.v1.executor.uniproc_executor"].ExecutorWithExternalLauncher = launcher
    with mock.patch.dict(sys.modules, modules):
        yield Made
