"""Moments in bfloat16 (`use_precision_aware_optimizer`): what is rounded, and when; a checkpoint; a resume."""

import pytest
import torch

from mrl.engine.megatron.engine import MegatronEngine  # noqa: F401  (prepares megatron for this machine)
from mrl.engine.megatron.rounded_adam import RoundedAdamW
from tests.engine import tiny
from tests.engine.harness import run_case

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (BF16, BF16)], ids=str)
def test_an_update_is_torchs_and_moments_are_rounded_behind_it(dtypes):
    names = dict(zip(("exp_avg", "exp_avg_sq"), dtypes, strict=True))
    start = torch.randn(257, generator=torch.Generator().manual_seed(0))
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    rounded = RoundedAdamW.from_adam(torch.optim.AdamW([ours], **ADAMW), names)
    plain = torch.optim.AdamW([theirs], **ADAMW)
    for seed in range(5):
        ours.grad = torch.randn(257, generator=torch.Generator().manual_seed(seed))
        theirs.grad = ours.grad.clone()
        plain.step()
        for name, dtype in names.items():  # what the next update finds
            state = plain.state[theirs]
            state[name] = state[name].to(dtype).float()
        rounded.step()
        assert (ours - theirs).abs().max() < 1e-7, f"update {seed}"
        for name, dtype in names.items():
            kept = rounded.state[ours][name]
            assert kept.dtype == dtype
            # of two kernels, one may round a number that lies between two of bfloat16 the other way
            assert torch.allclose(
                kept.float(), plain.state[theirs][name], rtol=2**-8 if dtype == BF16 else 1e-6, atol=0
            )


@pytest.mark.parametrize(
    "world, parallel, dtype",
    [(2, {}, "bfloat16"), pytest.param(4, {"tp": 2, "pp": 2}, "float32", marks=pytest.mark.nightly)],
)
def test_an_optimizer_on_the_host_makes_the_same_updates_to_the_bit(tmp_path, world, parallel, dtype):
    """On a CPU, whose kernel both then have; and a checkpoint of the one goes on with the other."""
    folder = tiny.make_model(str(tmp_path / "model"), "qwen3")
    config = tiny.role(folder, backend="megatron", parallel=parallel, size=2, dtype=dtype)
    found = run_case(world, "tests.engine.moments:on_host", config=config, out=str(tmp_path / "out"))
    assert found == {"updates": True, "resumed": True, "on the device": True, "given": True, "reloaded": True}


@pytest.mark.parametrize(
    "world, parallel, dtype, bound",
    [(2, {}, "float32", 2**-7), pytest.param(4, {"tp": 2, "pp": 2}, "bfloat16", 2**-5, marks=pytest.mark.nightly)],
)
def test_a_checkpoint_has_them_and_a_run_goes_on_to_the_bit(tmp_path, world, parallel, dtype, bound):
    """A moment is rounded to 8 bits of significand (2^-9 relative) each step, of which a few steps' update shows less than
    2^-7; weights in bfloat16 are rounded themselves, to 2^-9 of what they are and not of the update."""
    folder = tiny.make_model(str(tmp_path / "model"), "qwen3")
    config = tiny.role(folder, backend="megatron", parallel=parallel, size=2, dtype=dtype)
    found = run_case(world, "tests.engine.moments:compare", config=config, out=str(tmp_path / "out"))
    assert found["here"] == found["stored"] == {"torch.bfloat16"} and found["masters"] == {"torch.float32"}
    assert found["same"] == [True, True] and 0 < found["far"] < bound, found
