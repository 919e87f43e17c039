"""What `engine.recompute` and `engine.recompute_modules` leave for the backward pass, and that they change no bit.

Measured are the storages of all that autograd has saved when the loss is computed, each once and as large as it is then, without
parameters: what a forward pass leaves on the device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.config.schema import LoraConfig, MoEConfig, RoleConfig
from mrl.errors import ConfigError
from mrl.mcore_models.layout import recompute_modules
from tests.engine import tiny
from tests.engine.contract import assert_equal, loss_fn
from tests.engine.harness import run_case
from tests.tiers import slow_but

ALL_BUT_ATTENTION = {
    "llama": ["layernorm", "mlp"],
    "deepseek_v3": ["layernorm", "mla_up_proj", "mlp", "moe"],
    "gpt_oss": ["layernorm", "moe"],
    "qwen3_5": ["layernorm", "mlp", "core_attn"],  # the rule of gated delta nets keeps most
}
SINGLE = {
    "llama": ["layernorm", "mlp", "core_attn"],
    "deepseek_v3": ["layernorm", "mlp", "moe", "shared_experts", "mla_up_proj", "core_attn"],
    "gpt_oss": ["core_attn", "moe"],
    "qwen3_5": ["mlp", "core_attn"],
}
TOGETHER = {"deepseek_v3": [["mla_up_proj", "core_attn"], ["layernorm", "shared_experts", "mla_up_proj"]]}


@dataclasses.dataclass
class Trained:
    """What a call of forward_backward_step has saved, and what came of it."""

    saved: int  # bytes, for the backward pass
    loss: float
    gradients: dict[str, Tensor]  # accumulated, by Hugging Face name


def trained(config: RoleConfig) -> Trained:
    from mrl.engine.registry import build_engine

    engine = build_engine(config)
    engine.init_model()
    engine.optimizer_zero_grad()
    kept = {p.untyped_storage()._cdata for chunk in engine.model.chunks for p in chunk.parameters()}
    saved: list[Tensor] = []
    at_loss: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def loss(*arguments: Any) -> Any:
        storages = {t.untyped_storage()._cdata: t.untyped_storage().size() for t in saved}
        at_loss.append(sum(size for key, size in storages.items() if key not in kept))
        return loss_fn(*arguments)

    engine.set_loss_fn(loss)
    share = engine.shard_data(tiny.uneven_batch(longest=40))
    with engine.train_mode(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _, found, _ = engine.forward_backward_step(share)
    assert len(at_loss) == 1, "one micro-batch"
    return Trained(at_loss[0], found, dict(engine.hf_gradients()))


def with_modules(config: RoleConfig, modules: list[str] | None, recompute: str = "selective") -> RoleConfig:
    chosen = None if modules is None else tuple(modules)
    engine = dataclasses.replace(config.engine, recompute=recompute, recompute_modules=chosen)
    return dataclasses.replace(config, engine=engine)


def saves(config: RoleConfig, choices: list[list[str] | None]) -> dict[str, int]:
    """Bytes saved without recomputation, with each of `choices`, and with full; loss and gradients are those without."""
    plain = trained(config)
    found = {"none": plain.saved}
    for modules in choices:
        ours = trained(with_modules(config, modules))
        assert ours.loss == plain.loss
        assert_equal(ours.gradients, plain.gradients)
        found["default" if modules is None else "+".join(modules)] = ours.saved
    found["full"] = trained(with_modules(config, None, "full")).saved
    return found


@pytest.mark.parametrize("family", slow_but([name for name in SINGLE if name != "qwen3_5"], SINGLE))
def test_each_name_saves_memory_and_changes_no_bit(folder, family):
    experts = {} if family in ("llama", "qwen3_5") else {"moe": MoEConfig(aux_loss=0.1, z_loss=0.1)}
    config = tiny.role(folder(family), backend="megatron", tokens=2000, **experts)
    choices = [*([name] for name in SINGLE[family]), *TOGETHER.get(family, []), None]
    found = run_case(1, f"{__name__}:saves", config=config, choices=choices)
    plain, full, together = found.pop("none"), found.pop("full"), found.pop("default")
    assert all(saved < plain for saved in found.values()), found
    assert full < together < min(found[name] for name in ALL_BUT_ATTENTION[family] if name in found)
    # together they save what each of them saves
    each = [plain - found[name] for name in ALL_BUT_ATTENTION[family] if name in found]
    assert len(each) < len(ALL_BUT_ATTENTION[family]) or plain - together >= 0.9 * sum(each)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"parallel": {"tp": 2}, "model": {"lora": LoraConfig(rank=4, dropout=0.2)}}),
        pytest.param("deepseek_v3", {"parallel": {"tp": 2}, "dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("qwen3_5", {"parallel": {"cp": 2}}, marks=pytest.mark.slow),
    ],
    ids=["llama tp2 lora", "deepseek_v3 tp2", "qwen3_5 cp2"],
)
def test_on_two_ranks(folder, family, options):
    config = tiny.role(folder(family), backend="megatron", tokens=2000, **options)
    choices = [None, ["core_attn"], ["layernorm"]]
    found = run_case(2, f"{__name__}:saves", config=config, choices=choices)
    assert found["full"] < found["default"] < found["layernorm"] < found["none"]


def chosen(modules: list[str] | None, spec: str | None, **fields: Any) -> list[str] | str:
    try:
        return recompute_modules(fields, modules, layer_spec=spec)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("moe", {}, "the model has none"), ("moe_act", {}, "the model has none"),
        ("shared_experts", {"num_moe_experts": 4, "moe_layer_freq": [0, 1]}, "the model has none"),
        ("mla_up_proj", {}, "which the model does not have"),
        ("mlp", {"num_moe_experts": 4, "moe_layer_freq": [1, 1]}, "all layers of the model have experts"),
    ],
)  # fmt: skip
def test_what_a_model_lacks_is_refused(name, fields, why):
    said = chosen([name], "te", **fields)
    assert said.startswith(f'engine.recompute_modules: value "{name}"') and why in said


def test_what_a_layer_spec_lacks():
    """Norms of a dense model are in transformer-engine's linears; those before experts and of latents are not."""
    experts, some = {"num_moe_experts": 4, "moe_layer_freq": [1, 1]}, {"moe_layer_freq": [0, 1]}
    latent = {"multi_latent_attention": True}
    assert chosen(None, "local") == chosen(None, None) == ["layernorm", "mlp"] and chosen(None, "te") == ["mlp"]
    assert "under engine.layer_spec te norms are part of the linear layers" in chosen(["layernorm"], "te")
    assert chosen(None, "te", **latent) == ["layernorm", "mla_up_proj", "mlp"]
    for spec in ("te", "local"):
        assert chosen(None, spec, **experts) == ["layernorm", "moe"]
        assert chosen(None, spec, **experts | some) == ["layernorm", "mlp", "moe"]
    assert chosen(["moe_act"], "te", **experts) == ["moe_act"]
    assert "needs experts that are computed together" in chosen(["moe_act"], "local", **experts)
    assert "is within moe, which computes it again already" in chosen(["moe", "moe_act"], "te", **experts)


def saves_under_te(config: RoleConfig, choices: list[list[str] | None]) -> dict[str, int]:
    from tests.engine.te_like import te_like

    with te_like():
        return saves(config, choices)


def test_activations_of_grouped_experts(folder):
    """megatron's own TEGroupedMLP, around linear layers in plain torch (tests/engine/te_like.py)."""
    config = tiny.role(folder("mixtral"), backend="megatron", tokens=2000, layer_spec="te")
    choices = [["moe_act"], ["layernorm"], ["layernorm", "moe_act"], None]
    found = run_case(1, f"{__name__}:saves_under_te", config=config, choices=choices)
    assert found["default"] < found["layernorm+moe_act"] < min(found["moe_act"], found["layernorm"])
    assert max(found["moe_act"], found["layernorm"]) < found["none"]
