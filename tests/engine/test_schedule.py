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


@pytest.mark.parametrize(
    ("schedule", "total_steps", "keys", "expected"),
    [
        ("linear", 10, {}, {0: 1.0, 5: 0.55, 10: 0.1, 11: 0.1}),
        ("linear", 10, {"decay_steps": 2}, {0: 1.0, 1: 0.55, 2: 0.1, 9: 0.1}),
        ("cosine", 8, {}, {0: 1.0, 4: 0.55, 8: 0.1, 99: 0.1}),
        ("cosine", 12, {"warmup_steps": 4}, {4: 1.0, 8: 0.55, 12: 0.1}),
        ("wsd", 100, {}, {0: 1.0, 50: 1.0, 90: 1.0, 95: 0.55, 100: 0.1}),
        ("wsd", 15, {}, {13: 1.0, 14: 0.55, 15: 0.1}),  # a tenth is rounded up
        ("wsd", 100, {"decay_steps": 50}, {50: 1.0, 75: 0.55}),
        ("wsd", 10, {"decay_steps": 50, "warmup_steps": 5}, {5: 1.0, 10: 0.1}),
    ],
)
def test_rates(schedule, total_steps, keys, expected):
    found = rates(total_steps, list(expected), schedule=schedule, **keys)
    assert found == pytest.approx(list(expected.values()))
