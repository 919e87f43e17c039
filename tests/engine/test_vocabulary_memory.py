"""Log-probs and entropies of a large vocabulary never fill memory with logits: neither forward nor backward, on any engine.

With `T` tokens and `V` columns, one fp32 tensor of [T, V] is the measure: a plain loss holds three of them at once or more.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mrl.config.schema import RoleConfig
from mrl.engine.logprobs import VocabShard, log_probs_from_hidden
from mrl.engine.peak_bytes import PeakBytes
from tests.engine import tiny
from tests.engine.contract import make_engine
from tests.engine.harness import run_case
from tests.engine.layouts import world_and_role
from tests.tiers import slow_but

T, V, H = 2176, 16384, 16  # above the size up to which logits are kept for the backward pass, also in halves of V
FULL = T * V * 4


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, H, generator=generator).requires_grad_() for rows in (T, V))
    return hidden, weight, torch.randint(0, V, (T,), generator=generator)


@pytest.mark.parametrize(
    "dtype, entropy",
    [(torch.float32, "none"), (torch.bfloat16, "detached"), (torch.float32, "differentiable")],
)
def test_forward_and_backward_are_bounded(dtype, entropy):
    """By a few chunks of 2**22 logits, which T and V have no part in."""
    chunk, peaks = 2**22 * 4, []
    for tokens in (T, T // 2):
        hidden, weight, labels = (t.detach()[:tokens] if t.shape[0] == T else t.detach() for t in inputs())
        hidden, weight = (t.to(dtype).requires_grad_() for t in (hidden, weight))
        with PeakBytes() as found:
            log_probs, entropies = log_probs_from_hidden(
                hidden, weight, labels, shard=VocabShard(V), entropy=entropy, keep_logits=False
            )
            loss = log_probs.sum() + (entropies.sum() if entropy == "differentiable" else 0.0)
            loss.backward()
        assert weight.grad.any() and hidden.grad.any()
        assert found.largest == chunk and found.peak < 5 * chunk, found.peak / chunk
        peaks.append(found.peak)
    assert 5 * chunk < FULL and peaks[0] - peaks[1] < chunk / 8, "twice the tokens need no more"


def step_of_an_engine(config: RoleConfig) -> list[tuple[float, float]]:
    """(peak, largest storage) of a forward and backward of T tokens with each kind of entropy, in parts of [T, V] fp32."""

    def loss_fn(data, predictions, ctx):
        total = -(predictions["log_probs"] * data.loss_mask).sum()
        return total - 0.1 * (predictions["entropy"].sum() if "entropy" in predictions else 0.0), ctx

    engine = make_engine(config)
    engine.set_loss_fn(loss_fn)
    batch = tiny.make_batch(
        [[(7 * i + j) % V for j in range(129)] for i in range(T // 128)], [[1.0] * 129] * (T // 128)
    )
    found = []
    for entropy in ("none", "differentiable"):
        engine.optimizer_zero_grad()
        with engine.train_mode(), PeakBytes() as bytes_:
            engine.forward_backward_step(batch, {"temperature": 1.0, "entropy": entropy})
        found.append((bytes_.peak / FULL, bytes_.largest / FULL))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", slow_but(["fsdp", "megatron tp2"], ["fsdp", "megatron tp2", "external"]))
def test_no_engine_holds_the_logits_of_a_micro_batch(tmp_path, layout):
    folder = tiny.make_model(str(tmp_path), "llama", vocab=V, max_position_embeddings=256)
    world_size, config = world_and_role(layout, folder, tokens=T)
    for peak, largest in run_case(world_size, "tests.engine.test_vocabulary_memory:step_of_an_engine", config=config):
        assert largest < 0.25 and peak < 0.75, (peak, largest)
