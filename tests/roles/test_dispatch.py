"""Several roles on the same ranks: each is what it would be alone, and holds nothing while another works."""

import dataclasses
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

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


# -- checkpoints -------------------------------------------------------------------------------------------------------


RESUMED = [
    {"actor": "tp2", "critic": "fsdp", "reference": "pp2", "reward": "dp"},
    {"actor": "tp2", "critic": "external", "reference": "fsdp"},
]


@pytest.mark.slow
@pytest.mark.parametrize("layouts", nightly_but(RESUMED[:1], RESUMED), ids=str)
def test_resume_is_bitwise(models, tmp_path, layouts):
    configs = roles(models(attention_dropout=0.3), critic_folder=models(head="value", attention_dropout=0.3), **layouts)
    (tmp_path / "shared").mkdir()
    run("resume_is_bitwise", configs, path=str(tmp_path / "checkpoints"), folder=str(tmp_path / "shared"))


def test_other_roles_are_refused_by_name(models, tmp_path):
    folders = {"folder": models(), "critic_folder": models(head="value")}
    path = str(tmp_path / "checkpoints")
    both = roles(**folders, actor="dp", critic="fsdp")
    run("save_after_two", both, 1, path=path)
    step = f"{path}/step_00000002"

    def refused(message, case_path=path, alone=False, **layouts):
        run("refuses", roles(**folders, **layouts), 1, path=case_path, message=message, alone=alone)

    refused(f"{step}: has a role critic, and this run has only actor; resume with the algorithm", actor="dp")
    refused(
        f"{step}: has no reference (it has actor, critic), and this run has one",
        actor="dp", critic="fsdp", reference="dp",
    )  # fmt: skip
    both_engines = "was saved by the fsdp engine and this is the megatron engine; set critic.engine.backend to fsdp"
    refused(f"{step}/critic: {both_engines}", actor="dp", critic="dp")
    refused("holds the roles of `mrl ppo`", actor="fsdp", alone=True)
    one = str(tmp_path / "one")
    run("save_of_one_model", roles(models(), actor="dp"), 1, path=one)
    refused("step_00000002: holds one model, as of `mrl sft`, and no roles", case_path=one, actor="dp", critic="fsdp")
    damaged = shutil.copytree(step, str(tmp_path / "damaged"))
    os.truncate(f"{damaged}/critic/state.pt", 10)
    refused("damaged: critic/state.pt has 10 bytes", case_path=damaged, actor="dp", critic="fsdp")
    reward_too = roles(**folders, actor="dp", critic="fsdp", reward="dp")
    run("loads", reward_too, 1, path=path)  # the reward model is no part of it


# -- weights from one role to another ----------------------------------------------------------------------------------


FOLLOWED = [("fsdp", "pp2", "float32"), ("tp2", "external", "bfloat16")]


@pytest.mark.slow
@pytest.mark.parametrize(("actor", "reference", "dtype"), nightly_but(FOLLOWED[:1], FOLLOWED))
def test_the_reference_follows_the_actor(models, tmp_path, actor, reference, dtype):
    configs = roles(models(tied=True), actor=actor, reference=reference, options={"dtype": dtype})
    run("reference_follows_the_actor", configs, folder=str(tmp_path))


@pytest.mark.slow
def test_masters_follow_too(models):
    configs = roles(models(), actor="tp2", critic="fsdp", options={"dtype": "bfloat16", "head": "lm"})
    del configs["critic"]
    configs["other"] = roles(models(), actor="fsdp", options={"dtype": "bfloat16"})["actor"]
    run("masters_follow_too", configs, other=models(seed=5))


def test_trap_31_weights_that_are_not_whole_change_nothing(models, tmp_path):
    """The last tensor of the folder is missing, of another shape, or cut off: the first one is not taken either."""
    whole = models(seed=5)
    weights = load_file(f"{whole}/model.safetensors")
    *_, last = weights
    changes = {
        "lacks": ({k: v for k, v in weights.items() if k != last}, f"1 missing ({last})"),
        "shape": (weights | {last: torch.zeros(3)}, "of another shape"),
        "cut": (weights, "model.safetensors"),
    }
    for name, (tensors, message) in changes.items():
        folder = shutil.copytree(whole, str(tmp_path / name))
        save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        if name == "cut":
            os.truncate(f"{folder}/model.safetensors", os.path.getsize(f"{folder}/model.safetensors") - 100)
        configs = roles(models(), actor="tp2", reference="fsdp")
        run("refuses_weights", configs, other=folder, message=message)
