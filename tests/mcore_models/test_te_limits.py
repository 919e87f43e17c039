"""Which models transformer-engine's attention is said not to serve. Its own choice: tests/cuda/test_backends.py."""

import dataclasses

import pytest

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


def test_the_unfused_attention_is_said():
    one = layout()
    assert te_slows(DENSE, one, H100) is None and te_slows(DENSE, one, Gpu()) is None
    assert "under flash-attn 2 or engine.layer_spec: local" in te_slows(DENSE, one, A100)
    assert te_slows(DENSE, one, dataclasses.replace(A100, flash_attn=(2, 8, 3))) is None
    assert te_slows(SINKS, one, A100).endswith("not under engine.layer_spec: local")
