"""The models of a server on real engines: what a first step tells of the server itself."""

from __future__ import annotations

import dataclasses

import pytest

from mrl.algorithms.sums import DENOMINATOR
from mrl.config.schema import RoleConfig
from mrl.config.serve import ServeKeys
from mrl.engine.registry import build_engine
from mrl.engine.trained_state import Update
from mrl.serve import operations as ops
from mrl.serve.models import Models, OwnFault
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.engine.layouts import world_and_role

FULL = ops.Kind()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_model(str(tmp_path_factory.mktemp("model")), "qwen3")


def test_the_first_step_of_each_model_is_looked_at(folder):
    processes, role = world_and_role("fsdp dp2", folder)
    run_case(processes, f"{__name__}:first_steps", config=role)


def first_steps(config: RoleConfig) -> None:
    """A parameter that has no gradient is the server's fault; one that a rate of 0 leaves as it was is none."""
    engine = build_engine(config)
    engine.init_model()
    models, unwatched = (Models(engine, None, None, config.model.path, ServeKeys(guards=on)) for on in (True, False))
    for name in ("a", "b"):
        models.do(ops.Create(name, FULL))
    unwatched.do(ops.Create("c", FULL))
    for _ in range(2):  # the fault stays, and is said again
        with pytest.raises(OwnFault, match=r"optim_step: did not train .*: model.norm.weight: it has no gradient; "):
            step(models, "a", lr=1e-3, without="model.norm.weight")
    step(unwatched, "c", lr=1e-3, without="model.norm.weight")
    assert step(models, "b", lr=0.0) > 0, "a model of its own"
    step(models, "b", lr=1e-3, without="model.norm.weight")  # only the first step is looked at
    models.do(ops.Forget(models=["b"]))
    models.do(ops.Create("b", FULL))
    with pytest.raises(OwnFault):
        step(models, "b", lr=1e-3, without="model.norm.weight")
    assert step(models, "a", lr=1e-3) > 0


def step(models: Models, name: str, lr: float, without: str | None = None) -> float:
    """A step after one pass; without: a parameter whose gradient is lost between them. Returns the gradients' norm."""
    made = tiny.uneven_batch()
    data = dataclasses.replace(made, token_fields={"weights": made.loss_mask}, denominators={DENOMINATOR: 1.0})
    models.do(ops.Pass(name, data, "cross_entropy", {}, forward_only=False))
    if without is not None:
        models.engine.model.trained()[without].grad = None
    update = Update(lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_grad=0.0)
    return models.do(ops.Step(name, update))["grad_norm"]
