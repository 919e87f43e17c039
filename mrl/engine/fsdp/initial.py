"""Weights of a model that starts from scratch, as transformers initialises it, the same on any number of ranks."""

from __future__ import annotations

import copy
import hashlib

import torch
from torch import Tensor, nn

from mrl.engine.fsdp.blocks import blocks_of


class InitialWeights:
    """Makes the weights of one block, or of one module outside, at a time. hf: on the meta device, tied once.

    A block's weights are a function of (seed, its name).
    """

    def __init__(self, hf: nn.Module, *, seed: int, score: str | None = None) -> None:
        """score: the name of a value head, which starts at zero."""
        self.hf, self.seed, self.score = hf, seed, score
        blocks = {id(block) for block in blocks_of(hf)}
        self._units: dict[str, tuple[str, nn.Module]] = {}
        self._find("", hf, blocks)
        self._made: tuple[str, dict[str, Tensor]] = ("", {})

    def _find(self, name: str, module: nn.Module, blocks: set[int]) -> None:
        """Notes the unit of each parameter and buffer: (the unit's name, the unit)."""
        prefix = f"{name}." if name else ""
        if id(module) in blocks:
            self._units |= {prefix + inner: (name, module) for inner in module.state_dict()}
            return
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        self._units |= {prefix + inner: (name, module) for inner, _ in own}
        for child_name, child in module.named_children():
            self._find(prefix + child_name, child, blocks)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Returns rows `start` to `stop` of dimension 0 of a parameter or buffer."""
        unit_name, unit = self._units[name]
        if self._made[0] != unit_name or name not in self._made[1]:
            self._made = unit_name, self._make(unit_name, unit)
        whole = self._made[1][name]
        if name == self.score:
            whole = torch.zeros_like(whole)
        return whole[start:stop] if whole.ndim else whole

    @torch.no_grad()
    def _make(self, name: str, unit: nn.Module) -> dict[str, Tensor]:
        if id(unit) not in {id(block) for block in blocks_of(self.hf)}:
            unit = copy.copy(unit)  # without its children: they are units of their own
            unit._modules = {}
            unit._parameters = dict(unit._parameters)
            unit._buffers = dict(unit._buffers)
        made = copy.deepcopy(unit).to_empty(device="cpu")
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            # children first, as transformers initialises them (5.23, modeling_utils.py, smart_apply): a parent may
            # overwrite its children's weights
            for module in reversed(list(made.modules())):
                self.hf._init_weights(module)
        prefix = f"{name}." if name else ""
        return {prefix + inner: tensor for inner, tensor in made.state_dict().items()}
