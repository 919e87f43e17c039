"""The keys of reward models: contradictions, each refused in one line."""

from __future__ import annotations

import functools

import pytest

from mrl.commands.rm import COMMAND
from mrl.config.rm import RMConfig
from mrl.parallel import ParallelDims
from tests.config.refused import assert_refused, config_of

BASE = {
    "output_dir": "runs/rm",
    "model": {"path": "model"},
    "loss": {"name": "bradley_terry"},
    "data": {"train": "pairs.jsonl", "max_length": 100},
    "train": {"steps": 10, "global_batch_size": 8},
}
STEPS, GRADED = ("loss.name=steps",), ("loss.name=regression",)


made = functools.partial(config_of, RMConfig, BASE)


REFUSED = [
    (("model.mtp.detach=true",), "model.mtp.detach: value true is given to an unknown key; leave it out: MTP layers"),
    ((*STEPS, "loss.centering=0.1"), "loss.centering: value 0.1 is not read by loss steps"),
    (("data.format=steps",), 'data.format: value "steps" is no form of row for loss.name bradley_terry; set loss.name'),
    ((*GRADED, "data.format=preference"), "set loss.name to bradley_terry, or data.format to graded"),
    (
        ('data.prompt_end="A:"', "data.turns={user: 'U:', assistant: 'A:'}"),
        'data.prompt_end: value "A:" is of raw text',
    ),
    (
        (*GRADED, "data.prompt_end=x"),
        'data.prompt_end: value "x" is of the format preference, and rows have the format',
    ),
    ((*GRADED, "data.step_separator=x"), 'data.step_separator: value "x" is not used by loss.name regression'),
    ((*STEPS, "engine.micro_batch.tokens=99"), "engine.micro_batch.tokens: value 99 is less than data.max_length 100"),
    (("train.epochs=1",), "train.steps: value 10 is given together with train.epochs 1"),
    (("model.lora.rank=4", "model.init=random"), 'model.init: value "random" makes a base that no other run has'),
]


@pytest.mark.parametrize("overrides, says", REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_contradictions_are_one_line(overrides, says):
    assert_refused(RMConfig, BASE, overrides, says)


def test_a_micro_batch_holds_a_pair_or_one_answer():
    assert made("engine.micro_batch.tokens=200").longest_group[0] == 200 and made().group == 2
    single = made(*STEPS, "engine.micro_batch.tokens=100", "data.step_separator=x")
    assert (single.longest_group[0], single.group) == (100, 1)


def test_a_dry_run_says_the_loss_its_micro_batches_and_the_length():
    def lines(*overrides: str) -> list[str]:
        config = made(*overrides)
        return COMMAND.describe(config, COMMAND.parts(config), [ParallelDims(world_size=2, tp=2, etp=2)])

    assert lines("loss.centering=0.5") == [
        "layout: tp2 on 2 processes", "micro-batch: up to 4096 tokens", "loss: bradley_terry (centering 0.5)",
        "length: 10 steps of 8 rows a step",
    ]  # fmt: skip
    single = lines(*STEPS, "engine.micro_batch.size=3", "data.packing=false", "train.steps=null", "train.epochs=1")
    assert single[1:] == ["micro-batch: 3 sequences", "loss: steps", "length: 1 epoch of 8 rows a step"]
