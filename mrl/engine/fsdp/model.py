"""A transformers model, sharded with FSDP2."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mrl import patches
from mrl.config.schema import RoleConfig
from mrl.engine import collective
from mrl.engine.fsdp import attention, fused, precision, probe
from mrl.engine.fsdp.adapters import Adapters
from mrl.engine.fsdp.blocks import blocks_of, embedding_of, wrap_blocks
from mrl.engine.fsdp.build import InitialWeights, build, fill_buffers, with_value_head
from mrl.engine.fsdp.mesh import Mesh
from mrl.engine.fsdp.names import Rows, TableFiles
from mrl.engine.fsdp.output import logit_rule
from mrl.engine.fsdp.rotary import length_dependent_rotary
from mrl.engine.fsdp.ulysses import Ulysses
from mrl.engine.logprobs import PLAIN
from mrl.engine.lora import identity
from mrl.engine.lora.shapes import name_in_base
from mrl.engine.stored_weights import Read, say_carried
from mrl.errors import ModelError
from mrl.weights.composites import as_stored_in
from mrl.weights.families import FAMILIES
from mrl.weights.hf_config import read_hf_config, reads_images
from mrl.weights.random_weights import RandomWeights
from mrl.weights.safetensors_io import NAMES, TensorInfo

Result = TypeVar("Result")
patches.check(__name__)


class ShardedRoot(nn.Module):
    """The root of the sharding: whatever runs the model runs inside its forward, where its weights are gathered."""

    def __init__(self, hf: nn.Module) -> None:
        super().__init__()
        self.hf = hf

    def forward(self, use: Callable[[nn.Module], Result]) -> Result:
        return use(self.hf)


class Model:
    """Holds the sharded model, and moves its parameters from and to Hugging Face files.

    Parameters are fp32, the master weights. If `dtype` is bfloat16, they are cast as they are gathered, and the model
    computes in bfloat16. Gradients are reduced and accumulated in fp32. With adapters this holds for what trains, and
    the rest is held in `dtype`. Buffers are whole on every rank, and stay as they are.

    family: None if mrl has no table of it. Then transformers names the tensors of its files, and a probe compares the
    numbers. rule: from the numbers of the output layer to logits. frozen: names of the parameters without a gradient in
    the model itself (a router's bias). kept_in_fp32: names of those that are not cast to bfloat16.
    rotary: set if its angles follow the length of a sequence. read: as in `BaseEngine.init_model`.
    """

    def __init__(self, config: RoleConfig, device: torch.device, mesh: Mesh, read: Read | None = None) -> None:
        self.hf_config = read_hf_config(config.model.path)
        table = FAMILIES.get(self.hf_config["model_type"])
        self.family = table and as_stored_in(config.model.path, table)
        self.head, self.device = config.head, device
        hf = build(config, self.hf_config)
        self.kernels = fused.use_kernels(hf)
        if config.head == "value":
            with_value_head(hf, checked=self.family is None)
        if self.family is not None:
            self.files: Any = TableFiles(hf, self.family, self.hf_config, config.head)
        else:
            from mrl.engine.fsdp.files import ModelFiles  # needs a newer transformers than models with a table do

            self.files = ModelFiles(copy.deepcopy(hf), config.head)
        self.rotary = length_dependent_rotary(hf, self.hf_config)
        self.frozen = {name for name, parameter in hf.named_parameters() if not parameter.requires_grad}
        kept = precision.fp32_parameters(hf, config.model.dtype)
        self.kept_in_fp32 = kept.keys()
        self.adapters = Adapters(hf, config, kept.values()) if config.model.lora is not None else None
        self.activations = wrap_blocks(hf, config.engine)
        self.reshard_after_forward = config.engine.fsdp.reshard_after_forward
        in_fp32 = precision.modules_of(hf, kept, compiled=config.engine.fsdp.compile)
        itemsizes = precision.gathered_itemsizes(hf, config.model.dtype, in_fp32)
        gathered = sum(p.numel() * size for p, size in zip(hf.parameters(), itemsizes, strict=True))
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        self.stays_gathered = precision.stays_gathered(gathered, dist.get_world_size(mesh.shard_group), memory)
        self.module = _sharded(hf, config, mesh.weights, in_fp32)
        # only now is there memory, for this rank's shards alone: until here all is on the meta device
        self.module.to_empty(device=device)
        fill_buffers(hf)
        self._load(config, read)
        self.adapter_identity = identity.identity_of(config, self.family, self.hf_config)
        self.rule = PLAIN
        if self.family is None and not reads_images(self.hf_config):
            self._probe(mesh.ulysses, packed=config.packing)
        if config.optimizer is None:
            self.module.requires_grad_(False)

    @property
    def hf(self) -> nn.Module:
        return self.module.hf

    @property
    def reads_images(self) -> nn.Module | None:
        """The model, if it is one of vision and language."""
        return self.hf if reads_images(self.hf_config) else None

    def is_of_images(self, name: str) -> bool:
        """Returns whether a parameter, or its adapter, is of the vision tower, which text alone does not train."""
        return self.reads_images is not None and "model.visual." in name

    @torch.no_grad()
    def _probe(self, ulysses: Ulysses, *, packed: bool) -> None:
        """Runs tiny inputs through the model: finds its rule of logits, and compares its numbers. Collective."""
        self.module.eval()
        self.module(lambda hf: probe.choose_attention(hf, packed=packed, device=self.device, ulysses=ulysses))
        if self.head == "lm":
            token = torch.ones(1, 1, dtype=torch.int64, device=self.device)
            self.rule = self.module(lambda hf: logit_rule(hf, input_ids=token, position_ids=token - 1))
        self.reshard()

    def check_generates(self, longest: int) -> None:
        """Raises ModelError if the model cannot generate sequences of `longest` tokens.

        Attention of its own does not know mrl's cache. Angles that follow the length of a sequence would turn cached
        keys otherwise than the last token's.
        """
        if self.hf.config._attn_implementation != attention.NAME:
            raise ModelError(
                "config.json",
                why=f"model_type {self.hf_config['model_type']!r} keeps to attention of its own, "
                "and so backend fsdp does not generate with it",
                fix="let an inference server do it (rollout.backend)",
            )
        if self.rotary is not None:
            self.rotary.check(longest, "kept keys do not follow it")

    @contextlib.contextmanager
    def keep_gathered(self) -> Iterator[None]:
        """Keeps what a pass gathers for the next one, inside the context: the whole model on every rank.

        An error drops the gradients that were summed since.
        """
        self.module.set_reshard_after_forward(False)
        self.module.set_reshard_after_backward(False)
        try:
            yield
        except BaseException:
            self.module.reset_iter_state()
            self._forget_sums()
            raise
        finally:
            self.sync_in_backward(True)
            for part in self._units():
                part.set_reshard_after_forward(part is self.module or self.reshard_after_forward, recurse=False)
            self.reshard()

    def sync_in_backward(self, now: bool) -> None:
        """Sets whether the next backward pass reduces gradients and frees what is gathered.

        Otherwise each rank keeps its own sum of the whole model's gradients, in fp32, for a later pass to reduce.
        """
        # Without a sync FSDP keeps the sum in the policy's reduce_dtype, fp32, though gradients are bfloat16
        # (torch 2.13, _fsdp_param.py, to_accumulated_grad_if_needed).
        self.module.set_requires_gradient_sync(now)
        self.module.set_reshard_after_backward(now)

    def _forget_sums(self) -> None:
        """Drops the gradients that wait to be reduced.

        torch 2.13's `FSDPModule.reset_iter_state` promises it and does not.
        """
        for part in self._units():
            for group in part._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    if parameter.unsharded_accumulated_grad is not None:  # an error if torch calls it otherwise
                        parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):  # else it was not gathered yet
                        parameter._unsharded_param.grad = None

    def reshard(self) -> None:
        """Frees what is gathered: it would miss changes of the shards. A backward pass does so by itself."""
        for part in self._units():
            part.reshard()

    def _units(self) -> list[FSDPModule]:
        return [part for part in self.module.modules() if isinstance(part, FSDPModule)]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns sharded parameters by their name in transformers, without adapters; tied ones once."""
        return dict(self.hf.named_parameters()) if self.adapters is None else self.adapters.base()

    def trained(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that train: those not frozen, or adapters (and a value head) by their names in
        files."""
        if self.adapters is not None:
            return self.adapters.trained()
        return {name: parameter for name, parameter in self.parameters().items() if name not in self.frozen}

    def buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that are in the files, whole on every rank."""
        named = ((name_in_base(name), buffer) for name, buffer in self.hf.named_buffers())
        return {name: buffer for name, buffer in named if name in self.files.state}

    def file_infos(self, dtype: torch.dtype) -> dict[str, TensorInfo]:
        """Returns an export's tensors: parameters in `dtype`, or fp32 if they are kept in it, and buffers as they
        are."""
        fixed = {name: buffer.dtype for name, buffer in self.buffers().items()}
        fixed |= dict.fromkeys(self.kept_in_fp32, torch.float32)
        infos = {}
        for group in self.files.groups():
            of_group = next((fixed[name] for name in group if name in fixed), dtype)
            tensors = {name: torch.empty(self.files.state[name].shape, device="meta") for name in group}
            for name, tensor in self.files.written(tensors):
                infos[name] = TensorInfo(NAMES[of_group], tuple(tensor.shape))
        ordered = {name: infos[name] for name in self.files.shapes if name in infos}
        return ordered | infos

    def _load(self, config: RoleConfig, read: Read | None) -> None:
        """Fills this rank's shards, each rank reading its own rows."""
        if read is not None:
            assert isinstance(self.files, TableFiles), "names of files are read by a table"
            self._fill(self.files.rows_by(read))
        elif config.model.init == "random":
            std = self.hf_config.get("initializer_range") or 0.02
            if isinstance(self.files, TableFiles):
                random = RandomWeights(self.files.shapes, seed=config.seed, std=std)
                self._fill(self.files.rows_by(random))
            else:
                self._fill(InitialWeights(self.files.hf, seed=config.seed, score=self.files.score).rows)
        else:
            with self.files.opened(config.model.path, trained=config.optimizer is not None) as stored:
                self._fill(stored)
            if not isinstance(self.files, TableFiles):
                self.files.names = stored.names
                if config.optimizer is not None and collective.is_main():
                    say_carried(type(self.hf).__name__, stored.names.carried)
        if self.adapters is not None:
            self.adapters.fill()

    def load_hf(self, path: str) -> None:
        """Fills this rank's shards from another folder of the same tensors."""
        assert self.adapters is None, "adapters stay over the model that they started on"
        with self.files.opened(path, trained=False) as stored:
            self._fill(stored)

    @torch.no_grad()
    def _fill(self, rows: Rows) -> None:
        odd = sorted(self.files.state.keys() ^ (self.parameters() | self.buffers()).keys())
        assert not odd, (
            f"the files hold {odd}, of which the model has no such parameter or buffer, or the other way round"
        )
        for name, parameter in self.parameters().items():
            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            if not shape or shape[0]:
                start = offset[0] if offset else 0
                parameter.to_local().copy_(rows(name, start, start + (shape[0] if shape else 1)))
        for name, buffer in self.buffers().items():
            buffer.copy_(rows(name, 0, buffer.shape[0] if buffer.shape else 1))

    def stream(
        self, value: Callable[[Tensor], Tensor], dtype: torch.dtype, *, fixed: bool = True, everywhere: bool = False
    ) -> collective.TensorStream:
        """Yields (file name, whole tensor on the engine's device) on rank 0; other ranks yield nothing.

        The tensors of one conversion are gathered at a time. Adapters are added in.

        value: from a parameter to the DTensor that is streamed, of its shape: itself, or its gradient. fixed: whether
        buffers and frozen parameters come too. everywhere: every rank yields the tensors, since all gather them.
        """
        parameters, buffers = self.parameters(), self.buffers() if fixed else {}
        parameters = {name: p for name, p in parameters.items() if fixed or name not in self.frozen}

        def cast(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: t.to(torch.float32 if name in self.kept_in_fp32 else dtype) for name, t in tensors.items()}

        for group in self.files.groups():
            tensors = {name: value(parameters[name]).detach() for name in group if name in parameters}
            if self.adapters is None:  # else they are added in fp32
                tensors = cast(tensors)  # before they travel: half as many bytes
            tensors = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
            if self.adapters is not None:
                tensors = cast({name: self.adapters.merged(name, whole) for name, whole in tensors.items()})
            tensors |= {name: buffers[name] for name in group if name in buffers}
            if tensors and (everywhere or not dist.get_rank()):
                for name, tensor in self.files.written(tensors):
                    yield name, tensor.clone()
                    del tensor
            tensors.clear()  # before there is memory for the next

    def stream_trained(self, value: Callable[[nn.Parameter], Tensor]) -> collective.TensorStream:
        """Yields what `stream` does, for the adapters (and value head) alone: fp32, by the names of peft's files."""
        for name, parameter in self.trained().items():
            whole = value(parameter).detach().full_tensor()
            if dist.get_rank() == 0:
                yield name, whole.to(device="cpu", dtype=torch.float32).clone()


def _sharded(hf: nn.Module, config: RoleConfig, mesh: DeviceMesh, in_fp32: Sequence[nn.Module]) -> nn.Module:
    """Shards each block of `hf`, the embedding if worth it, and the root. in_fp32: modules that are not cast."""
    policy, embedding = precision.policy_of(config.model.dtype), embedding_of(hf)
    reshard = config.engine.fsdp.reshard_after_forward
    for part in in_fp32:
        fully_shard(part, mesh=mesh, mp_policy=precision.FLOAT32, reshard_after_forward=reshard)
    for part in (*blocks_of(hf), *([] if embedding is None else [embedding])):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # The root is resharded too. By default fully_shard keeps it gathered after a forward (torch 2.13, _fully_shard.py),
    # and it would miss the next change of its shards: an optimizer's update, or loaded weights.
    return fully_shard(ShardedRoot(hf), mesh=mesh, mp_policy=policy, reshard_after_forward=True)
