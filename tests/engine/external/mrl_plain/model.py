"""A whole transformers model on every rank: its weights by the names of Hugging Face files, and its hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM

from mrl.config.schema import RoleConfig
from mrl.engine.fsdp.names import file_tensors, read_rows
from mrl.engine.saving import starting_weights
from mrl.errors import ModelError
from mrl.weights.families import family_for
from mrl.weights.hf_config import read_hf_config
from mrl.weights.random_weights import RandomWeights
from mrl.weights.rules import expected_hf_names


class Model:
    """fp32 weights, which are computed with in `config.model.dtype`. file_shapes: of the tensors of its Hugging Face files."""

    def __init__(self, config: RoleConfig, device: torch.device) -> None:
        self.config = config
        self.hf_config = read_hf_config(config.model.path)
        self.family = family_for(self.hf_config)
        self.file_shapes = expected_hf_names(self.family, self.hf_config, head=config.head)
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.dtype]
        self.hf = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(config.model.path), dtype=torch.float32, attn_implementation="sdpa"
        )
        if config.head == "value":
            self.hf.lm_head = nn.Linear(self.hf.config.hidden_size, 1, bias=False)
        self.hf.get_input_embeddings().padding_idx = None  # nothing is padded: its row trains like any other
        self.hf.to(device).eval().requires_grad_(config.optimizer is not None)
        self._check_tensors()
        if config.model.init == "random":
            std = self.hf_config.get("initializer_range") or 0.02
            self._fill(RandomWeights(self.file_shapes, seed=config.seed, std=std))
        else:
            self.load_hf(config.model.path, trained=config.optimizer is not None)

    def parameters(self) -> dict[str, nn.Parameter]:
        """By their name in transformers; tied ones once."""
        return dict(self.hf.named_parameters())

    def _pieces(self, name: str, parameter: nn.Parameter):
        return file_tensors(name, parameter.shape, family=self.family, head=self.config.head)

    def _check_tensors(self) -> None:
        held = {piece.name for name, p in self.parameters().items() for piece in self._pieces(name, p)}
        if odd := sorted(held ^ self.file_shapes.keys()):
            raise ModelError(
                f"config.json: model_type {self.family.model_type!r} has {odd[0]}, which the plain engine does not carry; use "
                "engine.backend=megatron"
            )

    def load_hf(self, path: str, *, trained: bool = False) -> None:
        """The weights of a Hugging Face folder; all of it has been read and found right before anything changes."""
        with starting_weights(path, self.family, self.hf_config, head=self.config.head, trained=trained) as read:
            self._fill(read)

    @torch.no_grad()
    def _fill(self, read: Callable[[str], Any]) -> None:
        for name, parameter in self.parameters().items():
            parameter.copy_(read_rows(self._pieces(name, parameter), read, 0, parameter.shape[0]))

    def stream(self, value: Callable[[nn.Parameter], Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(file name, tensor on the host): of each parameter itself, or of its gradient, as `value` gives it."""
        for name, parameter in self.parameters().items():
            whole = value(parameter).detach().to("cpu", dtype)
            for piece in self._pieces(name, parameter):
                yield piece.name, piece.of(whole).clone()

    def cast(self) -> dict[str, Tensor]:
        """The weights in the dtype of the model, by their names in transformers; gradients reach the fp32 ones."""
        return {name: parameter.to(self.dtype) for name, parameter in self.parameters().items()}

    def hidden(self, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
        """[tokens, hidden] of one sequence, before the head."""
        body = {name.removeprefix("model."): w for name, w in weights.items() if name.startswith("model.")}
        given = {"input_ids": tokens[None], "use_cache": False}
        return functional_call(self.hf.model, body, (), given).last_hidden_state[0]

    def head(self, weights: dict[str, Tensor]) -> Tensor:
        """The output layer: [vocabulary, hidden], or [1, hidden] of a value head."""
        return weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
