"""What tensor parallelism with sequence parallelism sends, by hand.

A layer has two column-parallel and two row-parallel products. Forward: a gather before each of the former, a scatter after
each of the latter. Backward: the transposes of both, and a gather of each column-parallel input again, for its weight's
gradient: 6 gathers and 4 scatters. The embedding scatters, and gathers in the backward pass.
"""

from __future__ import annotations

import json

import pytest

from mrl.parallel import ParallelDims
from tests.engine import tiny


@pytest.mark.parametrize("tp", [2, 4])
def test_gathers_and_scatters_are_counted_by_whole_tensors(planner, tmp_path, tp):
    folder = tiny.make_model(str(tmp_path), "llama", layers=4, num_attention_heads=4, num_key_value_heads=4)
    config, tokens, layers = tiny.role(folder, backend="megatron"), 16, 2  # on the first of two stages
    dims = ParallelDims(2 * tp, tp=tp, pp=2, sp=True)
    found = planner.call("tests.plan.planned:tensor_parallel_bytes", config, dims, [tokens])
    whole = tokens * json.loads((tmp_path / "config.json").read_text())["hidden_size"] * 4
    assert found["all_gather"] == (6 * layers + 1) * whole
    assert found["reduce_scatter"] == (4 * layers + 1) * whole
