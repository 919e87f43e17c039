"""Ulysses by itself: the exchange around attention, and how a micro-batch is cut. What models make of it: parity_rows.py."""

import pytest
import torch

from tests.engine import tiny
from tests.engine.harness import run_case


@pytest.mark.parametrize("case", ["attention_is_that_of_one_rank", "inputs_are_cut_once"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(ranks, case):
    run_case(ranks, f"tests.engine.ulysses_cases:{case}")


def test_in_bfloat16():
    run_case(2, "tests.engine.ulysses_cases:attention_is_that_of_one_rank", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "packed", "message"),
    [
        ("bloom", False, "gives padded and shared sequences other numbers than each has alone"),
        ("gpt2", True, "cannot run packed and shared sequences here .*3 heads on 2 ranks"),
    ],
)
def test_a_model_whose_sequences_cannot_be_shared_is_refused(tmp_path, family, packed, message):
    """One that mrl has no table for: its attention is its own, or its heads go by another name in config.json."""
    fields = {"num_attention_heads": 3, "hidden_size": 24} if family == "gpt2" else {}
    config = tiny.role(tiny.make_model(str(tmp_path), family, tied=True, **fields), packing=packed, parallel={"cp": 2})
    message = f"model_type '{family}' {message}.*set engine.parallel.cp to 1"
    run_case(2, "tests.engine.ulysses_cases:is_refused", config=config, message=message)
