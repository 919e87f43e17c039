"""Rollouts of the native sampler: the same trajectories in every layout, conversations too, with the trainer's log-probs."""

import pytest

from tests.data.tiny_tokenizers import make_tokenizer
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.rollout.cases import STOP
from tests.rollout.environments import write_environments
from tests.tiers import in_tiers

# name -> (backend, degrees), all on two processes
LAYOUTS = {
    "fsdp dp2": ("fsdp", {}),
    "megatron tp2": ("megatron", {"tp": 2}),
    "megatron pp2": ("megatron", {"pp": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_model(str(tmp_path_factory.mktemp("model")), "qwen3", vocab=len(make_tokenizer()), eos_token_id=5)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_environments(tmp_path_factory.mktemp("environments"))


def run(case, layout, folder, **kwargs):
    backend, parallel = LAYOUTS[layout]
    config = tiny.role(folder, backend=backend, parallel=parallel, optimizer=None, tokens=128)
    return run_case(2, f"tests.rollout.cases:{case}", config=config, folder=folder, **kwargs)


def without_log_probs(trajectories):
    return [{k: v for k, v in t.items() if k != "log_probs"} for t in trajectories]


KINDS = [("stop texts", ["fsdp dp2", "megatron pp2"]), ("Count", ["fsdp dp2", "megatron tp2"]), ("Count", [*LAYOUTS])]


@pytest.mark.parametrize("kind, layouts", in_tiers(KINDS[:1], KINDS[1:2], KINDS))
def test_the_same_trajectories_in_every_layout(folder, path, kind, layouts):
    keys = {"environment": f"{path}:Count", "room": 40} if kind == "Count" else {"stop": STOP}
    first, *others = [run("samples", layout, folder, **keys) for layout in layouts]
    assert len(first) == 8 and len({tuple(t["tokens"]) for t in first}) == 8, "no two samples are alike"
    if kind == "Count":
        assert max(t["turns"] for t in first) == 3 and all(t["reward"] is not None for t in first)
    for other in others:
        assert without_log_probs(other) == without_log_probs(first)
        for one, two in zip(first, other, strict=True):
            assert two["log_probs"] == pytest.approx(one["log_probs"], abs=1e-5)


def test_saved_rollouts_are_replayed(folder, path, tmp_path):
    run("replays", "fsdp dp2", folder, path=str(tmp_path), environment=f"{path}:Count")


def test_a_fault_of_the_environment_reaches_every_rank(folder, path):
    run("faults_reach_every_rank", "megatron pp2", folder, environment=f"{path}:Answers")
