"""The te layer spec on a CPU: modules that hold what transformer-engine's hold, under the same names, in plain torch.

transformer-engine computes on GPUs alone. What mrl makes of its modules' names can be computed anywhere: rules of grouped
experts and fused norms, adapters on them, and checkpoints. These modules have the parameters that transformer-engine's
have (tests/cuda/test_te.py holds the real ones, without their arithmetic, to the same tables), inside
megatron's own TEGroupedMLP, in layouts that are those for transformer-engine ("thd").

    with te_like():                 engines whose config says `layer_spec: te` are built of them
        ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import experts as moe_experts
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from mrl.config.schema import EngineConfig, RoleConfig
from mrl.engine import collective
from mrl.engine.base import BaseEngine
from mrl.engine.megatron import model as engine_model
from mrl.mcore_models import elementwise, layer_spec, layers
from mrl.mcore_models.attention import SdpaAttention
from mrl.mcore_models.latent import LatentAttention, LatentSubmodules
from tests.engine import contract, generation, parity
from tests.engine.lora import make_engine
from tests.resume.runs import sharded_tensors


def _rms_norm(x: Tensor, weight: Tensor, of: Any) -> Tensor:
    """In fp32, rounded once; one function for autograd, so that what is computed again adds gradients in the same order.

    of: the module, with the epsilon and whether the factor is 1 + weight."""
    factor = weight.float() + 1 if of.zero_centered_gamma else weight.float()
    return elementwise.RMSNormFunction.apply(x.float(), factor, of.eps).to(x.dtype)


class Norm(torch.nn.Module):
    """As TENorm makes one."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self.weight, self)


class NormAndColumn(ColumnParallelLinear):
    """As TELayerNormColumnParallelLinear: an RMSNorm, with the epsilon of the config, and the linear after it."""

    made = 0

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        NormAndColumn.made += 1
        self.eps, self.zero_centered_gamma = config.layernorm_epsilon, config.layernorm_zero_centered_gamma
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        return super().forward(_rms_norm(x, self.layer_norm_weight, self), *args, **options)


class Grouped(torch.nn.Module):
    """As TEGroupedLinear: the matrices `weight0`, `weight1`, ... of all experts of a rank, and biases. Nothing marks them
    as parts, as of transformer-engine 2.20.2 in megatron-core 0.16.1."""

    axes: dict[str, int]
    made = 0

    def __init__(self, num_gemms: int, inputs: int, outputs: int, *, config: Any, init_method: Any, bias: bool,
                 skip_bias_add: bool, pg_collection: Any, **_: Any) -> None:  # fmt: skip
        super().__init__()
        Grouped.made += 1
        self.num_gemms, self.bias, self.gives_bias, self.groups = num_gemms, bias, skip_bias_add, pg_collection
        tp = pg_collection.expt_tp.size()
        outputs, inputs = (outputs // tp, inputs) if "bias" in self.axes else (outputs, inputs // tp)
        for expert in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
            init_method(weight)
            self.register_parameter(f"weight{expert}", weight)
            if bias:
                self.register_parameter(
                    f"bias{expert}", torch.nn.Parameter(torch.zeros(outputs, dtype=config.params_dtype))
                )
            else:  # as transformer-engine's, which no checkpoint has
                setattr(self, f"bias{expert}", torch.empty(0))
        for parameter in self.parameters():
            parameter.allreduce = config.expert_model_parallel_size == 1

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        biases = [self.get_parameter(f"bias{e}") for e in range(self.num_gemms)] if self.bias else None
        added = biases if biases is not None and not self.gives_bias else [None] * self.num_gemms
        weights = [self.get_parameter(f"weight{e}") for e in range(self.num_gemms)]
        out = torch.cat([F.linear(*part) for part in zip(x.split(m_splits), weights, added, strict=True)])
        return out, biases if self.gives_bias else None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict:
        """What TEGroupedLinear._sharded_state_dict_grouped of megatron makes."""
        result: dict[str, Any] = {}
        own = self.state_dict(prefix="", keep_vars=True)
        first, total = self.groups.ep.rank() * self.num_gemms, self.groups.ep.size() * self.num_gemms
        for expert in range(self.num_gemms):
            names = ["weight", "bias"] if self.bias else ["weight"]
            offsets = (*sharded_offsets, (len(sharded_offsets), first + expert, total))
            found = make_sharded_tensors_for_checkpoint(
                {f"{expert}.{name}": own[f"{name}{expert}"] for name in names}, "",
                {f"{expert}.{name}": axis for name, axis in self.axes.items()}, offsets, tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )  # fmt: skip
            replace_prefix_for_sharding(found, f"{expert}.", prefix)
            result |= {f"{prefix}{name}{expert}": found[f"{expert}.{name}"] for name in names}
        for entry in result.values():
            entry.replica_id = (*entry.replica_id[:2], self.groups.expt_dp.rank())
        return result


class GroupedColumn(Grouped):
    axes = {"weight": 0, "bias": 0}


class GroupedRow(Grouped):
    axes = {"weight": 1}


def _block_spec(config: Any, numbers: list[int]) -> TransformerBlockSubmodules:
    moe = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    made = [_layer(config, config.num_moe_experts if moe[i] else None) for i in numbers]
    return TransformerBlockSubmodules(layer_specs=layers.with_delta_nets(config, numbers, made), layer_norm=Norm)


def _layer(config: Any, experts: int | None) -> ModuleSpec:
    spec = layers._local_layer(config, experts)
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    if config.multi_latent_attention:
        latent = LatentSubmodules(
            up=NormAndColumn, heads=ColumnParallelLinear, norm=None, core_attention=SdpaAttention,
            linear_proj=RowParallelLinear,
        )  # fmt: skip
        parts.self_attention = ModuleSpec(module=LatentAttention, submodules=latent)
    else:
        parts.input_layernorm = IdentityOp
        of_heads = (
            {"q_layernorm": Norm, "k_layernorm": Norm} if config.qk_layernorm and not config.qk_norm_over_heads else {}
        )
        parts.self_attention.submodules = dataclasses.replace(
            parts.self_attention.submodules, linear_qkv=NormAndColumn, **of_heads
        )
    partial = isinstance(parts.mlp, functools.partial)  # megatron-core 0.19
    of_mlp = parts.mlp.keywords["submodules"] if partial else parts.mlp.submodules
    if isinstance(of_mlp, MoESubmodules):
        kind = moe_experts.GroupedMLPSubmodules if partial else moe_experts.MLPSubmodules
        grouped = kind(linear_fc1=GroupedColumn, linear_fc2=GroupedRow)
        build = functools.partial if partial else ModuleSpec
        of_mlp.experts = build(moe_experts.TEGroupedMLP, submodules=grouped)
        return spec
    parts.pre_mlp_layernorm = IdentityOp
    of_mlp = dataclasses.replace(of_mlp, linear_fc1=NormAndColumn)
    parts.mlp = (
        functools.partial(parts.mlp, submodules=of_mlp) if partial else ModuleSpec(module=MLP, submodules=of_mlp)
    )
    return spec


@contextlib.contextmanager
def te_like() -> Iterator[None]:
    """Inside, engines are built of these modules where their config has `engine.layer_spec: te`."""
    outside = layers.block_spec

    def block_spec(config: Any, numbers: list[int]) -> TransformerBlockSubmodules:
        return (_block_spec if config.layer_spec == "te" else outside)(config, numbers)

    def choose(engine: EngineConfig, *_: Any, kept: str | None = None, **__: Any) -> layer_spec.LayerSpec:
        name = kept if engine.layer_spec == "auto" else engine.layer_spec
        return layer_spec.LayerSpec("te" if name == "te" else "local", "as the test has it")

    with (
        mock.patch.object(layers, "block_spec", block_spec),
        mock.patch.object(engine_model.layer_spec, "choose", choose),
    ):
        yield


# -- in a world of processes -------------------------------------------------------------------------------------------


def measure(**arguments: Any) -> parity.Outcome | None:
    """`parity.measure` with the te spec."""
    config_of = parity.config_of

    def with_te(*given: Any) -> Any:
        role = config_of(*given)
        return dataclasses.replace(role, engine=dataclasses.replace(role.engine, layer_spec="te"))

    with mock.patch.object(parity, "config_of", with_te), te_like():
        before = NormAndColumn.made, Grouped.made
        outcome = parity.measure(**arguments)
        assert (NormAndColumn.made, Grouped.made) != before, "the model is of other modules"
        return outcome


def generates(config: RoleConfig, expected: list[tuple[list[int], bool]]) -> None:
    """Completions by the decoder over these modules' weights are those of transformers, of megatron's own forward over
    the modules themselves, and of steps in fixed shapes."""
    with te_like():
        before = NormAndColumn.made
        generation.samples_as_hugging_face(config, expected)
        assert NormAndColumn.made > before, "the model is of other modules"
        generation.gpt_model_itself_gives_the_same(config)
        generation.fixed_shapes_give_the_same(config)


def goes_on_under_the_other(
    first: RoleConfig, second: RoleConfig, folder: str, adapter: dict[str, Tensor] | None
) -> None:
    """What the one spec saves, the other reads and saves again: not a bit of weights, masters, moments and adapters
    changes, and no name. Their next step is the same within fp32's sums in another order."""

    def weights(engine: BaseEngine) -> dict[str, Tensor]:
        return dict(engine.hf_weights() if adapter is None else engine.adapter_weights())

    with te_like():
        one, other = make_engine(first, adapter), make_engine(second, adapter)
        assert {one.model.spec, other.model.spec} == {"te", "local"}
        contract.train(one, 2)
        for engine, path in ((one, f"{folder}/one"), (other, f"{folder}/other")):
            if engine is other:
                assert engine.load_state(f"{folder}/one") == {"n": 1}
            collective.on_main(lambda path=path: os.makedirs(path))
            engine.save_state(path, {"n": 1})
        losses = [contract.train(engine, 1, first=2)[0][0] for engine in (one, other)]
        after = [weights(one), weights(other)]
    if not one.is_main:
        return
    saved, again = (sharded_tensors(pathlib.Path(folder, name)) for name in ("one", "other"))
    assert saved.keys() == again.keys(), sorted(saved.keys() ^ again.keys())
    assert not [name for name in saved if "layer_norm_" in name or "extra_state" in name]
    different = [name for name, tensor in saved.items() if not torch.equal(tensor, again[name])]
    assert not different, different
    assert abs(losses[0] - losses[1]) < 1e-6 * abs(losses[0]), losses
    contract.assert_close(*after, 1e-5)
