"""Logits of a model of transformers, on this process alone. Its eager attention is the one that every family has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from mrl.engine.fsdp.names import file_tensors, read_rows
from mrl.weights.composites import as_stored_in
from mrl.weights.families import family_for
from mrl.weights.hf_config import read_hf_config


def logits_of_folder(path: str, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns [tokens, vocabulary] fp32 for each prompt, by the model that transformers loads from `path`, a folder."""
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        path, config=_config(path), dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    return _run(model, prompts)


@torch.no_grad()
def logits_of_weights(path: str, read: Callable[[str], Any], prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns the same for weights that `read` gives by Hugging Face name, with the config.json in `path`."""
    family = as_stored_in(path, family_for(read_hf_config(path)))
    model = AutoModelForCausalLM.from_config(_config(path), dtype=torch.float32, attn_implementation="eager")
    in_files = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in in_files]
    for name, tensor in (*model.named_parameters(), *buffers):
        of = file_tensors(name, tensor.shape, family=family, head="lm")
        tensor.copy_(read_rows(of, read, 0, tensor.shape[0]))
    return _run(model, prompts)


def _config(path: str) -> PreTrainedConfig:
    """Returns the config of the folder `path`, with experts one by one: torch's grouped matrices need widths of 16
    bytes."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    config._experts_implementation = "eager"
    return config


@torch.no_grad()
def _run(model: torch.nn.Module, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    model.eval()
    return [model(input_ids=torch.tensor([list(prompt)])).logits[0].float() for prompt in prompts]
