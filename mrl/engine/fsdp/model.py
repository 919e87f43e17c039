"""A transformers causal language model, sharded over the data-parallel ranks with FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM

from mrl.config.schema import RoleConfig
from mrl.converters.families import family_for
from mrl.converters.hf_config import read_hf_config
from mrl.converters.random_weights import RandomWeights
from mrl.converters.rules import buffer_names, expected_hf_names
from mrl.engine import lora_base
from mrl.engine.fsdp import attention
from mrl.engine.fsdp.adapters import Adapters
from mrl.engine.fsdp.names import Piece, pieces, read_rows
from mrl.engine.saving import starting_weights
from mrl.errors import ModelError

Result = TypeVar("Result")


class Sharded(nn.Module):
    """The root of the sharding: whatever runs the model runs inside its forward, where its weights are gathered."""

    def __init__(self, hf: nn.Module) -> None:
        super().__init__()
        self.hf = hf

    def forward(self, use: Callable[[nn.Module], Result]) -> Result:
        return use(self.hf)


class Model:
    """The sharded model and the way between its parameters and Hugging Face files.

    Parameters are fp32, the master weights; where `dtype` is bfloat16 they are cast as they are gathered, the model
    computes in bfloat16, and gradients are reduced and accumulated in fp32. With adapters this holds for what trains, and the
    rest is held in `dtype`.
    """

    def __init__(self, config: RoleConfig, device: torch.device, mesh: DeviceMesh) -> None:
        self.hf_config = read_hf_config(config.model.path)
        self.family = family_for(self.hf_config)
        self.head = config.head
        odd = "a router bias" if buffer_names(self.family, self.hf_config) else ""
        odd = "attention sinks" if self.family.stacks else odd
        if odd:
            raise ModelError(
                f"config.json: model_type {self.family.model_type!r} has {odd}, which the fsdp engine does not carry; use "
                "engine.backend=megatron"
            )
        self.file_shapes = expected_hf_names(self.family, self.hf_config, head=config.head)
        # never by code of the model's own: the tables of the families say what it is, on every backend
        transformers_config = AutoConfig.from_pretrained(config.model.path, trust_remote_code=False)
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(transformers_config, dtype=torch.float32, attn_implementation="sdpa")
            if config.head == "value":  # a module of its own, also where the output layer was tied to the embedding
                hf.lm_head = nn.Linear(hf.config.hidden_size, 1, bias=False)
        hf.config.use_cache = False
        # transformers gives the row of `pad_token_id` no gradient. Nothing here is padded with it, and where it is a
        # token of the data, as an end-of-turn token often is, it trains like any other.
        hf.get_input_embeddings().padding_idx = None
        hf.set_attn_implementation(attention.NAME)
        if config.engine.recompute == "full":
            hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.adapters = Adapters(hf, config) if config.model.lora is not None else None
        bf16 = config.model.dtype == "bfloat16"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        for layer in hf.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        # The root is resharded too: kept gathered after a forward it would miss the optimizer's next update.
        self.module = fully_shard(Sharded(hf), mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        self.module.to_empty(device=device)
        _fill_buffers(hf)
        self._load(config)
        self.adapter_facts = lora_base.facts(config, self.family, self.hf_config)
        if config.optimizer is None:
            self.module.requires_grad_(False)

    @property
    def hf(self) -> nn.Module:
        return self.module.hf

    @contextlib.contextmanager
    def kept_gathered(self) -> Iterator[None]:
        """Inside, what a forward gathers stays for the next one: the whole model on every rank."""
        self.module.set_reshard_after_forward(False)
        try:
            yield
        finally:
            self.module.set_reshard_after_forward(True)
            for part in self.module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def parameters(self) -> dict[str, nn.Parameter]:
        """Sharded parameters by their name in transformers, without adapters; tied ones once."""
        return dict(self.hf.named_parameters()) if self.adapters is None else self.adapters.base()

    def trained(self) -> dict[str, nn.Parameter]:
        """What trains and what a checkpoint holds: all parameters, or adapters (and a value head) by their names in peft's files."""
        return self.parameters() if self.adapters is None else self.adapters.trained()

    def pieces(self, name: str, parameter: nn.Parameter) -> list[Piece]:
        """The file tensors that a parameter holds."""
        return pieces(name, parameter.shape, family=self.family, head=self.head)

    def _load(self, config: RoleConfig) -> None:
        """Fills this rank's shards, each rank reading its own rows."""
        held = {piece.name for name, p in self.parameters().items() for piece in self.pieces(name, p)}
        odd = sorted(held ^ self.file_shapes.keys())
        assert not odd, f"transformers' model and the table of {self.family.model_type} do not agree about {odd}"
        if config.model.init == "random":
            std = self.hf_config.get("initializer_range") or 0.02
            self._fill(RandomWeights(self.file_shapes, seed=config.seed, std=std))
        else:
            with self._stored(config.model.path, trained=config.optimizer is not None) as read:
                self._fill(read)
        if self.adapters is not None:
            self.adapters.fill()

    def load_hf(self, path: str) -> None:
        """Fills this rank's shards from another folder of the same tensors."""
        assert self.adapters is None, "adapters stay over the model that they started on"
        with self._stored(path, trained=False) as read:
            self._fill(read)

    def _stored(self, path: str, *, trained: bool):
        return starting_weights(path, self.family, self.hf_config, head=self.head, trained=trained)

    @torch.no_grad()
    def _fill(self, read: Callable[[str], Any]) -> None:
        for name, parameter in self.parameters().items():
            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            if shape[0]:
                rows = read_rows(self.pieces(name, parameter), read, offset[0], offset[0] + shape[0])
                parameter.to_local().copy_(rows)

    def stream(self, value: Callable[[nn.Parameter], Tensor], dtype: torch.dtype):
        """Yields (file name, whole tensor on the host) on rank 0, gathering one parameter at a time; others yield nothing.

        value: what is streamed of a parameter, a DTensor of its shape: itself, or its gradient. Adapters are added in.
        """
        for name, parameter in self.parameters().items():
            whole = value(parameter).detach().full_tensor()
            delta = self.adapters.delta(name) if self.adapters is not None else None
            if dist.get_rank() == 0:
                whole = whole if delta is None else whole.float() + delta
                whole = whole.to(device="cpu", dtype=dtype)
                for piece in self.pieces(name, parameter):
                    yield piece.name, piece.of(whole).clone()

    def stream_trained(self, value: Callable[[nn.Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """As `stream`, of what trains of a model with adapters: fp32, by the names of peft's files."""
        for name, parameter in self.trained().items():
            whole = value(parameter).detach().full_tensor()
            if dist.get_rank() == 0:
                yield name, whole.to(device="cpu", dtype=torch.float32).clone()


@torch.no_grad()
def _fill_buffers(hf: nn.Module) -> None:
    """Computes the buffers that follow from the config (rotary frequencies), which the meta device has left empty."""
    for buffer in hf.buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    for module in hf.modules():
        if any(True for _ in module.buffers(recurse=False)):
            hf._init_weights(module)
    empty = [name for name, buffer in hf.named_buffers() if buffer.is_floating_point() and buffer.isnan().any()]
    assert not empty, f"transformers does not initialise the buffers {empty}"
