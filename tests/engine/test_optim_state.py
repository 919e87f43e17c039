"""The number of updates in a checkpoint, which Adam's bias correction counts (trap 25), wherever an AdamW keeps it."""

import types

import pytest
import torch

from mrl.engine.megatron.engine import MegatronEngine  # noqa: F401  (prepares megatron for this machine)
from mrl.engine.megatron.optim_state import set_step_count, step_count


class CountsByGroup(torch.optim.Optimizer):
    """Keeps its moments by tensor and its count by group, as FusedAdam of transformer-engine and apex do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                self.state[p]["exp_avg"] = p.grad.clone()


@pytest.mark.parametrize("adam", [torch.optim.AdamW, CountsByGroup])
def test_the_count_goes_on_where_it_was(adam):
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    part = types.SimpleNamespace(optimizer=adam([p]))
    assert step_count(part) == 0
    for _ in range(3):
        part.optimizer.step()
    assert step_count(part) == 3
    set_step_count(part.optimizer, 7)
    assert step_count(part) == 7
    part.optimizer.step()
    assert step_count(part) == 8
