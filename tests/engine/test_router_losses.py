"""MoE load-balancing and z losses: their gradient against a direct computation on the Hugging Face model (trap 9).

The expected gradient is that of, for `M` micro-batches on each of `dp` ranks,

    sum over tokens of mask * nll / D  +  1 / (M * dp) * sum over ranks and micro-batches, and their MoE layers, of
        aux * E / (topk * N^2) * sum_e n_e sum_t p_te  +  z / N * sum_t (log sum_e exp(logit_te))^2

over the N real tokens of a micro-batch. The micro-batches' composition is the planner's, so layouts with the same
composition have the same gradient. Where the mini-batch comes in several calls, `1 / (M * dp)` of a call is multiplied with the
call's share of the loss tokens, so that the second term does not grow with the number of calls.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.algorithms.sft import sft_loss
from mrl.batch import Batch
from mrl.check.reference import file_names
from mrl.config.schema import MoEConfig
from mrl.engine.microbatch import balanced_shards, plan_micro_batches, split_micro_batches
from mrl.engine.registry import build_engine
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.engine.parity import Row
from tests.tiers import in_tiers

AUX, Z = 0.5, 0.1
ROWS = (
    Row("qwen3_moe", size=4),
    Row("mixtral", packing=False, size=2),
    Row("qwen3_moe", "pp2", size=4),
    Row("qwen3_moe", "tp2+sp", size=4, packing=False),
    Row("qwen3_moe", "cp2", size=4),
    Row("mixtral", "dp2", size=1, sequences=3, why="a rank with an empty micro-batch: 0, not 0 / 0"),
    Row("mixtral", "tp2+spxdp2xep2xetp2", size=2, packing=False),
    Row("qwen3_moe", "cp2xpp2", size=4, packing=False),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    fields = {"qwen3_moe": {"mlp_only_layers": [1]}, "mixtral": {}}
    return {
        family: tiny.make_model(str(tmp_path_factory.mktemp(family)), family, layers=4, **more)
        for family, more in fields.items()
    }


CASES = [(ROWS[0], 1), *((row, 2 if row.sequences >= 8 else 1) for row in ROWS)]
"""One call of forward_backward_step, and two where there are enough sequences."""


@pytest.mark.parametrize(
    ("row", "calls"), in_tiers([CASES[0], CASES[4], CASES[6]], [CASES[2], CASES[5]], CASES), ids=str
)
def test_gradient(folders, row: Row, calls: int):
    folder = folders[row.model]
    batch = tiny.uneven_batch(sequences=row.sequences)
    parts = [batch.select(indices) for indices in ([range(batch.num_sequences)], [range(3), range(3, 8)])[calls - 1]]
    actual = run_case(row.world_size, f"{__name__}:gradients", row=row, folder=folder, parts=parts)
    expected = reference_gradients(row, folder, parts, aux=AUX, z=Z)
    errors = {name: tiny.relative_l2(actual[name], value) for name, value in expected.items()}
    assert set(actual) == set(expected) and max(errors.values()) < 1e-5, sorted(errors.items(), key=lambda e: -e[1])[:5]
    if row == ROWS[0] and calls == 1:  # the losses are no rounding error in it
        without = reference_gradients(row, folder, parts, aux=0.0, z=0.0)
        router = next(name for name in without if name.endswith("mlp.gate.weight"))
        assert tiny.relative_l2(without[router], expected[router]) > 0.1


def gradients(row: Row, folder: str, parts: list[Batch]) -> dict[str, torch.Tensor]:
    """What an engine accumulates over one call for each part."""
    config = tiny.role(
        folder, backend="megatron", packing=row.packing, size=row.size, parallel=row.parallel, recompute=row.recompute,
        moe=MoEConfig(aux_loss=AUX, z_loss=Z),
    )  # fmt: skip
    engine = build_engine(config)
    engine.init_model()
    engine.set_loss_fn(sft_loss)
    engine.optimizer_zero_grad()
    with engine.train_mode():
        for part in parts:
            engine.forward_backward_step(engine.shard_data(part))
    return dict(engine.hf_gradients())


def reference_gradients(row: Row, folder: str, parts: list[Batch], *, aux: float, z: float) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
    dp = row.degrees.get("dp", 1)
    for part in parts:
        shares = [part.select(indices) for indices in balanced_shards(part.lengths.tolist(), dp)]
        lengths = [share.lengths.tolist() for share in shares]
        most = max(len(split_micro_batches(n, size=row.size, packed=row.packing)) for n in lengths)
        weight = part.loss_mask.sum().item() / part.denominators["tokens"] / dp
        for share, n in zip(shares, lengths, strict=True):
            plan = plan_micro_batches(n, size=row.size, packed=row.packing, agree=lambda count, most=most: most)
            for indices in plan:
                if indices:
                    loss = micro_batch_loss(model, share.select(indices), aux=aux, z=z, weight=weight / len(plan))
                    loss.backward()
    return file_names(model, {name: p.grad for name, p in model.named_parameters()})


def micro_batch_loss(model, data: Batch, *, aux: float, z: float, weight: float) -> torch.Tensor:
    """The masked negative log-likelihood over the mini-batch's tokens, and `weight` times the router losses."""
    total = torch.zeros(())
    with router_logits(model) as layers:
        split = (t.split(data.lengths.tolist()) for t in (data.tokens, data.labels, data.loss_mask))
        for tokens, labels, mask in zip(*split, strict=True):
            log_probs = torch.log_softmax(model(input_ids=tokens[None]).logits[0], -1)
            total = total - (log_probs.gather(1, labels[:, None])[:, 0] * mask).sum() / data.denominators["tokens"]
    topk, experts = model.config.num_experts_per_tok, model.config.num_local_experts
    for parts in layers.values():
        logits = torch.cat(parts)
        probabilities, count = torch.softmax(logits, -1), logits.shape[0]
        chosen = torch.zeros_like(logits).scatter(1, logits.topk(topk, -1).indices, 1.0)
        balance = experts / (topk * count**2) * (chosen.sum(0) * probabilities.sum(0)).sum()
        total = total + weight * (aux * balance + z * torch.logsumexp(logits, -1).square().mean())
    return total


@contextlib.contextmanager
def router_logits(model):
    """Yields a dict that fills with each MoE layer's router logits, one tensor for each forward pass."""
    logits: dict[str, list[torch.Tensor]] = {}
    hooks = []
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Router"):

            def note(module, inputs, name=name):
                hidden = inputs[0].reshape(-1, module.weight.shape[1])
                logits.setdefault(name, []).append(torch.nn.functional.linear(hidden, module.weight))

            hooks.append(module.register_forward_pre_hook(note))
    assert hooks, [type(m).__name__ for m in model.modules()]
    yield logits
    for hook in hooks:
        hook.remove()
