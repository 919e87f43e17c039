"""Ulysses by itself: the exchange around attention, and how a micro-batch is cut. What models make of it: parity_rows.py."""

import pytest
import torch

from mrl.engine.fsdp import step
from mrl.engine.fsdp.ulysses import Ulysses
from tests.engine.harness import run_case
from tests.engine.ulysses_cases import batch_of


@pytest.mark.parametrize("case", ["attention_is_that_of_one_rank", "inputs_are_cut_once"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(ranks, case):
    run_case(ranks, f"tests.engine.ulysses_cases:{case}")


def test_in_bfloat16():
    run_case(2, "tests.engine.ulysses_cases:attention_is_that_of_one_rank", dtype=torch.bfloat16)


def test_one_rank_is_fed_the_whole_of_it():
    batch = batch_of([5, 3])
    ins = step.prepare(batch, packed=True, device=torch.device("cpu"), ulysses=Ulysses())
    assert torch.equal(ins.tokens[0], batch.tokens) and ins.document_lengths == [5, 3] and ins.places is None
