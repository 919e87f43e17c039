"""The host waits for a GPU once in a step of decoding: for the tokens that were chosen, which tell it who stops. In CUDA
graphs, which are captured here and never run, in layers of experts too."""

from __future__ import annotations

import pytest

from tests.cuda.cases import DELTA, DELTA_MOE, DENSE, LATENT, MOE, SINKS, _case
from tests.tiers import in_tiers

ONCE = {"mrl/ops/devices.py tolist synchronize": 1.0}


GRAPHS, OF_TE = {"cuda_graphs": True}, {"cuda_graphs": True, "te_like": True}
FAST = [(_case(MOE, spec="te"), OF_TE, 0)]
OTHERS = [
    (_case(LATENT, spec="te"), OF_TE, 0),
    (_case(DELTA, world=2, tp=2), GRAPHS, 0),
]
AT_NIGHT = [  # as above, of another family, or with another filter
    (_case(DENSE, spec="te"), OF_TE, 0),
    (_case(DENSE), {"filters": {"top_k": 20}}, 0),
    (_case(DENSE), {}, 0),
    (_case(MOE), {}, 0),
    (_case(SINKS), {}, 2),  # layers that wait: their experts have biases
    (_case(DENSE), {"filters": {"top_p": 0.9}}, 0),
    (_case(MOE), GRAPHS, 0),
    (_case(LATENT), GRAPHS, 0),
    (_case(DENSE, world=2, tp=2), GRAPHS, 0),
    (_case(DELTA, spec="te"), OF_TE, 0),
    (_case(DELTA_MOE), GRAPHS, 0),
]


@pytest.mark.parametrize("case, options, experts", in_tiers(FAST, OTHERS, [*FAST, *OTHERS, *AT_NIGHT]), ids=str)
def test_a_step_waits_for_the_tokens_alone(worker, case, options, experts):
    found = worker.call("tests.cuda.decoding:steps", case, **options)
    of_experts = {line: n for line, n in found.waits.items() if "moe" in line or "even_experts" in line}
    assert {line: n for line, n in found.waits.items() if line not in of_experts} == ONCE
    assert bool(of_experts) == bool(experts) and sum(of_experts.values()) <= 3 * experts
    assert found.replays == (1.0 if options.get("cuda_graphs") else 0.0) and not found.lines
    if case.spec == "te":
        assert {"NormAndColumn"} <= found.modules


FILTERED = GRAPHS | {"filters": {"temperature": 0.7, "top_p": 0.9}}


GROWTH = [
    (DENSE, FILTERED), (DELTA, {}), (DENSE, {}), (DENSE, GRAPHS), (DENSE, {"filters": {"top_k": 20}}), (DELTA, GRAPHS),
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("model, options", GROWTH, ids=str)
def test_operations_of_a_step_do_not_grow_with_sequences(worker, model, options):
    """How many there are of 64 sequences: test_counts.py."""
    case = _case(model)
    few, many = (worker.call("tests.cuda.decoding:steps", case, sequences=n, **options) for n in (5, 90))
    assert few.operations == many.operations > 0 and few.waits == many.waits == ONCE


@pytest.mark.slow
def test_what_is_not_captured_runs_and_is_said_once(worker):
    """A layer that asks the host in the middle: of two generations the first tries."""
    found = worker.call("tests.cuda.decoding:steps", _case(DENSE), cuda_graphs=True, asks=True)
    assert found.replays == 0 and sum(found.waits.values()) == 3  # two layers, and the tokens
    [line] = found.lines
    assert line.startswith(
        "rollout.cuda_graphs: a step of 5 rows was not captured (CUDA error: operation not permitted "
    )


@pytest.mark.slow
def test_the_decoder_takes_transformer_engines_modules(te_worker):
    """Its linears compute nothing here, so what generates is the decoder, of prompts too."""
    found = te_worker.call("tests.cuda.decoding:steps", _case(DENSE, spec="te"), cuda_graphs=True)
    assert found.waits == ONCE and found.replays == 1.0 and not found.lines
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear"} <= found.modules
