"""Training's graphs (`engine.cuda_graphs`) on CUDA tensors without memory: a capture that makes the host wait, or asks for random
states, is refused here as by CUDA. How many operations are left outside: test_counts.py."""

from __future__ import annotations

import pytest

from mrl.mcore_models.train_graphs import BEFORE_CAPTURE
from tests.cuda.cases import DENSE, LENGTHS, MOE, SINKS, _case
from tests.cuda.te_cases import te_case
from tests.tiers import in_tiers

PASSES = {"graphs": sum(LENGTHS), "micro_batches": BEFORE_CAPTURE + 2}
FAST = [_case(MOE, world=2, tp=2, etp=1, router_losses=True, **PASSES)]
OTHERS = [_case(DENSE, world=2, **PASSES)]
AT_NIGHT = [
    _case(DENSE, world=2, tp=2, **PASSES), _case(MOE, router_losses=True, **PASSES),
    _case("mistralai/Mistral-7B-v0.1", head="value", muon=True, **PASSES), _case(DENSE, calls=2, **PASSES),
]  # fmt: skip


def replayed(case, result):
    """Both graphs of each micro-batch but the first ones; the host waits once for each capture, and for no layer."""
    micro_batches = case.micro_batches * case.calls
    assert result.replays == 2 * (micro_batches - BEFORE_CAPTURE)
    captures = result.syncs.pop("mrl/mcore_models/graph_capture.py capture torch.cuda.synchronize")
    assert round(captures * micro_batches) == 2
    agreed = {line: n for line, n in result.syncs.items() if "mcore_models/graph_capture.py" in line}
    assert {line.split()[1] for line in agreed} == ({"on_any_rank"} if case.tp > 1 else set())
    assert not [
        line
        for line in result.syncs
        if "megatron/core" in line or "even_experts" in line or "mcore_models" in line and line not in agreed
    ]


@pytest.mark.parametrize("case", in_tiers(FAST, OTHERS, [*FAST, *OTHERS, *AT_NIGHT]), ids=str)
def test_layers_are_captured(worker, case):
    replayed(case, worker.call("tests.cuda.run:run", case))


@pytest.mark.parametrize("tp", in_tiers([], [2], [1, 2]))
def test_transformer_engines_layers_are_captured(te_worker, tp):
    case = te_case(DENSE, world=tp, tp=tp, **PASSES)
    replayed(case, te_worker.call("tests.cuda.te_update:update", case, (9, 0)).result)


def test_layers_that_wait_are_refused(worker, te_worker):
    refused = "engine.cuda_graphs: value true needs "
    with pytest.raises(AssertionError, match=refused + "attention in one call"):
        worker.call("tests.cuda.run:run", _case(DENSE, dtype="float32", **PASSES))
    with pytest.raises(AssertionError, match=refused + "layers of experts that ask the host for nothing"):
        te_worker.call("tests.cuda.te_update:update", te_case(MOE, **PASSES), (9, 0))


@pytest.mark.slow
def test_a_capture_that_waits_is_refused_with_one_line(worker):
    """Layers of experts with biases: a config with them is refused before, by name."""
    said, replays = worker.call("tests.cuda.run:waiting", _case(SINKS, layers=1, **PASSES))
    assert replays == 0
    [line] = said
    assert line.startswith("engine.cuda_graphs: layers were not captured (CUDA error: operation not permitted ")
