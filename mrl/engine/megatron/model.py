"""Builds a GPTModel in a layout: this rank's chunks, the rules of their tensors, and their optimizer."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.config.schema import EngineConfig, RoleConfig
from mrl.engine import collective
from mrl.engine.lora.folder import adapters
from mrl.engine.lora.identity import identity_of
from mrl.engine.lora.shapes import PREFIX
from mrl.engine.megatron import lora, optim, weights
from mrl.engine.megatron.checks import mtp_layers
from mrl.engine.megatron.groups import MegatronState
from mrl.engine.megatron.muon import is_matrix
from mrl.engine.offload import ActivationOffload
from mrl.engine.saving import starting_weights
from mrl.engine.stored_weights import Read, say_carried
from mrl.errors import ConfigError
from mrl.mcore_models import fp8, graph_limits, grouped, layer_spec, userbuffers
from mrl.mcore_models.build import build_chunks, transformer_config
from mrl.mcore_models.layout import EXPERTS, experts_fit
from mrl.mcore_models.te_limits import cp_comm_type, switches_of
from mrl.mcore_models.train_graphs import TrainGraphs
from mrl.ops import devices
from mrl.parallel import ParallelDims
from mrl.weights.composites import COMPOSITES, CarriedReader, as_stored_in
from mrl.weights.families import FAMILIES, family_for, fields_of
from mrl.weights.hf_config import read_hf_config
from mrl.weights.random_weights import RandomWeights
from mrl.weights.rules import Rule, expected_hf_names, padded_vocab, param_map
from mrl.weights.stacks import unstacking_read
from mrl.weights.table import Family, HFConfig


class Model:
    """Holds the model of one engine. Use it inside `state.installed()` (see groups.py)."""

    def __init__(self, config: RoleConfig, dims: ParallelDims, kept: str | None = None) -> None:
        """Makes process groups and the configuration, and no parameters. kept: as of `layer_spec.choose`."""
        self.config, self.dims = config, dims
        self.dtype = layer_spec.DTYPES[config.model.dtype]
        self.hf = read_hf_config(config.model.path)
        self.family = _family(config, self.hf)
        self.mtp = 0 if config.mtp is None else mtp_layers(self.hf, dims, lora=config.model.lora is not None)
        self.mtp_weight = 0.0 if config.mtp is None else config.mtp.loss_weight
        self.detaches_mtp = config.mtp is not None and config.mtp.detach
        self.layer_spec = agreed_spec(config, fields_of(dict(self.hf)), dims, kept)
        # transformer-engine reads them of the whole process, so preflight refuses roles with other attention
        os.environ |= switches_of(config.engine.attention)
        self.spec = self.layer_spec.name
        self.transformer = transformer_config(
            self.hf, dims, dtype=self.dtype, recompute=config.engine.recompute,
            recompute_modules=config.engine.recompute_modules, aux_loss=config.engine.moe.aux_loss,
            z_loss=config.engine.moe.z_loss, layer_spec=self.spec, megatron_options=config.engine.megatron,
            mtp_layers=self.mtp, saves_to_host="activations" in config.engine.offload,
        )  # fmt: skip
        self.state = MegatronState(dims, config.seed)
        self.coords = self.state.coords
        # set by `init`
        self.chunks: Sequence[Any] = ()  # one for each virtual stage of this rank
        self.wrapped: Sequence[Any] = ()  # the chunks in DDP, or the chunks if nothing trains
        self.rules: weights.Rules = ()  # of each chunk, by the name of the parameter
        self.adapters: lora.Shapes = {}
        self.adapter_identity: dict[str, Any] | None = None  # a checkpoint's description of them
        self.optimizer: Any = None
        self.activations: ActivationOffload | None = None  # None if they stay on the device
        self.batch_invariant = config.engine.batch_invariant  # sampling feeds one token at a time
        self.captures_graphs = devices.has_gpu()  # of decoding steps; false once a capture has failed
        self.train_graphs: Sequence[TrainGraphs] = ()  # of each chunk, if `engine.cuda_graphs`

    @property
    def device(self) -> torch.device:
        return devices.device()

    @property
    def uses_grouped_mm(self) -> bool:
        """Returns the effect of engine.moe.grouped_mm on this machine."""
        wanted = self.config.engine.moe.grouped_mm
        return grouped.is_chosen(wanted, self.spec, self.dtype, devices.capability())

    @property
    def experts(self) -> str | None:
        """Returns how experts multiply, in words; None without experts, or if their adapters may change it."""
        fields = self.transformer
        if not fields.num_moe_experts or self.config.model.lora is not None:
            return None
        several = self.spec == "te" or fields.num_moe_experts > self.dims.ep
        fit = experts_fit(vars(fields), self.dims, self.dtype.itemsize) and not fields.add_bias_linear
        if self.uses_grouped_mm and several and fit:
            return EXPERTS["grouped_mm"]
        return EXPERTS["TEGroupedMLP" if self.spec == "te" else "SequentialMLP"]

    def init(self, read: Read | None = None) -> None:
        """Builds the chunks and their optimizer and fills them. Collective.

        read: Hugging Face name -> tensor or lazy slice; by default the config's initial weights.
        """
        self.state.check()
        self.build()
        config = self.config
        if config.optimizer is not None:
            self.optimizer = optim.build_optimizer(
                config.optimizer, self.wrapped, self.dtype, config.engine.megatron, self.matrices()
            )
            if config.engine.cuda_graphs and self.captures_graphs:
                self.train_graphs = [self._graphs(ddp) for ddp in self.wrapped]
        with self._start() if read is None else contextlib.nullcontext(read) as source:
            self.fill(source)
        self.adapter_identity = identity_of(config, self.family, self.hf)

    def build(self) -> None:
        """Builds this rank's chunks as the config's keys ask for, without values and without an optimizer."""
        config, head = self.config, self.config.head
        plans = weights.plans_here(self.hf, self.dims, self.coords, mtp=self.mtp)
        self.rules = [
            param_map(
                self.family, self.hf, layout=self.dims, coords=self.coords, chunk=plan, spec=self.spec, head=head
            )
            for plan in plans
        ]  # fmt: skip
        buffers = userbuffers.BufferShape.of(config.engine, self.transformer.hidden_size, self.dims)
        if buffers is not None:
            userbuffers.create_buffers(buffers)
        self.chunks = self.wrapped = build_chunks(
            self.transformer, self.hf, dims=self.dims, chunks=plans, head=head, detaches_mtp=self.detaches_mtp,
            padded_vocab=padded_vocab(self.hf["vocab_size"], self.dims.tp),
        )  # fmt: skip
        if buffers is not None:
            userbuffers.check_built(self.transformer)
        if self.uses_grouped_mm:
            grouped.install(self.chunks)
        if config.model.lora is not None:
            self.adapters = adapters(config.model.path, config.model.lora, head)
            self.rules = lora.attach(self.chunks, self.rules, self.adapters, config.model.lora, self.family, head=head)
        self.activations = offload_activations(self.chunks, config.engine)
        if config.optimizer is None:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
        else:
            overlaps = dict.fromkeys(graph_limits.OVERLAPS, False) if config.engine.cuda_graphs else {}
            self.wrapped = optim.wrap(self.chunks, self.transformer, config.engine.megatron | overlaps)

    def matrices(self) -> dict[int, Rule]:
        """Returns the rules of this rank's matrices of layers, which Muon updates, by the id of the parameter."""
        rules = weights.rule_of_parameters(self.chunks, self.rules)
        return {number: rule for number, rule in rules.items() if is_matrix(rule)}

    def _graphs(self, ddp: Any) -> TrainGraphs:
        """Makes the layers of a chunk run as graphs in training."""
        decoder = ddp.module.decoder
        if devices.has_gpu():
            graph_limits.check_layers(self.spec, self.dtype, counts_stay=grouped.all_counts_stay(decoder))
        decoder.forward = graphs = TrainGraphs(decoder, ddp.module.pg_collection.tp)
        return graphs

    def forget_graphs(self) -> None:
        """Drops training's graphs: parameters or gradients leave their memory."""
        for graphs in self.train_graphs:
            graphs.forget()

    def forget_copies(self) -> None:
        """Drops all that was made of parameters, which leave their memory."""
        fp8.forget_copies(self.chunks)
        self.forget_graphs()

    @contextlib.contextmanager
    def _start(self) -> Iterator[Read]:
        """Gives a reader of the config's initial weights: Hugging Face name -> tensor or lazy slice."""
        config = self.config
        if config.model.init == "random":
            shapes = expected_hf_names(self.family, self.hf, head=config.head, mtp=self.mtp)
            random = RandomWeights(shapes, seed=config.seed, std=self.hf.get("initializer_range") or 0.02)
            yield unstacking_read(random, self.family)
            return
        if config.optimizer is not None and collective.is_main():
            with contextlib.closing(CarriedReader(config.model.path, self.family)) as beside:
                trained = expected_hf_names(self.family, self.hf, mtp=self.mtp)
                say_carried(f"megatron's {self.hf['model_type']}", beside.tensors.keys() - trained.keys())
        with self.weights_of(config.model.path, trained=config.optimizer is not None) as read:
            yield read

    def weights_of(self, path: str, *, trained: bool) -> contextlib.AbstractContextManager[Read]:
        """Opens `starting_weights` of another folder, or of the config's own."""
        return starting_weights(path, self.family, self.hf, head=self.config.head, trained=trained, mtp=self.mtp)

    def fill(self, read: Read) -> None:
        """Sets this rank's weights, and masters if any. Adapters start again, which leaves the model as it is."""
        initial = lora.initial_adapters(self.adapters, self.config.seed)

        def either(name: str) -> Any:
            return initial(name) if name.startswith(PREFIX) else read(name)

        weights.load(self.chunks, self.rules, either)
        self._fill_masters(either)

    @property
    def mtp_params(self) -> frozenset[int]:
        """Returns the ids of this rank's parameters of MTP layers."""
        return frozenset(id(p) for chunk in self.chunks if chunk.mtp_process for p in chunk.mtp.parameters())

    def set_adapters(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets this rank's adapters, and their masters, from the tensors of peft's file."""
        self._fill_masters(lora.fill(self.chunks, self.rules, tensors))

    def _fill_masters(self, read: Read) -> None:
        if self.optimizer is not None:
            weights.load_masters(self.optimizer, self.chunks, self.rules, read)


def _family(config: RoleConfig, hf: HFConfig) -> Family:
    """Returns the model's family, with the names of its files. Random weights are of a composite's text part alone."""
    if config.model.init == "random" and hf["model_type"] in COMPOSITES:
        return FAMILIES[COMPOSITES[hf["model_type"]]]
    return as_stored_in(config.model.path, family_for(hf))


def offload_activations(chunks: Sequence[Any], engine: EngineConfig) -> ActivationOffload | None:
    """Makes layers save to the host, if the config says so. Returns the object that holds the saved tensors.

    All layers of a chunk are one unit. With `recompute: full` megatron saves their inputs outside of them, and these
    move too.
    """
    if "activations" not in engine.offload:
        return None
    offload = ActivationOffload()
    for chunk in chunks:
        for module in (chunk.decoder, *(chunk.mtp.layers if chunk.mtp_process else ())):
            offload.wrap(module)
    return offload


def agreed_spec(
    config: RoleConfig, fields: Mapping[str, Any], dims: ParallelDims, kept: str | None
) -> layer_spec.LayerSpec:
    """Returns the layer spec of this rank, the same on all. Arguments: as of `layer_spec.choose`. Collective.

    Each rank chooses by its own host. Raises ConfigError on every rank if one refuses, or chooses another spec than
    rank 0. They would train with different kernels, and under context parallelism wait for messages that never come.
    """
    dtype, lora = layer_spec.DTYPES[config.model.dtype], config.model.lora is not None
    spec = collective.call_on_every_rank(
        lambda: layer_spec.choose(config.engine, fields, dims, dtype=dtype, lora=lora, kept=kept)
    )
    name: str = spec.name
    if name == "te" and dims.cp > 1:
        name += f" with cp_comm_type {cp_comm_type(fields, dims)}"
    everyone = collective.all_ranks().gather((name, f"{name} on host {socket.gethostname()} ({spec.why})"))
    first, described = everyone[0]
    for other, differently in everyone:
        if other != first:
            fix = "install the same packages on all hosts, or set local"
            raise ConfigError(layer_spec.KEY, config.engine.layer_spec, f"is {described} but {differently}", fix)
    return spec
