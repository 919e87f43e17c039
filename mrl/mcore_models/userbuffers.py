"""Overlaps tensor-parallel communication with matrix products (`tp_comm_overlap`), by transformer-engine's userbuffers.

Under sequence parallelism a linear layer gathers its input, or scatters the sum of its output, over the tensor-parallel
ranks. With userbuffers transformer-engine does that in chunks, during the product of another chunk. Its buffers are
registered with all ranks once for a process, and take tensors of exactly one shape. So every micro-batch is padded to
one number of positions (inputs.py), and all models of a process share the shape.

megatron-core names buffers for four linear layers: qkv, proj, fc1 and fc2. At a layer of another name (latent
attention, MTP) it switches its own field off for all that is built later (`TELinear.__init__`, 0.16.1 and 0.19.2).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from mrl.config.schema import EngineConfig, ModelConfig, TrainedModelConfig
from mrl.errors import ConfigError, one_line
from mrl.mcore_models.megatron_fields import KEY
from mrl.parallel import ParallelDims

FIELD = "tp_comm_overlap"

WITH_OVERLAP = (
    "tp_comm_overlap_ag", "tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad", "tp_comm_overlap_disable_qkv",
    "tp_comm_overlap_disable_fc1", "tp_comm_bulk_dgrad", "tp_comm_bulk_wgrad", "tp_comm_bootstrap_backend",
)  # fmt: skip
"""Fields that are read with `tp_comm_overlap` alone."""

BUFFERS = 12
"""The buffers of a process, as `initialize_ub` of transformer-engine 2.20 makes them: one for each product of qkv,
proj, fc1 and fc2 (forward, gradient of the input, gradient of the weight)."""

RANKS = (2, 4, 8)
"""The numbers of tensor-parallel ranks of one machine that transformer-engine's kernels are compiled for. For another
number it starts no kernel and reports nothing (`callranks_` in userbuffers.cu). It also has 16 and 32, for machines
that share NVLink."""

MAX_ELEMENTS = 2**31 - 1
"""The most bytes of a buffer: offsets in it are 32-bit integers in transformer-engine (`CommOverlapP2PBase`)."""

COLUMNS = 32
"""The hidden size is a multiple of this. A product that scatters its output is divided into four parts of the hidden
size, and transformer-engine's kernels move them by 16 bytes."""

FLAGS = (
    "ub_overlap_ag_fprop", "ub_overlap_rs_fprop", "ub_overlap_ag_dgrad", "ub_overlap_rs_dgrad", "ub_bulk_dgrad",
    "ub_bulk_wgrad",
)  # fmt: skip
"""Attributes of transformer-engine's linear modules that say what each does through userbuffers."""


def is_enabled(megatron_options: Mapping[str, Any]) -> bool:
    """Returns whether userbuffers are asked for. megatron_options: `engine.megatron`."""
    return megatron_options.get(FIELD) is True


def token_multiple(dims: ParallelDims) -> int:
    """Returns the number that divides the positions of a micro-batch, over all tensor- and context-parallel ranks."""
    return dims.cp * math.lcm(2 if dims.cp > 1 else 1, dims.tp)


def places_of(engine: EngineConfig, dims: ParallelDims) -> int | None:
    """Returns how many positions every micro-batch has, over all tensor- and context-parallel ranks.

    Returns None without userbuffers and `engine.micro_batch.pad`: micro-batches then have sizes of their own.
    """
    if not (is_enabled(engine.megatron) or engine.micro_batch.pad):
        return None
    tokens = engine.micro_batch.token_limit
    assert tokens is not None, "check_config asks for it"
    return -(-tokens // token_multiple(dims)) * token_multiple(dims)


def _refuse(why: str, fix: str) -> NoReturn:
    raise ConfigError(f"{KEY}.{FIELD}", True, why, fix)


def check_fields(megatron_options: Mapping[str, Any]) -> None:
    """Raises ConfigError if fields do not go together. megatron_options: `engine.megatron`, of right types."""
    if not is_enabled(megatron_options):
        for name in WITH_OVERLAP:
            if name in megatron_options:
                why, fix = f"is read with {KEY}.{FIELD} alone", "set that to true, or leave this out"
                raise ConfigError(f"{KEY}.{name}", megatron_options[name], why, fix)
        return
    if megatron_options.get("fp8"):
        _refuse(f"has buffers of bfloat16 here, and {KEY}.fp8 is set", "leave out one of them")
    if megatron_options.get("moe_expert_capacity_factor") is not None:
        _refuse(f"pads with tokens that take places of experts, which {KEY}.moe_expert_capacity_factor makes few",
                "leave out one of them")  # fmt: skip
    if megatron_options.get("moe_shared_expert_overlap"):
        _refuse(f"needs one queue to the GPU, and {KEY}.moe_shared_expert_overlap several", "leave out one of them")


def check_config(model: ModelConfig, engine: EngineConfig) -> None:
    """Raises ConfigError if micro-batches have no one size, or if layers without a buffer train."""
    if not is_enabled(engine.megatron):
        return
    if engine.micro_batch.token_limit is None:
        why = "needs micro-batches of one size, to which each is padded"
        _refuse(why, "set engine.micro_batch.tokens to a number, and no engine.micro_batch.size")
    if model.lora is not None:
        # transformer-engine's backward pass leaves the gradient of a layer's input unsummed where the weight has none
        _refuse("is not for adapters: transformer-engine's backward pass needs weights that train", "leave it out")
    if isinstance(model, TrainedModelConfig) and model.mtp is not None:
        _refuse("is not for MTP layers, for whose first projection there is no buffer", "leave out one of them")


def check_model(
    engine: EngineConfig, fields: Mapping[str, Any], dims: ParallelDims, *, longest: int, key: str, packed: bool
) -> None:
    """Raises ConfigError if userbuffers are not for a model, a layout or its sequences.

    fields: the model's as megatron has them. longest: tokens of the longest sequence, which `key` sets.
    """
    if not is_enabled(engine.megatron):
        return
    if dims.tp not in RANKS:
        _refuse(f"is for 2, 4 or 8 tensor-parallel ranks, and engine.parallel.tp is {dims.tp}", "set one of them there")
    if not dims.sp:
        _refuse("overlaps what sequence parallelism sends", "leave engine.parallel.sp at auto, or leave this out")
    if not packed:
        _refuse("needs packed micro-batches, of one size each", "set data.packing to true, or leave this out")
    if fields.get("multi_latent_attention"):
        _refuse("is not for latent attention: most of its linear layers have no buffer", "leave it out")
    if fields["hidden_size"] % COLUMNS:
        _refuse(f"takes hidden sizes that are multiples of {COLUMNS}, and {fields['hidden_size']} is none",
                "leave it out")  # fmt: skip
    tokens, places = engine.micro_batch.token_limit, places_of(engine, dims)
    wanted = BufferShape.of(engine, fields["hidden_size"], dims)
    assert tokens is not None and places is not None and wanted is not None
    if wanted.largest > MAX_ELEMENTS:
        why = f"makes a buffer of {wanted.largest / 2**30:.1f} GiB, and {KEY}.{FIELD} takes less than 2"
        most = places * MAX_ELEMENTS // wanted.largest // token_multiple(dims) * token_multiple(dims)
        raise ConfigError("engine.micro_batch.tokens", tokens, why, f"give at most {most}")
    if longest > places:
        why = f"is less than {longest} ({key}), and with {KEY}.{FIELD} no micro-batch can have more"
        raise ConfigError("engine.micro_batch.tokens", tokens, why, f"give at least {longest}")


@dataclasses.dataclass(frozen=True)
class BufferShape:
    """Is the shape of all userbuffers of an engine."""

    places: int  # of a micro-batch on one context-parallel rank, over all tensor-parallel ranks
    hidden: int
    tp: int
    scattering: tuple[str, ...]  # linear layers whose gradient of the input is scattered in chunks of its own product
    bootstrap_backend: str = dataclasses.field(default="nccl", compare=False)  # how ranks meet: no part of the shape

    @classmethod
    def of(cls, engine: EngineConfig, hidden: int, dims: ParallelDims) -> BufferShape | None:
        """Returns the shape that an engine asks for; None without userbuffers."""
        places, given = places_of(engine, dims), engine.megatron
        if places is None or not is_enabled(given):
            return None
        scattering = tuple(
            name for name in ("qkv", "fc1")
            if given.get("tp_comm_overlap_rs_dgrad") and not given.get(f"tp_comm_overlap_disable_{name}")
        )  # fmt: skip
        return cls(places // dims.cp, hidden, dims.tp, scattering, given.get("tp_comm_bootstrap_backend", "nccl"))

    @property
    def _whole(self) -> int:
        return 2 * self.places * self.hidden

    @property
    def _beside(self) -> int:
        """Returns the extra bytes of a buffer that scatters in a ring, for incoming data."""
        return self._whole - self._whole // self.tp

    @property
    def nbytes(self) -> int:
        """Returns bytes of the buffers on a rank. Each is rounded up to a page of the GPU, which is not counted."""
        return BUFFERS * self._whole + len(self.scattering) * self._beside

    @property
    def largest(self) -> int:
        """Returns bytes of the largest buffer."""
        return self._whole + (self._beside if self.scattering else 0)

    def describe(self) -> str:
        text = f"{self.places} places x {self.hidden} over {self.tp} tensor-parallel ranks"
        if self.scattering:
            text += f", tp_comm_overlap_rs_dgrad for {' and '.join(self.scattering)}"
        return text


SAME_SHAPE_FIX = (
    "give all models the same hidden size, tp, cp, micro_batch.tokens and tp_comm_overlap_* fields, "
    "or the key to one alone"
)

_made: list[BufferShape] = []
"""The buffers of this process, one or none. transformer-engine has them in its module and does not tell their shape."""


def check_machine(tp: int) -> None:
    """Raises ConfigError if tensor-parallel ranks are on several machines.

    There transformer-engine's exchange of handles ends a process, or waits, without a message.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", tp))
    if here % tp:
        why = f"needs tensor-parallel ranks that share a machine, and its {here} processes are no multiple of {tp}"
        _refuse(why, "set engine.parallel.tp to what a machine has, or leave it out")


def create_buffers(wanted: BufferShape) -> None:
    """Makes the buffers of this process if it has none.

    It is collective over all processes; call it before layers are built. Raises ConfigError if the process has buffers
    of another shape, or the machine cannot have any.
    """
    from transformer_engine.pytorch.module import base

    if base.is_ub_initialized():
        if _made != [wanted]:
            there = _made[0].describe() if _made else "others that mrl has not made"
            why = f"asks for buffers of {wanted.describe()}, and this process, whose models share them, has {there}"
            _refuse(why, SAME_SHAPE_FIX)
        return
    check_machine(wanted.tp)
    # by ring exchange, as in transformer-engine's own tests: by default these buffers are for bulk gathers
    methods = {f"{name}_dgrad": {"method": "ring_exchange"} for name in wanted.scattering}
    try:
        base.initialize_ub(
            [wanted.places, wanted.hidden], wanted.tp, quantization_modes=[base.UserBufferQuantizationMode.NONE],
            dtype=torch.bfloat16, ub_cfgs=methods, bootstrap_backend=wanted.bootstrap_backend,
        )  # fmt: skip
    except RuntimeError as error:
        base.destroy_ub()
        why = f"cannot be had here: transformer-engine says {one_line(error, 200).rstrip('.')}"
        raise ConfigError(f"{KEY}.{FIELD}", True, why, "do what it says, or leave this out") from error
    _made[:] = [wanted]


def check_built(config: Any) -> None:
    """Raises ConfigError if megatron has switched the field off for some layers. megatron only warns of it."""
    if not config.tp_comm_overlap:
        _refuse("was switched off by megatron-core for a linear layer that has no buffer", "leave it out")


@contextlib.contextmanager
def disabled(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Makes layers communicate by NCCL inside: decoding has steps of other numbers of tokens."""
    held = [
        (module, flag)
        for chunk in chunks for module in chunk.modules() for flag in FLAGS if getattr(module, flag, False)
    ]  # fmt: skip
    for module, flag in held:
        setattr(module, flag, False)
    try:
        yield
    finally:
        for module, flag in held:
            setattr(module, flag, True)
