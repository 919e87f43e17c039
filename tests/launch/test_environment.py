"""What torchrun and srun say about a process."""

from __future__ import annotations

import socket

import psutil
import pytest

from mrl.config.command import Part
from mrl.config.schema import EngineConfig, ModelConfig
from mrl.errors import ConfigError
from mrl.launch import environment
from mrl.launch.environment import first_host, interface_towards, joined_world, ranks_here
from mrl.parallel import ParallelDims

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "77"}  # fmt: skip


def test_nothing_to_join():
    assert joined_world({"PATH": "/bin"}) is None
    assert joined_world({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_an_environment_is_refused(missing):
    with pytest.raises(ConfigError, match=f"{missing} is not"):
        joined_world({k: v for k, v in TORCHRUN.items() if k != missing})


def test_srun_without_nodes_needs_an_address():
    srun = {name: SRUN[name] for name in ("SLURM_PROCID", "SLURM_NTASKS")}
    assert joined_world(srun | {"MASTER_ADDR": "head"}).variables["MASTER_ADDR"] == "head"
    assert joined_world(srun | {"SLURM_NODELIST": "a,b"}).variables["MASTER_ADDR"] == "a"
    for environ, why in ((srun, "SLURM_JOB_NODELIST is not"), (TORCHRUN | {"RANK": "x"}, "RANK is 'x'")):
        with pytest.raises(ConfigError, match=why):
            joined_world(environ)


def test_srun_derives_what_torch_needs():
    joined = joined_world(SRUN)
    assert (joined.launcher, joined.rank, joined.world_size) == ("srun", 5, 8)
    assert joined.variables["MASTER_ADDR"] == "gpu03"
    assert joined.variables["LOCAL_RANK"] == "1"
    assert 20000 <= int(joined.variables["MASTER_PORT"]) < 32000
    assert joined_world(SRUN | {"SLURM_PROCID": "6"}).variables["MASTER_PORT"] == joined.variables["MASTER_PORT"]


def test_srun_keeps_what_is_set_and_torchrun_inside_a_slurm_job_wins():
    joined = joined_world(SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (joined.variables["MASTER_ADDR"], joined.variables["MASTER_PORT"]) == ("head", "1234")
    joined = joined_world(SRUN | TORCHRUN)
    assert (joined.launcher, joined.rank, joined.world_size, joined.variables) == ("torchrun", 5, 8, TORCHRUN)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("gpu[03-07,11],login1", "gpu03"), ("gpu[7]", "gpu7"), ("n[1-2]-ib,n3", "n1-ib")],
)
def test_first_host(nodes, host):
    assert first_host(nodes) == host


def test_the_most_ranks_of_a_node():
    for environ, ranks in (({}, 1), ({"LOCAL_WORLD_SIZE": "4"}, 4), ({"SLURM_STEP_TASKS_PER_NODE": "1,4(x12)"}, 4)):
        assert ranks_here(environ) == ranks


def test_gloo_takes_the_interface_towards_the_first_process():
    """A machine's own address counts: the first process's machine has it on the interface that the others reach."""
    assert interface_towards("127.0.0.1") in ("lo", "lo0")
    assert interface_towards("no-such-host.invalid") is None
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                assert interface_towards(one.address) == name


GROWING = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
ONE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.mark.parametrize(
    "backend, degrees, environ, generates, generation, expected",
    [
        ("megatron", {"tp": 2}, {}, False, 9, ONE | GROWING),
        ("megatron", {"cp": 2}, {}, True, 8, ONE),  # vLLM inside the trainer does not sleep with the other
        ("megatron", {"tp": 2}, {}, False, 10, GROWING),  # Blackwell
        ("megatron", {"tp": 2}, {}, False, None, {}),
        ("megatron", {"pp": 2}, {}, False, 9, GROWING),
        ("fsdp", {"cp": 2}, {}, False, 9, GROWING),
        ("megatron", {"tp": 2}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_ALLOC_CONF": ""}, False, 9, {}),
        ("megatron", {}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, False, 9, {}),
    ],
)  # fmt: skip
def test_variables_of_gpus(backend, degrees, environ, generates, generation, expected):
    part = Part("", ModelConfig(path="model"), EngineConfig(backend=backend))
    dims = ParallelDims(world_size=2, **degrees)
    found = environment.variables_to_set([part], [dims], environ, generates=generates, generation=generation)
    assert found == expected


@pytest.mark.parametrize("says, expected", [("9.0\n8.6\n", 8), ("12.0\n", 12), ("[N/A]\n", None), (None, None)])
def test_the_generation_is_what_nvidia_smi_says(tmp_path, monkeypatch, says, expected):
    if says is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nprintf '{says}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.generation_of_gpus() == expected
