"""Logits of a model on megatron-core, on this process alone, from weights that are read by Hugging Face name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.config.schema import EngineConfig, ModelConfig, RoleConfig
from mrl.engine.megatron.engine import MegatronEngine
from mrl.mcore_models.attention import PackedLayout


class _FromReader(MegatronEngine):
    """An engine whose weights come from `read`; config.json is that of the folder `path`. On the CPU, in fp32."""

    def __init__(self, path: str, read: Callable[[str], Any]) -> None:
        model = ModelConfig(path=path, dtype="float32")
        super().__init__(RoleConfig(model=model, engine=EngineConfig(device="cpu"), optimizer=None))
        self._read = read

    @contextlib.contextmanager
    def _source(self) -> Iterator[Callable[[str], Any]]:
        yield self._read


def logits(path: str, read: Callable[[str], Any], prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """[tokens, vocabulary] fp32 for each prompt. path: folder of config.json. read: HF name -> tensor or lazy slice."""
    engine = _FromReader(path, read)
    engine.init_model()
    (model,) = engine.models
    model.output_layer.project = lambda hidden, weight: torch.nn.functional.linear(hidden, weight).float()
    found = []
    with engine.eval_mode():
        for prompt in prompts:
            tokens = torch.tensor(prompt)
            layout = PackedLayout.make([len(tokens)], [len(tokens)], positions=torch.arange(len(tokens)))
            found.append(model(tokens, layout)[0, :, : engine.hf["vocab_size"]].clone())
    return found
