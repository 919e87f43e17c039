"""Several roles on the same ranks: each is what it would be alone, and holds nothing while another works."""

import dataclasses

import pytest
import torch

from tests.engine.contract import assert_close
from tests.engine.harness import run_case
from tests.roles.cases import flat
from tests.roles.tiny_roles import roles
from tests.tiers import nightly_but

PAIRS = {
    "tp2 and fsdp": {"actor": "tp2", "critic": "fsdp", "reference": "fsdp"},
    "fsdp twice": {"actor": "fsdp", "critic": "fsdp"},
}


def run(case: str, configs, world_size: int = 2, **kwargs):
    return run_case(world_size, f"tests.roles.cases:{case}", configs=configs, **kwargs)


def heads(models, **fields):
    """Folders of a language model and of a sequence classifier."""
    return {"folder": models(**fields), "critic_folder": models(head="value", seed=1, **fields)}


@pytest.mark.parametrize("pair", nightly_but(["tp2 and fsdp"], PAIRS))
def test_trap_27_and_29_roles_share_no_state(models, pair):
    """Trap 27, with dropout: random numbers, process groups and optimizers of one role are not the other's. Trap 29: see
    tests/engine/test_traps_megatron.py for what ranks draw."""
    run("each_as_if_alone", roles(**heads(models, attention_dropout=0.3), **PAIRS[pair]))


@pytest.mark.slow
def test_config_offload_composes_with_idle_offload(models):
    configs = roles(**heads(models), actor="tp2", critic="fsdp")
    for role, kinds in (("actor", ("optimizer",)), ("critic", ("parameters", "gradients", "optimizer"))):
        engine = dataclasses.replace(configs[role].engine, offload=kinds)
        configs[role] = dataclasses.replace(configs[role], engine=engine)
    run("each_as_if_alone", configs)


@pytest.mark.parametrize(
    "layouts",
    [("tp2", "pp2"), pytest.param(("fsdp cp2", "fsdp"), marks=pytest.mark.nightly)],
)
def test_roles_on_two_processes_train_as_on_one(models, layouts):
    expected, weights, _, _ = run("trains", roles(**heads(models), actor="dp", critic="fsdp"), world_size=1)
    configs = roles(**heads(models), actor=layouts[0], critic=layouts[1])
    found, found_weights, lcm_dp_size, node_ids = run("trains", configs)
    assert lcm_dp_size == (1 if layouts == ("tp2", "pp2") else 2) and node_ids == [0, 0]
    for a, b in zip(flat(found), flat(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
    for role, expected in weights.items():
        assert_close(found_weights[role], expected, 1e-4)


@pytest.mark.parametrize(
    ("pair", "dtype"),
    nightly_but([("tp2 and fsdp", "bfloat16")], [("tp2 and fsdp", "bfloat16"), ("fsdp twice", "float32")]),
)
def test_idle_roles_hold_nothing(models, pair, dtype):
    run("idle_roles_hold_nothing", roles(**heads(models), **PAIRS[pair], options={"dtype": dtype}))


@pytest.mark.parametrize("actor", nightly_but(["pp2"], ["pp2", "fsdp"]))
def test_losses_add_up(models, actor):
    run("losses_add_up", roles(**heads(models), actor=actor, critic="fsdp"))


def test_trap_18_a_forward_leaves_nothing(models):
    run("a_forward_leaves_nothing", roles(**heads(models, attention_dropout=0.3), actor="pp2", critic="fsdp"))


@pytest.mark.parametrize("actor, critic", nightly_but([("dp", "fsdp cp2")], [("dp", "fsdp cp2"), ("fsdp", "pp2")]))
def test_trap_8_a_rank_with_nothing(models, actor, critic):
    run("a_rank_with_nothing", roles(**heads(models), actor=actor, critic=critic))


def test_generates_beside_others(models):
    run("generates_beside_others", roles(**heads(models), actor="pp2", critic="fsdp"))
