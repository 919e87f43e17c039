"""Which models transformer-engine's attention is said not to serve. Its own choice: tests/cuda/test_backends.py."""

import dataclasses
import importlib.metadata

import pytest
import torch

from mrl.mcore_models.te_limits import Gpu, cp_comm_type, te_refuses, te_slows
from mrl.parallel import ParallelDims

DENSE = {"num_attention_heads": 32, "num_query_groups": 8, "hidden_size": 4096, "kv_channels": 128}
WINDOWS = DENSE | {"window_size": (4095, 0), "window_attn_skip_freq": [1, 0]}
SINKS = DENSE | {"softmax_type": "learnable"}
H100 = Gpu((9, 0), (), (9, 25, 1), (2, 20, 2))
A100 = dataclasses.replace(H100, capability=(8, 0))


def layout(**degrees):
    size = degrees.get("tp", 1) * degrees.get("cp", 1)
    return ParallelDims(world_size=size, **degrees)


@pytest.mark.parametrize(
    "fields, degrees, gpu, reason",
    [
        (DENSE, {"cp": 2}, H100, None),
        (DENSE, {}, A100, None),
        (DENSE, {"cp": 2}, A100, "without flash-attn 2"),
        (DENSE, {"cp": 2}, dataclasses.replace(A100, flash_attn=(2, 8, 3)), None),
        (DENSE, {"cp": 2}, Gpu(), None),  # of a machine without a GPU: some generation serves it
        (WINDOWS, {"cp": 2}, H100, None),
        (WINDOWS, {"tp": 8, "cp": 2}, H100, None),  # one key-value head: all_gather
        (WINDOWS, {"tp": 8, "cp": 2}, dataclasses.replace(H100, transformer_engine=(2, 16)), "2.18 does"),
        (WINDOWS, {"tp": 8, "cp": 2}, dataclasses.replace(A100, flash_attn=(2, 8, 3)), "windows under cp 2 on GPUs"),
        (SINKS, {"cp": 2}, H100, None),
        (SINKS, {"cp": 2}, A100, "on GPUs of compute capability 8.0"),
        (SINKS, {"tp": 8, "cp": 2}, Gpu(), "there are 1 key-value heads"),
        (SINKS, {"cp": 3}, Gpu(), "only where cp divides the heads"),
    ],
)
def test_reasons(fields, degrees, gpu, reason):
    found = te_refuses(fields, layout(**degrees), gpu)
    assert found is None if reason is None else reason in found


def test_how_ranks_exchange_keys():
    ways = [cp_comm_type(f, layout(cp=2)) for f in (DENSE, WINDOWS, SINKS)]
    assert ways == ["p2p", "a2a", "a2a"] and cp_comm_type(WINDOWS, layout(tp=8, cp=2)) == "all_gather"
    assert cp_comm_type(WINDOWS | {"window_attn_skip_freq": [0, 0]}, layout(cp=2)) == "p2p"
    # a key-value head that tensor-parallel ranks share
    assert cp_comm_type(WINDOWS | {"num_query_groups": 2}, layout(tp=8, cp=2)) == "all_gather"


def test_the_unfused_attention_is_said():
    one = layout()
    assert te_slows(DENSE, one, H100) is None and te_slows(DENSE, one, Gpu()) is None
    assert "under flash-attn 2 or engine.layer_spec: local" in te_slows(DENSE, one, A100)
    assert te_slows(DENSE, one, dataclasses.replace(A100, flash_attn=(2, 8, 3))) is None
    assert te_slows(SINKS, one, A100).endswith("not under engine.layer_spec: local")


@pytest.mark.parametrize(
    "fields, dtype, cure",
    [
        (DENSE, torch.float32, "; it does not under engine.layer_spec: local"),
        (WINDOWS, torch.float32, ""),  # the local spec's flash kernel has 16 bits alone (flash.has_kernel)
        (SINKS, torch.float32, ""),
        (WINDOWS | {"attention_dropout": 0.1}, torch.bfloat16, "; it does not under flash-attn 2"),
        (WINDOWS | {"kv_channels": 264}, torch.bfloat16, ""),
        (WINDOWS, torch.bfloat16, "; it does not under flash-attn 2 or engine.layer_spec: local"),
    ],
)
def test_a_cure_of_the_unfused_attention_is_one(fields, dtype, cure):
    assert te_slows(fields, layout(), A100, dtype=dtype).partition("of a row")[2] == cure


ODD = DENSE | {"num_attention_heads": 27, "num_query_groups": 9, "softmax_type": "learnable"}
LATENT = DENSE | {"multi_latent_attention": True, "qk_head_dim": 128, "qk_pos_emb_head_dim": 128, "v_head_dim": 128}


@pytest.mark.parametrize(
    "fields, degrees, gpu, reason",
    [
        (ODD, {"cp": 3}, H100, "and there are 9 key-value heads"),  # of odd numbers a2a has no kernel
        (WINDOWS, {"cp": 2}, dataclasses.replace(H100, transformer_engine=(2, 9)), "2.10 does"),
        (WINDOWS, {"cp": 2}, dataclasses.replace(H100, transformer_engine=(2, 10)), None),
        (SINKS, {"cp": 2}, dataclasses.replace(H100, transformer_engine=(2, 11)), "2.12 does"),
        (SINKS, {"cp": 2}, dataclasses.replace(H100, cudnn=(9, 17, 0)), "with sinks under cp 2 on GPUs"),
        (DENSE, {"cp": 2}, Gpu((10, 0), (2, 7, 2), (9, 6, 0)), "without flash-attn 2"),
        (DENSE, {"cp": 2}, Gpu((10, 0), (2, 7, 3), (9, 6, 0)), None),
        (DENSE | {"attention_dropout": 0.1}, {"cp": 2}, H100, "without flash-attn 2"),
        (DENSE | {"kv_channels": 100}, {"cp": 2}, dataclasses.replace(H100, flash_attn=(2, 8, 3)), "attention under cp 2"),
        (DENSE | {"kv_channels": 320}, {"cp": 2}, dataclasses.replace(H100, flash_attn=(2, 8, 3)), "with heads of 320"),
        (DENSE | {"kv_channels": 256}, {"cp": 2}, Gpu((8, 9), (2, 8, 3)), "with heads of 256"),
        (DENSE | {"kv_channels": 256}, {"cp": 2}, Gpu((8, 0), (2, 8, 3)), None),
        (LATENT, {"cp": 2}, H100, "with heads of 256 and 128"),  # the fault of cuDNN 9.11
        (LATENT | {"qk_pos_emb_head_dim": 64}, {"cp": 2}, H100, None),
        (DENSE | {"num_query_groups": 2}, {"tp": 8}, H100, None),
    ],
)  # fmt: skip
def test_bounds_of_versions_and_sizes(fields, degrees, gpu, reason):
    test_reasons(fields, degrees, gpu, reason)


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
    assert Gpu.here() == Gpu((9, 0), (2, 8, 3), (9, 18, 1), (2, 20, 2))
    versions.clear()
    # a transformer-engine that is not there yet is not too old
    assert Gpu.here() == Gpu((9, 0), (), (9, 18, 1), None)
