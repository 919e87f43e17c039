"""A model of transformer-engine's own modules beside one of the local spec's, on fake CUDA tensors: what a worker finds."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from tests.cuda import fake, models  # before mrl: fake.py says what torch is here


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What mrl and megatron know a parameter by, but for its name in the module."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    eps: float | None  # of a norm's weight
    trains: bool
    sequence_parallel: bool  # its gradient is summed over the ranks of a sequence
    allreduce: bool  # its gradient is reduced over all replicas, not over an expert's
    in_norm: bool  # the gradient's norm counts it on tensor-parallel ranks other than the first


@dataclasses.dataclass(frozen=True)
class Found:
    spec: str
    modules: dict[str, set[str]]  # package of the class -> names of classes
    parameters: dict[tuple[Any, ...], Parameter]  # by the Hugging Face tensors that they are made of, and A or B
    stored: set[tuple[Any, ...]]  # entries of the sharded state dict: name, shapes, place, and who writes


def both(
    model: str, *, layers: int, rank: int, world: int, lora: bool, changes: dict, mtp: bool = False, **degrees: int
) -> list[Found]:
    """Returns what the specs te and local make of a model on one rank."""
    from mrl.config.schema import EngineConfig, LoraConfig, ModelConfig, MTPConfig, ParallelConfig, RoleConfig

    fake.join_world(rank, world)
    folder = models.write(model, Path(tempfile.mkdtemp()), layers, **changes)
    found = []
    for spec in ("te", "local"):
        role = RoleConfig(
            model=ModelConfig(path=str(folder), init="random", lora=LoraConfig() if lora else None),
            engine=EngineConfig(parallel=ParallelConfig(**degrees), layer_spec=spec), optimizer=None,
            mtp=MTPConfig() if mtp else None,
        )  # fmt: skip
        found.append(_of(role))
    return found


def _of(role: Any) -> Found:

    from mrl.engine.lora import identity
    from mrl.engine.megatron import dist_checkpoint
    from mrl.engine.megatron.engine import MegatronEngine

    identity.fingerprint = lambda *args: ""  # there are no weights in the folder
    with fake.Fake():
        engine = MegatronEngine(role)
        engine.init_model()  # asserts that the family's table names every parameter
        model, parameters = engine.model, {}
        adapters = {id(p) for m in model.chunks for name, p in m.named_parameters() if ".adapter." in name}
        for chunk, rules in zip(model.chunks, model.rules, strict=True):
            for name, parameter in chunk.named_parameters():
                rule, owner = rules[name], chunk.get_submodule(name.rpartition(".")[0])
                assert tuple(parameter.shape) == tuple(rule.shape()), name
                parameters[rule.hf, rule.layer, rule.expert, getattr(rule, "tensor", None)] = Parameter(
                    tuple(parameter.shape), str(parameter.dtype), parameter.device.type,
                    getattr(owner, "eps", None) if "norm" in rule.hf[0] else None, parameter.requires_grad,
                    bool(getattr(parameter, "sequence_parallel", False)), bool(getattr(parameter, "allreduce", True)),
                    bool(getattr(parameter, "tensor_model_parallel", False)),
                )  # fmt: skip
        modules: dict[str, set[str]] = {}
        for module in (m for chunk in model.chunks for m in chunk.modules()):
            modules.setdefault(type(module).__module__, set()).add(type(module).__name__)
            assert getattr(module, "normalization", "RMSNorm") == "RMSNorm", module
            centered = getattr(module, "zero_centered_gamma", model.transformer.layernorm_zero_centered_gamma)
            assert centered == model.transformer.layernorm_zero_centered_gamma, module
        for parameter in (p for chunk in model.chunks for p in chunk.parameters()):
            parameter.requires_grad_(not model.adapters or id(parameter) in adapters)  # as with an optimizer
        with model.state.installed():
            placed = dist_checkpoint._placed(model)
        stored = {
            (box.key, str(box.data.dtype), tuple(box.data.shape), tuple(box.whole), tuple(box.offsets), each.replica)
            for each in placed
            for box in each.boxes
        }
    return Found(model.spec, modules, parameters, stored)


def adam(model: str, further: dict, *, layers: int) -> dict[str, Any]:
    """Returns what `engine.megatron` (further) makes of AdamW: its class and, of FusedAdam, what it was made with; dtypes and
    devices of masters and of moments as they are before a step."""
    from mrl.config.schema import EngineConfig, ModelConfig, OptimizerConfig, RoleConfig
    from mrl.engine.megatron import optim
    from mrl.engine.megatron.engine import MegatronEngine

    fake.join_world(0, 1)
    folder = models.write(model, Path(tempfile.mkdtemp()), layers)
    engine = EngineConfig(layer_spec="te", megatron=further)
    role = RoleConfig(model=ModelConfig(path=str(folder), init="random"), engine=engine, optimizer=OptimizerConfig())
    with fake.Fake():
        made = MegatronEngine(role)
        made.init_model()
        [part] = optim.optimizers_of(made.model.optimizer)
        of = part.optimizer
        mains = [main for _, _, main, _ in optim.shards(made.model.optimizer)]
        moments = {
            name: sorted({_place(dict(optim.moments(part, main))[name]) for main in mains})
            for name in ("exp_avg", "exp_avg_sq")
        }
        fused = {name: str(vars(of)[name]) for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "master_weights",
                                                       "use_decoupled_grad", "adam_w_mode") if name in vars(of)}  # fmt: skip
        return {
            "class": f"{type(of).__module__.split('.')[0]} {type(of).__name__}", "fused": fused,
            "masters": sorted({_place(main) for main in mains}), **moments,
        }  # fmt: skip


def _place(tensor: Any) -> str:
    return f"{tensor.device.type} {tensor.dtype}".replace("torch.", "")
