"""`overlap_grad_reduce` and `overlap_param_gather` change nothing but when sums and gathers are made."""

import pytest

from mrl.config.schema import LoraConfig
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.tiers import nightly_but

LAYOUTS = [
    ("qwen3", 2, {}),
    ("llama", 4, {"pp": 2, "vpp": 2}),
    ("deepseek_v3", 4, {"tp": 2, "ep": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("family, world, parallel", nightly_but(LAYOUTS[:2], LAYOUTS), ids=str)
def test_overlap_changes_nothing(tmp_path, family, world, parallel):
    layers = 4 if "pp" in parallel else 2
    folder = tiny.make_model(str(tmp_path / "model"), family, layers=layers, tied=family == "llama")
    found = run_case(
        world,
        "tests.engine.overlap:compare",
        config=tiny.role(folder, backend="megatron", parallel=parallel, size=1 if world == 2 else None),
    )
    assert found["reduced"] and found["gathered"]
    assert found["norms"] < 1e-5 and found["others"] == 0, found


@pytest.mark.slow
def test_adapters_are_reduced_and_gathered_at_the_end(tmp_path):
    """They are summed over other ranks first, and lie in modules that no forward is called of."""
    folder = tiny.make_model(str(tmp_path / "model"), "qwen3")
    role = tiny.role(folder, backend="megatron", model={"lora": LoraConfig(rank=4)})
    found = run_case(2, "tests.engine.overlap:compare", config=role)
    assert not found["reduced"] and found["norms"] < 1e-5 and found["others"] == 0, found
