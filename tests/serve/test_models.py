"""The models of a server on real engines: what a first step tells of the server itself, and what memory that runs out
leaves behind.

Adapters of a rank in an engine of a higher one: they act alike, and come back as they were.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mrl.algorithms.sums import DENOMINATOR
from mrl.config.schema import LoraConfig, RoleConfig
from mrl.config.serve import ServeKeys
from mrl.engine.base import Completion
from mrl.engine.lora.shapes import AdapterShape
from mrl.engine.registry import build_engine
from mrl.engine.sampling import SamplingParams
from mrl.engine.trained_state import UpdateSettings
from mrl.errors import UserError
from mrl.serve import models as models_module
from mrl.serve import operations as ops
from mrl.serve import padded
from mrl.serve.models import Models, ServerFault
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.engine.layouts import world_and_role
from tests.tiers import slow_but

FULL = ops.ModelKind()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_model(str(tmp_path_factory.mktemp("model")), "qwen3")


@pytest.mark.slow
def test_the_first_step_of_each_model_is_looked_at(folder):
    processes, role = world_and_role("fsdp", folder, size=1)
    run_case(processes, f"{__name__}:first_steps", config=role)


def first_steps(config: RoleConfig) -> None:
    """A parameter that has no gradient is the server's fault; one that a rate of 0 leaves as it was is none."""
    engine = build_engine(config)
    engine.init_model()
    models, unwatched = (Models(engine, None, None, config.model.path, ServeKeys(guards=on)) for on in (True, False))
    for name in ("a", "b"):
        models.do(ops.CreateModel(name, FULL))
    unwatched.do(ops.CreateModel("c", FULL))
    for _ in range(2):  # the fault stays, and is said again
        with pytest.raises(ServerFault, match=r"optim_step: did not train .*: model.norm.weight: it has no gradient; "):
            step(models, "a", lr=1e-3, without="model.norm.weight")
    step(unwatched, "c", lr=1e-3, without="model.norm.weight")
    assert step(models, "b", lr=0.0) > 0, "a model of its own"
    step(models, "b", lr=1e-3, without="model.norm.weight")  # only the first step is looked at
    models.do(ops.ForgetModels(models=["b"]))
    models.do(ops.CreateModel("b", FULL))
    with pytest.raises(ServerFault):
        step(models, "b", lr=1e-3, without="model.norm.weight")
    assert step(models, "a", lr=1e-3) > 0


def test_memory_that_runs_out_ends_one_call(folder):
    processes, role = world_and_role("fsdp", folder, size=1)
    run_case(processes, f"{__name__}:without_memory", config=role)


class Hungry(models_module.SummedLoss):
    """A loss for which there is no memory at its second micro-batch."""

    seen = 0

    def __call__(self, *given):
        Hungry.seen += 1
        if Hungry.seen == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")
        return super().__call__(*given)


def without_memory(config: RoleConfig) -> None:
    """The gradients of its model are forgotten, and all goes on as if it had not been asked; other models, as they were."""
    engine = build_engine(config)
    engine.init_model()
    models = Models(engine, None, None, config.model.path, ServeKeys())
    for name in ("a", "b", "undisturbed"):
        models.do(ops.CreateModel(name, FULL))
    expected = [step(models, "undisturbed", lr=1e-2) for _ in range(3)]
    assert [step(models, "a", lr=1e-2), step(models, "b", lr=1e-2)] == [expected[0]] * 2
    models.do(gradients("a"))
    models.do(gradients("b"))
    models_module.SummedLoss, right = Hungry, models_module.SummedLoss
    Hungry.seen = 0
    try:
        with pytest.raises(ServerFault, match="forward_backward: ran out of memory .*9 GiB.; lower engine.micro_batch"):
            models.do(gradients("a"))
    finally:
        models_module.SummedLoss = right
    update = UpdateSettings(1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_grad=0.0)
    with pytest.raises(UserError, match="optim_step: has no gradient"):
        models.do(ops.OptimizerStep("a", update))
    assert [step(models, "a", lr=1e-2) for _ in range(2)] == expected[1:]
    assert models.do(ops.OptimizerStep("b", update))["grad_norm"] == expected[1], "what it had accumulated is there"
    models.do(gradients("a"))
    models.do(ops.DropGradients("a"))
    with pytest.raises(UserError, match="optim_step: has no gradient"):
        models.do(ops.OptimizerStep("a", update))
    _sampling_without_memory(models)


def _sampling_without_memory(models: Models) -> None:
    """What was drawn from the snapshot is given up, and the next samples are whole."""
    sample = ops.DrawSamples([5, 6, 7], 1, 4, SamplingParams(temperature=1.0), 3, [], [])
    [whole] = models.do(ops.ContinueSampling(None, {"1": sample}, 16)).values()
    assert models.do(ops.ContinueSampling(None, {"2": sample}, 2)) == {}
    generate = models.engine.generate

    def fails(*_: object, **__: object) -> list[Completion]:
        raise torch.OutOfMemoryError("no room")

    models.engine.generate = fails
    with pytest.raises(ServerFault, match=r"asample: ran out of memory \(no room\)"):
        models.do(ops.ContinueSampling(None, {"3": sample}, 2))
    models.engine.generate = generate
    assert not models.running
    [again] = models.do(ops.ContinueSampling(None, {"4": sample}, 16)).values()
    assert again.completions == whole.completions and not models.running


@pytest.mark.parametrize(
    ("backend", "rank", "family"),
    slow_but([("megatron", 4, "qwen3")], [("megatron", 4, "qwen3"), ("fsdp", None, "qwen3_5")]),
)
def test_samples_that_take_turns_are_those_drawn_alone(tmp_path, backend, rank, family):
    processes, role = world_and_role(backend, tiny.make_model(str(tmp_path), family), size=1)
    if rank is not None:
        role = dataclasses.replace(role, model=dataclasses.replace(role.model, lora=LoraConfig(rank=2 * rank)))
    run_case(processes, f"{__name__}:turns", config=role, kind=ops.ModelKind(rank))


def turns(config: RoleConfig, kind: ops.ModelKind) -> None:
    """Two snapshots of a model, a part of each at a time, and steps of the model between them."""
    engine = build_engine(config)
    engine.init_model()
    models = Models(engine, None, config.model.lora, config.model.path, ServeKeys())
    models.do(ops.CreateModel("a", kind))
    snapshots = ("before", "after")
    for name in snapshots:
        step(models, "a", lr=0.1)
        models.do(ops.TakeSnapshot("a", name))
    sample = ops.DrawSamples([5, 6, 7], 2, 6, SamplingParams(temperature=1.0), 3, [], [])
    alone = {name: models.do(ops.ContinueSampling(name, {"0": sample}, 16))["0"].completions for name in snapshots}
    assert alone["before"] != alone["after"]
    begun = {name: {"0": sample} for name in snapshots}
    found = {}
    for _ in range(3):
        for name in snapshots:
            for sampled in models.do(ops.ContinueSampling(name, begun.pop(name, {}), 2)).values():
                found[name] = sampled.completions
            step(models, "a", lr=0.1)
    assert {name: [one.tokens for one in of] for name, of in found.items()} == {
        name: [one.tokens for one in of] for name, of in alone.items()
    }
    for name in snapshots:
        for one, whole in zip(found[name], alone[name], strict=True):
            assert one.log_probs == pytest.approx(whole.log_probs, abs=1e-5)
    assert not models.running


def gradients(name: str) -> ops.ForwardPass:
    """A pass that accumulates them."""
    made = tiny.uneven_batch()
    data = dataclasses.replace(made, token_fields={"weights": made.loss_mask}, denominators={DENOMINATOR: 1.0})
    return ops.ForwardPass(name, data, "cross_entropy", {}, forward_only=False)


def step(models: Models, name: str, lr: float, without: str | None = None) -> float:
    """A step after one pass; without: a parameter whose gradient is lost between them. Returns the gradients' norm."""
    models.do(gradients(name))
    if without is not None:
        models.engine.model.trained()[without].grad = None
    update = UpdateSettings(lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_grad=0.0)
    return models.do(ops.OptimizerStep(name, update))["grad_norm"]


RANK = 8
SHAPES = {
    name: AdapterShape(name, name, 6, 5, 3, 1.0, experts)
    for name, experts in (("layers.0.self_attn.q_proj", 0), ("layers.0.mlp.experts.up", 4), ("layers.0.mlp.gate", 0))
}


def products(tensors, shapes, rank):
    """B A of each adapter, [E, O, I]."""
    found = {}
    for name, shape in shapes.items():
        experts = max(shape.experts, 1)
        a, b = tensors[shape.a_name], tensors[shape.b_name]
        found[name] = torch.stack([b[:, e::experts] @ a[e * rank : (e + 1) * rank] for e in range(experts)])
    return found


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator)
        for each in SHAPES.values()
        for name, shape in ((each.a_name, each.a_shape), (each.b_name, each.b_shape))
    }


def test_a_wider_adapter_acts_as_the_narrow_one(tensors):
    wide = padded.pad_rank(tensors, SHAPES, RANK)
    shapes = {name: dataclasses.replace(shape, rank=RANK) for name, shape in SHAPES.items()}
    for shape in shapes.values():
        assert wide[shape.a_name].shape == shape.a_shape and wide[shape.b_name].shape == shape.b_shape
    for name, expected in products(tensors, SHAPES, 3).items():
        torch.testing.assert_close(products(wide, shapes, RANK)[name], expected)
    back = padded.unpad_rank(wide, SHAPES)
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(("attention", "mlp"), [(True, True), (True, False), (False, True)])
def test_what_is_not_adapted_is_zero(attention, mlp):
    found = padded.initial_adapters(SHAPES, RANK, seed=1, attention=attention, mlp=mlp)
    again = padded.initial_adapters(SHAPES, RANK, seed=2, attention=attention, mlp=mlp)
    for name, shape in SHAPES.items():
        wanted = attention if "self_attn" in name else mlp
        a = found[shape.a_name].view(max(shape.experts, 1), RANK, -1)
        assert not found[shape.b_name].any() and not a[:, shape.rank :].any()
        assert bool(a[:, : shape.rank].all()) == wanted and torch.equal(again[shape.a_name], a.flatten(0, 1)) != wanted
