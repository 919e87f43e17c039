"""The Megatron engine on CUDA tensors that have no memory: published widths, every kind of layout, seen from one rank.

What must hold of each: it runs, nothing of the model or the optimizer is on the host, dtypes are as stated, and the host
waits for the GPU where the ceilings say and nowhere else. What it takes of memory is what the same update takes for
real, on CPUs. `python -m tests.cuda` prints the figures.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.cuda.cases import CORNERS, DENSE, MOE, OF_EACH_FAMILY, PRODUCT, Case, ceilings
from tests.engine import harness
from tests.tiers import slow_but

ALL = [*OF_EACH_FAMILY, *CORNERS, *(case for case in PRODUCT if case not in OF_EACH_FAMILY)]


@pytest.mark.parametrize("case", slow_but([*OF_EACH_FAMILY, CORNERS[0]], ALL), ids=str)
def test_a_rank_makes_an_update(worker, case):
    result = worker.call("tests.cuda.run:run", case)
    for kind, found in result.tensors.items():
        expected = ["cuda torch.bfloat16"] if kind == "parameters" else ["cuda torch.float32"]
        assert found == expected, f"{kind}: {found}"
    assert result.parameters < result.after_init < result.peak
    allowed = ceilings(case)
    for line, count in result.syncs.items():
        most = next((most for pattern, most in allowed.items() if re.fullmatch(pattern, line)), 0)
        assert count <= most, f"{line}: the host waits {count} times a micro-batch, where {most} are allowed"


NARROW = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4,
          "head_dim": 64, "vocab_size": 4096}  # fmt: skip
REAL = [
    Case(DENSE, world=2, tp=2, changes=NARROW),
    Case(DENSE, world=2, pp=2, changes=NARROW),
    Case(DENSE, world=2, cp=2, changes=NARROW),
    Case(DENSE, recompute="full", changes=NARROW),
    Case(MOE, changes=NARROW | {"num_experts": 8, "num_experts_per_tok": 2}),
]


@pytest.mark.parametrize("case", slow_but(REAL[:1], REAL), ids=str)
def test_memory_is_that_of_a_real_update(worker, case):
    """State to the byte. Peaks within 5 %: a few functions are fused otherwise on a CPU.

    The vocabulary is small enough for log-probs to be made in one piece on both: a GPU makes larger ones.
    """
    [real] = harness.run_world(case.world, [harness.Case("tests.cuda.update:on_cpu", {"case": case})])
    for rank, expected in enumerate(real.get()):
        found = worker.call("tests.cuda.run:run", dataclasses.replace(case, rank=rank))
        for name in ("parameters", "after_init", "after_step"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-4), name
        for name in ("backward_peak", "peak"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=0.05), name


def test_what_the_host_reads_is_counted(worker):
    """The ceilings hold nothing back if reads go unseen: here are some of every kind, in a backward pass too."""
    assert worker.call("tests.cuda.reads:count") == {
        "forward": {
            "item": 1,
            "cpu": 2,
            "tolist": 1,
            "torch.cuda.synchronize": 1,
            "to_gpu": 4,
            "masked_select": 1,
            "__bool__": 1,
        },
        "backward": {"item": 1},
        "mixed": "Expected all tensors to be on the same device",
    }
