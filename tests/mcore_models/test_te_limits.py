"""Which models transformer-engine's attention is said not to serve. Its own choice: tests/cuda/test_te.py."""

import dataclasses
import importlib.metadata

import pytest
import torch
from packaging.version import Version

from mrl.mcore_models.te_limits import Gpu, cp_comm_type, te_refusal, te_warning
from mrl.mcore_models.versions import NOT_INSTALLED, flash_attn_bounds
from mrl.parallel import ParallelDims

DENSE = {"num_attention_heads": 32, "num_query_groups": 8, "hidden_size": 4096, "kv_channels": 128}
WINDOWS = DENSE | {"window_size": (4095, 0), "window_attn_skip_freq": [1, 0]}
SINKS = DENSE | {"softmax_type": "learnable"}
ODD = DENSE | {"num_attention_heads": 27, "num_query_groups": 9, "softmax_type": "learnable"}
LATENT = DENSE | {"multi_latent_attention": True, "qk_head_dim": 128, "qk_pos_emb_head_dim": 128, "v_head_dim": 128}
H100 = Gpu((9, 0), NOT_INSTALLED, (9, 25, 1), Version("2.20.2"))
A100 = dataclasses.replace(H100, capability=(8, 0))
FLASH = dataclasses.replace(A100, flash_attn=Version("2.8.3"))


def layout(**degrees):
    size = degrees.get("tp", 1) * degrees.get("cp", 1)
    return ParallelDims(world_size=size, **degrees)


@pytest.mark.parametrize(
    "fields, degrees, gpu, reason",
    [
        (DENSE, {"cp": 2}, A100, "without flash-attn from 2"),
        (DENSE, {"cp": 2}, Gpu(), None),  # of a machine without a GPU: some generation serves it
        (WINDOWS, {"tp": 8, "cp": 2}, H100, None),  # one key-value head: all_gather
        (WINDOWS, {"tp": 8, "cp": 2}, dataclasses.replace(H100, transformer_engine=Version("2.16")), "2.18 does"),
        (WINDOWS, {"tp": 8, "cp": 2}, FLASH, "windows under cp 2 on GPUs"),
        (SINKS, {"cp": 2}, A100, "on GPUs of compute capability 8.0"),
        (SINKS, {"tp": 8, "cp": 2}, Gpu(), "there are 1 key-value heads"),
        (SINKS, {"cp": 3}, Gpu(), "only where cp divides the heads"),
        (ODD, {"cp": 3}, H100, "and there are 9 key-value heads"),  # of odd numbers a2a has no kernel
        (WINDOWS, {"cp": 2}, dataclasses.replace(H100, transformer_engine=Version("2.9")), "2.10 does"),
        (WINDOWS, {"cp": 2}, dataclasses.replace(H100, transformer_engine=Version("2.10")), None),
        (SINKS, {"cp": 2}, dataclasses.replace(H100, transformer_engine=Version("2.11")), "2.12 does"),
        (SINKS, {"cp": 2}, dataclasses.replace(H100, cudnn=(9, 17, 0)), "with sinks under cp 2 on GPUs"),
        (DENSE, {"cp": 2}, Gpu((10, 0), Version("2.7.2"), (9, 6, 0)), "without flash-attn from 2.7.3"),
        (DENSE, {"cp": 2}, Gpu((10, 0), Version("2.7.3"), (9, 6, 0)), None),
        (DENSE | {"attention_dropout": 0.1}, {"cp": 2}, H100, "without flash-attn from 2"),
        (DENSE | {"kv_channels": 100}, {"cp": 2}, dataclasses.replace(H100, flash_attn=Version("2.8.3")), "attention under cp 2"),
        (DENSE | {"kv_channels": 320}, {"cp": 2}, dataclasses.replace(H100, flash_attn=Version("2.8.3")), "with heads of 320"),
        (DENSE | {"kv_channels": 256}, {"cp": 2}, Gpu((8, 9), Version("2.8.3")), "with heads of 256"),
        (DENSE | {"kv_channels": 256}, {"cp": 2}, Gpu((8, 0), Version("2.8.3")), None),
        (LATENT, {"cp": 2}, H100, "with heads of 256 and 128"),  # the fault of cuDNN 9.11
        (LATENT | {"qk_pos_emb_head_dim": 64}, {"cp": 2}, H100, None),
        (DENSE | {"num_query_groups": 2}, {"tp": 8}, H100, None),
    ],
)  # fmt: skip
def test_reasons(fields, degrees, gpu, reason):
    found = te_refusal(fields, layout(**degrees), gpu)
    assert found is None if reason is None else reason in found


def test_how_ranks_exchange_keys():
    ways = [cp_comm_type(f, layout(cp=2)) for f in (DENSE, WINDOWS, SINKS)]
    assert ways == ["p2p", "a2a", "a2a"] and cp_comm_type(WINDOWS, layout(tp=8, cp=2)) == "all_gather"
    assert cp_comm_type(WINDOWS | {"window_attn_skip_freq": [0, 0]}, layout(cp=2)) == "p2p"
    # a key-value head that tensor-parallel ranks share
    assert cp_comm_type(WINDOWS | {"num_query_groups": 2}, layout(tp=8, cp=2)) == "all_gather"


def test_the_unfused_attention_is_said():
    one = layout()
    assert all(te_warning(DENSE, one, gpu) is None for gpu in (H100, Gpu(), FLASH))
    rest = " is the unfused one, whose memory grows with the square of a row"
    assert te_warning(DENSE, one, A100) == "attention without flash-attn from 2.1.1 and below 2.8.4" + rest
    assert te_warning(SINKS, one, A100) == te_warning(WINDOWS | {"kv_channels": 264}, one, A100) == "attention" + rest
    assert te_warning(DENSE, one, A100, dtype=torch.float32) == "attention in float32" + rest


@pytest.mark.parametrize(
    "gpu, off, degrees, reason",
    [
        (H100, ("NVTE_FUSED_ATTN",), {"cp": 2}, "without flash-attn from 2.1.1 and below 2.8.4 with NVTE_FUSED_ATTN=0"),
        (FLASH, ("NVTE_FLASH_ATTN",), {"cp": 2}, "GPUs of compute capability 8.0 with NVTE_FLASH_ATTN=0"),
        (A100, ("NVTE_UNFUSED_ATTN",), {}, "NVTE_UNFUSED_ATTN=0"),
        (A100, ("NVTE_UNFUSED_ATTN",), {"cp": 2}, "below 2.8.4"),  # which context parallelism has not in any case
        (FLASH, ("NVTE_UNFUSED_ATTN",), {}, None),
        (H100, ("NVTE_FUSED_ATTN",), {}, None),
        (Gpu(), ("NVTE_FUSED_ATTN",), {"cp": 2}, None),
        (Gpu(), ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"), {"cp": 2}, "GPU with NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0"),
        (dataclasses.replace(H100, newer_flash_attn=(3,)), ("NVTE_FUSED_ATTN",), {"cp": 2}, None),
        (
            dataclasses.replace(A100, newer_flash_attn=(3, 4)),
            (),
            {"cp": 2},
            "without flash-attn from 2.1.1 and below 2.8.4",
        ),
    ],
)
def test_a_kernel_that_a_variable_switches_off_serves_nothing(monkeypatch, gpu, off, degrees, reason):
    for name in off:
        monkeypatch.setenv(name, "0")
    found = te_refusal(DENSE, layout(**degrees), dataclasses.replace(gpu, switched_off=off))
    assert found is None if reason is None else found.endswith(reason), found


@pytest.mark.parametrize(
    "engine, taken, left_out",
    [
        ("2.5.0", ["2.7.4.post1", "2.1.1"], ["2.8.0", "2.7.4.post1+cu12"]),
        ("2.6.0", ["2.8.1"], ["2.8.1.post1", "2.8.2"]),
        ("2.18.0+5ad", ["2.8.3", "2.7.4.post1+0"], ["2.8.3.post1", "2.8.3+cu13torch2.13"]),
        ("2.19.0", ["2.8.3", "2.8.3.post1", "2.8.3+cu13"], ["2.8.4", "2.0.9"]),
    ],
)
def test_which_flash_attn_a_transformer_engine_takes(engine, taken, left_out):
    gpu = dataclasses.replace(A100, transformer_engine=Version(engine))
    for version in taken + left_out:
        why = te_refusal(DENSE, layout(cp=2), dataclasses.replace(gpu, flash_attn=Version(version)))
        bounds = flash_attn_bounds(gpu.transformer_engine, blackwell=False)
        assert why is None if version in taken else why.endswith(f"without flash-attn {bounds}"), (version, why)


def test_a_gpu_and_its_software_are_read(monkeypatch):
    """cuDNN's number is 10000, 100 and 1 times its parts; builds of a version are that version."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91801)
    versions = {"flash-attn": "2.8.3+cu13torch2.13", "transformer-engine": "2.20.2"}

    def version(package):
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    off = ("NVTE_FUSED_ATTN",)
    assert Gpu.here() == Gpu((9, 0), Version("2.8.3+cu13torch2.13"), (9, 18, 1), Version("2.20.2"), off)
    versions.clear()
    versions["flash-attn-3"] = "3.0.0"
    # a transformer-engine that is not there yet is not too old
    assert Gpu.here() == Gpu((9, 0), NOT_INSTALLED, (9, 18, 1), None, off, (3,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Gpu.here() == Gpu(switched_off=off)
