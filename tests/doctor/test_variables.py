"""Environment variables: those that change a run are named, with what they do, and secrets are not shown."""

import re

import pytest

from mrl.doctor import variables
from mrl.doctor.variables import RULES
from tests.doctor.conftest import by_name


def look(**environment):
    return by_name(variables.section(environment))


def test_what_is_set_is_shown_and_others_variables_are_not():
    assert look(HOME="/root", EDITOR="vi", PYTHONUNBUFFERED="1") == {}
    found = look(NCCL_SOCKET_NTHREADS="4", HF_HOME="/data/hf", HOME="/root")
    assert found["variables"].what == "also set: HF_HOME=/data/hf, NCCL_SOCKET_NTHREADS=4"


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY"])
def test_secrets_are_not_shown(name):
    found = look(**{name: "hf_secretsecret"})
    assert found["variables"].what == f"also set: {name}=(not shown)" and "secretsecret" not in repr(found)
    assert "TOKENIZERS_PARALLELISM=true" in look(TOKENIZERS_PARALLELISM="true")["variables"].what


@pytest.mark.parametrize(
    "name, value, level",
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "warning"),
        ("NVTE_FUSED_ATTN", "0", "warning"),
        ("NVTE_FLASH_ATTN", "0", "note"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "warning"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True", "note"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:true", "note"),
        ("HF_HUB_OFFLINE", "1", "note"),
        ("PYTHONOPTIMIZE", "2", "warning"),
    ],
)
def test_what_is_known_of_a_value(name, value, level):
    found = look(**{name: value})[f"variable.{name}"]
    assert found.level == level and found.what.startswith(f"{name}={value}: ")


def test_another_value_of_the_same_variable_is_only_shown():
    assert look(CUDA_LAUNCH_BLOCKING="0", NVTE_FUSED_ATTN="1").keys() == {"variables"}


def test_rules_are_about_names_that_are_looked_at():
    for rule in RULES:
        for name in re.sub(r"\([^)]*\)\??", "", rule.names).split("|"):
            whole = re.search(r"\(([A-Z_|]+)\)", rule.names)
            assert name.startswith(variables.PREFIXES) or (
                whole and whole[1].split("|")[0].startswith(variables.PREFIXES)
            ), rule.names
