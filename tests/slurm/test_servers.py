"""`mrl ppo` with a real vLLM server on a node of its own, as template hetero starts them; stand-ins are in test_script.py."""

from __future__ import annotations

import warnings

import pytest
import yaml

from mrl import metrics
from mrl.trainers.rl.updates import FP32_GAP
from tests.engine import tiny
from tests.resume.rl import rl_runs
from tests.rollout.real_vllm import ENVIRONMENT, VENV
from tests.slurm import slurm_site
from tests.trainers.tiny_runs import load_example

NODES = ("--nodes", "1", "--gpus-per-node", "0", "--processes-per-node", "1", "--cpus-per-task", "1", "--time", "30:00")
BESIDE = ("VLLM_SERVER_DEV_MODE",)
"""Of the server's environment: what the job's script sets itself."""


def make_model(folder: str) -> None:
    """Wide enough for vLLM's attention."""
    tokenizer = load_example("arithmetic/make_data.py").make_tokenizer()
    wide = {"head_dim": 32, "hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.06}
    tiny.make_model(folder, "qwen3", vocab=len(tokenizer), **wide)
    tokenizer.save_pretrained(folder)


@pytest.mark.nightly
def test_a_run_samples_from_a_real_vllm_on_a_node_of_its_own(site):
    """Two iterations, so that a trained actor's weights are handed over too."""
    python = VENV / "bin" / "python"
    if not python.exists():
        reason = f"no vLLM in {VENV}: run `make vllm-venv`, or set MRL_TEST_VLLM_VENV to a venv that has it"
        warnings.warn(f"a real vLLM in a Slurm job is not tried: {reason}", stacklevel=1)
        pytest.skip(reason)
    inputs, run_dir = rl_runs.make_inputs(site.folder), site.folder / "run"
    make_model(str(inputs / "served"))
    config = rl_runs.make_config(
        inputs, run_dir, "grpo",
        actor={"model": {"path": "served"}},
        rollout={"backend": "vllm"},
        algorithm={"epochs": 1, "mini_batch_size": 8},
        train={"steps": 2, "guards": True},
    )  # fmt: skip
    path = site.folder / "grpo.yaml"
    path.write_text(yaml.safe_dump(config))
    environment = [
        f"--servers-setup=export {name}={value}" for name, value in ENVIRONMENT.items() if name not in BESIDE
    ]
    servers = ("--template", "hetero", "--servers-nodes", "1", "--servers-cpus-per-task", "2")
    servers = (*servers, f"--servers-python={python}")
    arguments = ("--servers-arguments=--enforce-eager", "--servers-setup=unset PYTHONPATH", *environment)
    job = site.submit("ppo", path, *NODES, *servers, *arguments)
    ended, slurm_dir = site.wait(job), run_dir / "slurm"
    servers_log = slurm_dir / f"{job}.0" / "servers.log"
    assert ended.fields["ExitCode"] == "0:0", slurm_site.log(run_dir, job) + servers_log.read_text()[-3000:]
    said = slurm_site.history(run_dir, job)
    assert said[0].startswith("servers: http://127.0.0.1:"), said
    assert said[1:] == ["start 0 on n1, from checkpoint none", "done"]
    rows = [row for row in metrics.read(run_dir / "metrics.jsonl") if row["step"]]  # 0 is an evaluation
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["rollout/logprob_gap"] < FP32_GAP for row in rows), rows
    assert rows[0]["train/grad_norm"] > 0
