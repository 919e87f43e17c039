"""Environment variables: those that change a run are shown, and secrets are not."""

import pytest

from mrl.doctor import variables
from tests.doctor.conftest import by_name


def look(**environment):
    return by_name(variables.section(environment))


def test_what_is_set_is_shown_and_others_variables_are_not():
    assert look(HOME="/root", EDITOR="vi", PYTHONUNBUFFERED="1") == {}
    found = look(NCCL_SOCKET_NTHREADS="4", HF_HOME="/data/hf", HOME="/root")
    assert found["variables"].what == "set here: HF_HOME=/data/hf, NCCL_SOCKET_NTHREADS=4"


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY"])
def test_secrets_are_not_shown(name):
    found = look(**{name: "hf_secretsecret"})
    assert found["variables"].what == f"set here: {name}=(not shown)" and "secretsecret" not in repr(found)
    assert "TOKENIZERS_PARALLELISM=true" in look(TOKENIZERS_PARALLELISM="true")["variables"].what
