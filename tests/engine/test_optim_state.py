"""AdamW's state in a checkpoint: the number of updates, which Adam's bias correction counts (trap 25), wherever an AdamW
keeps it; and tensors that megatron's dist_checkpointing reads as well. Layouts: tests/resume/test_layouts.py.
"""

import types

import pytest
import torch

from mrl.engine.megatron import optim
from mrl.engine.megatron.engine import MegatronEngine  # noqa: F401  (prepares megatron for this machine)
from mrl.engine.megatron.optim_state import set_step_count, step_count
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.engine.lora import make_engine


class CountsByGroup(torch.optim.Optimizer):
    """Keeps its moments by tensor and its count by group, as FusedAdam of transformer-engine and apex do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                self.state[p]["exp_avg"] = p.grad.clone()


def test_parameters_are_their_masters_rounded_after_an_update(tmp_path):
    config = tiny.role(
        tiny.make_model(str(tmp_path / "model"), "llama", layers=2), backend="megatron", dtype="bfloat16"
    )
    engine = make_engine(config)
    before = [parameter.detach().clone() for _, parameter, _, _ in optim.shards(engine.model.optimizer)]
    with engine.train_mode():
        engine.forward_backward_step(tiny.uneven_batch(0))
    engine.optimizer_step()
    shards = list(optim.shards(engine.model.optimizer))
    assert shards and all(main.dtype == torch.float32 for _, _, main, _ in shards)
    for (_, parameter, main, span), earlier in zip(shards, before, strict=True):
        assert not torch.equal(parameter, earlier)
        assert torch.equal(parameter.view(-1)[span], main.view(-1).bfloat16())


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


def test_the_count_is_where_the_tensor_is():
    """Fused kernels read it there."""
    p = torch.nn.Parameter(torch.ones(3, device="meta"))
    adam = torch.optim.AdamW([p])
    adam.state[p]["exp_avg"] = torch.zeros_like(p)
    set_step_count(adam, 7)
    assert adam.state[p]["step"].device == p.device


@pytest.mark.parametrize(
    ("family", "world", "parallel"),
    [
        ("qwen3", 2, {}),
        pytest.param("qwen3_moe", 4, {"tp": 2, "etp": 1, "ep": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_5", 2, {"tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_megatron_reads_what_is_saved(tmp_path, family, world, parallel):
    """With its strict checks of the model; of the optimizer's tensors, of which each rank wrote its own entries, all."""
    tiny.make_model(str(tmp_path / "model"), family, tied=True)
    config = tiny.role(str(tmp_path / "model"), backend="megatron", parallel=parallel)
    case = "tests.engine.checkpoint_cases:megatron_reads"
    assert run_case(world, case, config=config, folder=str(tmp_path / "checkpoints")) > 40


@pytest.mark.parametrize(("rank", "longest"), [(0, 0), (1, 40_000)])
def test_a_rank_that_cannot_write_ends_the_save_of_all(tmp_path, rank, longest):
    """By one line, and the checkpoint is not there; one of them once waited for the others, or ended with a traceback."""
    tiny.make_model(str(tmp_path / "model"), "qwen3")
    config, folder = tiny.role(str(tmp_path / "model"), backend="megatron"), tmp_path / "checkpoints"
    case = "tests.engine.checkpoint_cases:save_where_files_may_not_grow"
    said = run_case(2, case, config=config, folder=str(folder), rank=rank, longest=longest)
    assert said.startswith(str(folder)) and "cannot be written (File too large); give it room" in said
    assert [p.name for p in folder.glob("step_*")] == ["step_00000002"]
