"""LoRA in a transformers model before it is sharded: peft's layers, their names in files, their starting values."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Collection, Iterator, Mapping

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mrl.config.schema import RoleConfig
from mrl.engine.lora.selection import inject, injection
from mrl.engine.lora.shapes import ADAPTER, SCORE, AdapterShape, by_tensor, initial_a, name_in_base, name_in_file


class Adapters:
    """Puts adapters into `hf`, a model on the meta device, and knows them by their names in files.

    Everything else is frozen, but for a value head. If the model computes in bfloat16, what is frozen is held in it.

    kept: parameters of `hf` that are fp32 all the same. shapes: by what each adapts.
    """

    def __init__(self, hf: nn.Module, config: RoleConfig, kept: Collection[nn.Parameter] = ()) -> None:
        assert config.model.lora is not None
        self.seed, self.hf = config.seed, hf
        found = injection(config.model.path, config.model.lora, config.head)
        inject(hf, copy.deepcopy(found.config))
        self.shapes: dict[str, AdapterShape] = dict(found.shapes)
        self._files = {name: file for name, _ in hf.named_parameters() if (file := name_in_file(name)) is not None}
        wanted = by_tensor(self.shapes).keys()
        assert wanted == set(self._files.values()), f"peft made {sorted(wanted ^ set(self._files.values()))}"
        if config.head == "value":
            score = hf.get_output_embeddings().weight
            score.requires_grad_(True)
            self._files |= {name: SCORE for name, parameter in hf.named_parameters() if parameter is score}
        if config.model.dtype == "bfloat16":
            ids = {id(parameter) for parameter in kept}
            for name, parameter in hf.named_parameters():
                if name not in self._files and id(parameter) not in ids:
                    parameter.data = parameter.data.to(torch.bfloat16)

    def base(self) -> dict[str, nn.Parameter]:
        """Returns the parameters of the model without adapters, by their names in transformers."""
        return {
            name_in_base(name): parameter
            for name, parameter in self.hf.named_parameters()
            if name_in_file(name) is None
        }

    def trained(self) -> dict[str, nn.Parameter]:
        """Returns what trains, by its name in an adapter's file."""
        return {self._files[name]: p for name, p in self.hf.named_parameters() if name in self._files}

    @torch.no_grad()
    def fill(self) -> None:
        """Fills this rank's shards with the starting values."""
        trained = self.trained()
        for shape in self.shapes.values():
            trained[shape.b_name].to_local().zero_()
            a = trained[shape.a_name]
            offset, rows = _rows(a)
            a.to_local().copy_(initial_a(shape, self.seed)[offset : offset + rows])

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts the tensors of an adapter's file into this rank's shards."""
        for name, parameter in self.trained().items():
            offset, rows = _rows(parameter)
            parameter.to_local().copy_(tensors[name][offset : offset + rows])

    def set_scale(self, scale: float) -> None:
        """Scales all adapters by `scale`."""
        for module in self.hf.modules():
            if isinstance(module, LoraLayer):
                module.scaling[ADAPTER] = scale
        self.shapes = {name: dataclasses.replace(shape, scale=scale) for name, shape in self.shapes.items()}

    def zero_b_names(self) -> set[str]:
        """Returns the names of A whose B is zero on this rank: their gradient is exactly zero, and rightly."""
        trained = self.trained()
        return {s.a_name for s in self.shapes.values() if not bool(trained[s.b_name].to_local().any())}

    def merged(self, name: str, whole: Tensor) -> Tensor:
        """Returns the base's parameter `name` with its adapter added in, fp32; `whole` itself where it has none.
        Collective."""
        shape = self.shapes.get(name) or self.shapes.get(name.removesuffix(".weight"))
        if shape is None:
            return whole
        trained = self.trained()
        a, b = (trained[n].detach().full_tensor().float() for n in (shape.a_name, shape.b_name))
        return whole.float() + shape.delta(a, b)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Runs layers without their adapters, inside the context."""
        layers = [module for module in self.hf.modules() if isinstance(module, LoraLayer)]
        for layer in layers:
            # peft's own switch (enable_adapters) changes requires_grad too, of parameters that FSDP holds
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False


def _rows(parameter: Tensor) -> tuple[int, int]:
    """Returns (first row, rows) of this rank's shard of a parameter that is sharded by rows."""
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0], shape[0]
