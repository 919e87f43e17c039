"""Cases for worlds of processes (harness.py): what the megatron engine must not have of shared trainers' bugs.

Each asserts on every rank; test_traps_megatron.py names the traps and the layouts.
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from safetensors.torch import load_file

from mrl.batch import Batch
from mrl.config.schema import RoleConfig
from mrl.engine.guards import checksum
from mrl.engine.megatron import optim, streams
from mrl.engine.megatron.engine import MegatronEngine
from tests.engine import tiny
from tests.engine.contract import assert_equal, everyone, loss_fn, make_engine, train


def rules(engine: MegatronEngine):
    """(parameter, its rule) of all chunks of this rank."""
    for model, of_chunk in zip(engine.model.chunks, engine.model.rules, strict=True):
        for name, parameter in model.named_parameters():
            yield parameter, of_chunk[name]


def replicas_stay_equal(config: RoleConfig) -> None:
    """After three steps on data that differs between ranks, whoever holds the same piece of a tensor holds the same bits.

    A piece is named by its HF tensors and its place on the split axis, so this covers data-parallel replicas, norms under
    tensor parallelism, experts over their own replicas, and both ends' copies of tied embeddings.
    """
    engine = make_engine(config)
    before = {rule.hf: checksum(p) for p, rule in rules(engine)}
    train(engine, 3)
    pieces = [((rule.hf, rule.rank), checksum(p)) for p, rule in rules(engine)]
    assert all(checksum(p) != before[rule.hf] for p, rule in rules(engine)), "a parameter did not change"
    known: dict[tuple, int] = {}
    shared = 0
    for rank, theirs in enumerate(everyone(pieces)):
        for piece, value in theirs:
            shared += piece in known
            assert known.setdefault(piece, value) == value, f"{piece} of rank {rank} differs from an earlier rank's"
    assert shared or dist.get_world_size() == 1


def gradients_are_summed_once_over_replicas(config: RoleConfig) -> None:
    """Ranks' own gradients differ before the reduction; after it they are the mean, and no more may be added.

    The mean, because scaling.py has multiplied the loss by the data-parallel size that megatron divides by.
    """
    engine = make_engine(config)
    engine.optimizer_zero_grad()
    share = engine.shard_data(tiny.uneven_batch())
    with engine.train_mode():
        engine.forward_backward_step(share)
    parameter = next(p for p, rule in rules(engine) if rule.mcore.endswith("linear_qkv.weight"))
    own = parameter.main_grad.clone()
    parts = everyone(own)
    assert not torch.equal(parts[0], parts[1])
    with engine.model.state.installed():
        engine._reduce()
        optim.gather_gradients(engine.model.wrapped)
    torch.testing.assert_close(parameter.main_grad, sum(parts) / len(parts), rtol=1e-5, atol=1e-7)
    try:
        with engine.train_mode():
            engine.forward_backward_step(share)
    except AssertionError as error:
        assert "optimizer_zero_grad" in str(error)
    else:
        raise AssertionError("gradients accumulated on top of reduced ones")


def split_parameters_say_so(config: RoleConfig) -> None:
    """The attribute by which megatron's gradient norm counts a parameter on one rank or on each agrees with our table."""
    engine = make_engine(config)
    for p, rule in rules(engine):
        split = bool(getattr(p, "tensor_model_parallel", False))
        degree = engine.model.dims.etp if rule.expert is not None else engine.model.dims.tp
        if degree > 1:
            assert split == (rule.axis is not None), f"{rule.mcore}: tensor_model_parallel is {split}"
        dims = engine.model.dims
        # False: reduced over the replicas of its experts, which optim.py marks where they are others than the rest's
        expected = rule.expert is None or (dims.ep == 1 and dims.etp == dims.tp)
        assert getattr(p, "allreduce", True) == expected, rule.mcore


def padding_of_the_vocabulary_stays_zero(config: RoleConfig) -> None:
    engine = make_engine(config)
    train(engine, 2)
    found = 0
    for p, rule in rules(engine):
        if rule.kind == "vocab" or "embed_tokens" in rule.hf[0] or "lm_head" in rule.hf[0]:
            start = rule.rank * p.shape[0]
            padding = p[max(0, engine.model.hf["vocab_size"] - start) :]
            assert not padding.any(), rule.mcore
            found += padding.shape[0]
    assert sum(everyone(found)) > 0


def results_are_the_same_on_every_rank(config: RoleConfig) -> None:
    """Loss and metrics, also of a metric that one micro-batch of one rank has, or that comes before a stage without any."""
    engine = make_engine(config)

    def with_some(data: Batch, predictions: dict, ctx: dict):
        loss, ctx = loss_fn(data, predictions, ctx)
        ctx["metrics"]["nll"] = loss.detach()
        if data.max_length == 23:
            ctx["metrics"]["of the longest"] = torch.tensor(1.0)
        return loss, ctx

    engine.set_loss_fn(with_some)
    batch = tiny.uneven_batch(sequences=5)
    with engine.train_mode():
        _, loss, ctx = engine.forward_backward_step(engine.shard_data(batch))
    metrics = ctx["metrics"]
    assert all(theirs == (loss, metrics) for theirs in everyone((loss, metrics)))
    assert abs(metrics["nll"] - loss) < 1e-6 * loss
    assert abs(metrics["of the longest"] - 1 / batch.denominators["tokens"]) < 1e-9
    assert metrics["trained"] == 1.0


def two_engines_as_if_alone(first: RoleConfig, second: RoleConfig) -> None:
    """Engines of different layouts whose steps alternate, one also inside the other's mode, equal each alone, bit for bit;
    so do evaluations of two batches at the end."""

    def evaluated(engine: MegatronEngine) -> list[float]:
        with engine.eval_mode():
            shares = [engine.shard_data(tiny.uneven_batch(seed)) for seed in range(2)]
            return [engine.forward_backward_step(share, forward_only=True)[1]["loss"] for share in shares]

    def alone(config: RoleConfig) -> tuple[list, dict]:
        engine = make_engine(config)
        history = [*train(engine, 3), *evaluated(engine)]
        return history, {name: t.clone() for name, t in engine.hf_weights()}

    expected_first, expected_second = alone(first), alone(second)
    a, b = make_engine(first), make_engine(second)
    assert a.model.dims != b.model.dims
    history_a, history_b = [], []
    for seed in range(3):
        share = a.shard_data(tiny.uneven_batch(seed))
        a.optimizer_zero_grad()
        with a.train_mode():
            if seed == 1:
                history_b += train(b, 1, first=seed)
            _, loss, ctx = a.forward_backward_step(share)
        if seed != 1:
            history_b += train(b, 1, first=seed)
        history_a.append((loss, float(a.optimizer_step()), a.lr_scheduler_step(), ctx["metrics"]))
    assert (history_a + evaluated(a), history_b + evaluated(b)) == (expected_first[0], expected_second[0])
    assert_equal(dict(a.hf_weights()), expected_first[1])
    assert_equal(dict(b.hf_weights()), expected_second[1])


def random_numbers_by_rank(config: RoleConfig) -> list[tuple]:
    """(coordinates, a draw inside tensor-parallel regions, a draw outside of them) of each rank."""
    engine = make_engine(config)
    with engine.model.state.installed():
        outside = torch.rand(4).tolist()
        with tensor_parallel.get_cuda_rng_tracker().fork():
            inside = torch.rand(4).tolist()
    return everyone((dataclasses.asdict(engine.model.coords), inside, outside))


def gradients_and_masters_are_fp32(config: RoleConfig) -> None:
    """bfloat16 parameters; fp32 where gradients are accumulated and reduced, in the masters, and in AdamW's moments."""
    engine = make_engine(config)
    train(engine, 1)
    assert all(p.dtype == torch.bfloat16 for p, _ in rules(engine))
    assert all(p.main_grad.dtype == torch.float32 for p, _ in rules(engine))
    assert all(buffer.grad_dtype == torch.float32 for buffer in optim.gradient_buffers(engine.model.wrapped))
    finer = 0
    for part in optim.optimizers_of(engine.model.optimizer):
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                finer += int((master != master.bfloat16()).sum())
                assert master.dtype == torch.float32
                state = part.optimizer.state[master]
                assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    assert finer > 0  # an update below the rounding of bfloat16 is kept


def loss_and_norm(config: RoleConfig) -> list[tuple[float, float]]:
    return [(loss, norm) for loss, norm, *_ in train(make_engine(config), 2)]


# -- weights -----------------------------------------------------------------------------------------------------------


def weights_travel_in_batches(config: RoleConfig) -> None:
    """Of three shards each, so that a parameter's shards are not all in one: on rank 0, and sent on to every rank."""
    engine = make_engine(config)
    expected = load_file(f"{config.model.path}/model.safetensors")
    with mock.patch.object(streams, "BATCH_BYTES", 3 * streams.MIN_BATCH_BYTES):
        owned = list(streams._owned(engine.model))
        sizes = [len(batch) for batch in streams._batches(engine.model, owned, torch.float32)]
        assert len(sizes) > 2 and set(sizes[:-1]) == {3} and sum(sizes) == sum(each.rule.degree for each in owned)
        for everywhere in (False, True):
            found = dict(engine.hf_weights(everywhere=everywhere))
            assert_equal(found, expected if everywhere or engine.is_main else {})
