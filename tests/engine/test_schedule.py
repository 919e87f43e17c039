"""Learning rates by hand at chosen steps. Trap 23 (a resumed schedule that differs): the step is the only state; test_contract.py."""

import pytest

from mrl.config.schema import OptimizerConfig
from mrl.engine.schedule import learning_rate


def rates(total_steps, steps=None, **optimizer):
    config = OptimizerConfig(**{"lr": 1.0, "min_lr": 0.1, **optimizer})
    return [learning_rate(s, optimizer=config, total_steps=total_steps) for s in steps or range(total_steps)]


def test_constant():
    assert rates(4, schedule="constant") == [1.0] * 4


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_rises_linearly_and_its_first_step_trains(schedule):
    assert rates(20, schedule=schedule, warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear():
    assert rates(10, schedule="linear", steps=[0, 5, 10, 11]) == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert rates(10, schedule="linear", decay_steps=2, steps=[0, 1, 2, 9]) == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_cosine():
    assert rates(8, schedule="cosine", steps=[0, 4, 8, 99]) == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert rates(12, schedule="cosine", warmup_steps=4, steps=[4, 8, 12]) == pytest.approx([1.0, 0.55, 0.1])


def test_wsd_is_flat_and_falls_over_the_last_tenth():
    assert rates(100, schedule="wsd", steps=[0, 50, 90, 95, 100]) == pytest.approx([1.0, 1.0, 1.0, 0.55, 0.1])
    assert rates(15, schedule="wsd", steps=[13, 14, 15]) == pytest.approx([1.0, 0.55, 0.1]), "a tenth is rounded up"
    assert rates(100, schedule="wsd", decay_steps=50, steps=[50, 75]) == pytest.approx([1.0, 0.55])
    assert rates(10, schedule="wsd", decay_steps=50, warmup_steps=5, steps=[5, 10]) == pytest.approx([1.0, 0.1])
