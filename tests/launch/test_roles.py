"""What the models of a run share, as they share its processes: roles that want it otherwise are refused by name."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from mrl import cli
from mrl.config.command import Part
from mrl.config.schema import EngineConfig, ModelConfig
from mrl.launch import preflight
from tests.bad_input.mistakes import Workspace


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Workspace:
    made = Workspace(tmp_path)
    made.make()
    monkeypatch.chdir(tmp_path)
    return made


def invoke(*args: str):
    return CliRunner().invoke(cli.main, args)


def test_roles_share_the_kernel_of_attention(workspace):
    """Their processes are one, and so is the environment that transformer-engine reads."""
    fused = ["actor.engine={device: auto, attention: fused}", "actor.model.dtype=bfloat16"]
    refused = invoke("ppo", "ppo.yaml", *fused, "reference.engine.device=auto", "--dry-run")
    assert refused.exit_code == 2 and (
        'reference.engine.attention: value "auto" does not go with actor.engine.attention fused: ' in refused.stderr
    ), refused.output
    fused = EngineConfig(attention="fused")
    preflight._check_attention([Part(role, ModelConfig(path="m"), fused) for role in ("actor", "reference")])


def test_roles_share_the_buffers_of_tensor_parallel_communication(workspace):
    """One role may have none; two have the same."""
    engine = "{{device: cpu, layer_spec: te, parallel: {{tp: 2}}, micro_batch: {{tokens: {}}}, megatron: {{tp_comm_overlap: true}}}}"
    actor = ["actor.model.dtype=bfloat16", f"actor.engine={engine.format(64)}"]
    said = invoke("ppo", "ppo.yaml", *actor, f"reference.engine={engine.format(64)}", "--dry-run")
    assert said.exit_code == 0, said.output
    assert (
        "engine.megatron.tp_comm_overlap: every micro-batch is padded to engine.micro_batch.tokens (64)" in said.stdout
    )
    alone = "reference.engine={device: cpu, parallel: {tp: 2}}"
    assert invoke("ppo", "ppo.yaml", *actor, alone, "--dry-run").exit_code == 0
    refused = invoke("ppo", "ppo.yaml", *actor, f"reference.engine={engine.format(80)}", "--dry-run")
    assert (
        refused.exit_code == 2
        and (
            "reference.engine.megatron.tp_comm_overlap: value true asks for buffers of 80 places x 64 over 2 tensor-parallel "
            "ranks, and actor.engine.megatron.tp_comm_overlap for 64 places x 64 over 2 tensor-parallel ranks; give all models the same"
        )
        in refused.stderr
    ), refused.output
    short = invoke("ppo", "ppo.yaml", *actor, f"reference.engine={engine.format(20)}", "--dry-run")
    assert short.exit_code == 2 and "reference.engine.micro_batch.tokens: value 20 is less than " in short.stderr
