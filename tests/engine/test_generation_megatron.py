"""Generation on the megatron engine, beyond the contract that both engines share."""

import pytest

from tests.engine import tiny
from tests.engine.harness import run_case


@pytest.mark.parametrize("case", ["own_attention_in_place_of_another", "many_prompts_in_little_cache"])
def test_generation(tmp_path, case):
    config = tiny.role(
        tiny.make_model(str(tmp_path / "model"), "qwen3"), backend="megatron", parallel={"tp": 2, "pp": 2}
    )
    run_case(4, f"tests.engine.generation:{case}", config=config)
