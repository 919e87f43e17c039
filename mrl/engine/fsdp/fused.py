"""Gives the norms, MLPs and rotary embeddings of transformers models one kernel in each direction, on a GPU.

A module is taken by what it computes, not by its class. Its own forward runs here on a few bfloat16 numbers, and the
kernel's formula must give the same bits. So every model of a known form gets the kernels, and a new form keeps its own:
norms that round once (OLMo 2, gpt-oss), LayerNorm, gated norms, neighbours that turn together (GLM-4, DeepSeek's latent
attention), stacked experts. On a CPU transformers' own code runs.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mrl.kernels import layers, operators

GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
JOINT = {"gate_up_proj", "down_proj", "activation_fn"}
WIDTHS = {"gate_proj": (8, 6), "up_proj": (8, 6), "gate_up_proj": (8, 12), "down_proj": (6, 8)}  # of a trial
ROTARY = "apply_rotary_pos_emb"  # transformers' name for it, in the file of each model


def use_kernels(hf: nn.Module) -> list[str]:
    """Gives the modules of a model kernels. Returns the names of their classes and functions. `hf` may lie on the meta
    device."""
    forms: dict[Any, Any] = {}  # by class and options: modules of all layers are alike
    taken = set()

    def form(find: Callable[[Any], Any], of: Any, *alike: Any) -> Any:
        key = (find, *alike)
        if key not in forms:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                torch.manual_seed(0)
                try:
                    forms[key] = find(of)
                except (RuntimeError, TypeError):  # it takes other arguments or shapes
                    forms[key] = None
        return forms[key]

    for module in hf.modules():
        parts, own = dict(module.named_children()), dict(module.named_parameters(recurse=False))
        if not parts and own.keys() == {"weight"} and own["weight"].dim() == 1:
            norm = form(_norm_form, module, type(module), len(own["weight"]), _eps(module))
            if norm is not None:
                module.forward = functools.partial(_norm, module, *norm)
                taken.add(type(module).__name__)
        elif parts.keys() in (GATED, JOINT):
            mlp = form(_mlp_form, module, type(module), *map(type, parts.values()))
            if mlp is not None:
                module.forward = functools.partial(mlp, module)
                taken.add(type(module).__name__)
    for name in sorted({type(module).__module__ for module in hf.modules()}):
        names = vars(sys.modules[name])
        rotary = names.get(ROTARY)
        if rotary is not None and not isinstance(rotary, FusedRotary) and form(_rotates_halves, rotary, name):
            names[ROTARY] = FusedRotary(rotary)
        if isinstance(names.get(ROTARY), FusedRotary):
            taken.add(ROTARY)
    return sorted(taken)


# -- norms -------------------------------------------------------------------------------------------------------------


def _eps(module: nn.Module) -> float | None:
    found = [vars(module)[name] for name in ("variance_epsilon", "eps") if name in vars(module)]
    return found[0] if len(found) == 1 and isinstance(found[0], float) else None


def _norm_form(module: nn.Module) -> tuple[float, bool] | None:
    """Returns eps, and whether the factor is 1 + weight, of a norm that the kernel computes."""
    eps = _eps(module)
    if eps is None or len(inspect.signature(type(module).forward).parameters) != 2:
        return None
    size = len(module.weight)
    weight = torch.rand(size, dtype=torch.bfloat16)
    x = (torch.randn(4, size) * torch.tensor([1e-3, 1.0, 30.0, 0.0])[:, None]).bfloat16()
    found = torch.func.functional_call(module, {"weight": weight}, (x,))
    unit = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    for centered in (False, True):
        expected = (unit * (1.0 + weight.float())).bfloat16() if centered else weight * unit.bfloat16()
        if torch.equal(found, expected):
            return eps, centered
    return None


def _norm(self: nn.Module, eps: float, centered: bool, x: Tensor) -> Tensor:
    if layers.norm_fits(x, self.weight):
        return layers.rms_norm(x, self.weight, eps, centered)
    return type(self).forward(self, x)


# -- MLPs --------------------------------------------------------------------------------------------------------------


def _mlp_form(module: nn.Module) -> Callable[..., Tensor] | None:
    """Returns the forward of an MLP whose activation is SwiGLU."""
    alone: Any = copy.deepcopy(module)
    for name, (inputs, outputs) in WIDTHS.items():
        if hasattr(alone, name):
            setattr(alone, name, nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16))
    x = torch.randn(5, 8).bfloat16()
    joint = hasattr(alone, "gate_up_proj")
    gate, up = alone.gate_up_proj(x).chunk(2, dim=-1) if joint else (alone.gate_proj(x), alone.up_proj(x))
    if not torch.equal(alone(x), alone.down_proj(F.silu(gate) * up)):
        return None
    return _joint if joint else _gated


def _gated(self: nn.Module, x: Tensor) -> Tensor:
    if not operators.supports(x):
        return type(self).forward(self, x)
    return self.down_proj(layers.swiglu(self.gate_proj(x), self.up_proj(x)))


def _joint(self: nn.Module, x: Tensor) -> Tensor:
    if not operators.supports(x):
        return type(self).forward(self, x)
    return self.down_proj(layers.swiglu(self.gate_up_proj(x)))


# -- rotary embedding --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FusedRotary:
    """Takes the place of a model's `apply_rotary_pos_emb`."""

    own: Callable[..., Any]

    def __call__(self, *given: Any, **options: Any) -> Any:
        if options or len(given) != 4:  # queries alone, other positions or another dimension of heads
            return self.own(*given, **options)
        q, k, cos, sin = given
        same = q.dtype == k.dtype == cos.dtype == sin.dtype and cos.dim() == 3
        if not same or not operators.supports(q):
            return self.own(q, k, cos, sin)
        turned = layers.rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return tuple(t.transpose(1, 2) for t in turned)


def _rotates_halves(own: Callable[..., Any]) -> bool:
    """Returns whether a function turns q and k [R, H, L, D] by cosines and sines [R, L, D], halves apart."""
    if list(inspect.signature(own).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return False
    for turned in (8, 4):
        q, k, cos, sin = (torch.randn(*s).bfloat16() for s in ((2, 3, 5, 8), (2, 1, 5, 8), *[(2, 5, turned)] * 2))
        try:
            found = own(q, k, cos, sin)
        except RuntimeError:
            return turned < 8  # no channels stay as they are in this model
        for x, result in zip((q, k), found, strict=True):
            a, b = x[..., :turned].chunk(2, dim=-1)
            expected = x[..., :turned] * cos[:, None] + torch.cat([-b, a], dim=-1) * sin[:, None]
            if not torch.equal(result, torch.cat([expected, x[..., turned:]], dim=-1)):
                return False
    return True
