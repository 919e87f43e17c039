"""Checkpoints of all roles, and weights that one role gives to another."""

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.harness import run_case
from tests.roles.tiny_roles import roles
from tests.tiers import nightly_but


def run(case: str, configs, world_size: int = 2, module: str = "checkpoint_cases", **kwargs):
    return run_case(world_size, f"tests.roles.{module}:{case}", configs=configs, **kwargs)


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
    run("reference_follows_the_actor", configs, module="cases", folder=str(tmp_path))


@pytest.mark.slow
def test_masters_follow_too(models):
    configs = roles(models(), actor="tp2", critic="fsdp", options={"dtype": "bfloat16", "head": "lm"})
    del configs["critic"]
    configs["other"] = roles(models(), actor="fsdp", options={"dtype": "bfloat16"})["actor"]
    run("masters_follow_too", configs, module="cases", other=models(seed=5))


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
        run("refuses_weights", configs, module="cases", other=folder, message=message)
