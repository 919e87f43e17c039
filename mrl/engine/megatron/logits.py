"""Computes logits of a model on megatron-core: on the CPU, in this process alone, in fp32, from Hugging Face
weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.config.schema import EngineConfig, ModelConfig, RoleConfig
from mrl.engine.megatron.engine import MegatronEngine
from mrl.mcore_models.attention import PackedLayout


def logits(path: str, read: Callable[[str], Any], prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns [tokens, vocabulary] fp32 for each prompt.

    path: folder of config.json. read: HF name -> tensor or lazy slice.
    """
    model = ModelConfig(path=path, dtype="float32")
    engine = MegatronEngine(RoleConfig(model=model, engine=EngineConfig(device="cpu"), optimizer=None))
    engine.init_model(read)
    (chunk,) = engine.model.chunks
    chunk.output_layer.project = lambda hidden, weight: torch.nn.functional.linear(hidden, weight).float()
    found = []
    with engine.eval_mode():
        for prompt in prompts:
            tokens = torch.tensor(prompt)
            layout = PackedLayout.for_sequences([len(tokens)], positions=torch.arange(len(tokens)))
            found.append(chunk(tokens, layout)[0, :, : engine.model.hf["vocab_size"]].clone())
    return found
