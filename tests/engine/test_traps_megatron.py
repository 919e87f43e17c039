"""The megatron engine against the bugs of other trainers (by the trap's number).

Where a trap is covered elsewhere or cannot occur:
- 3, 4 (token counts): mrl hands megatron a 2-tuple, whose factors scaling.py cancels (trap 2, below), and leaves
  `calculate_per_token_loss` off (tests/mcore_models/test_families.py); gradients where the ranks' counts differ most are
  compared in the parity rows with one trained token: cp2, dp2 and cp2xpp2, which the table promises.
- 5 (means of means, "the critic forgotten"): rows with 1, 2, 4 and 8 micro-batches, also of the value head.
- 9 (router losses): test_router_losses.py. 12 (tied value head), 16 (layers that tensor parallelism does not split: the
  value head, norms of heads, the router): parity rows.
- 15 (zigzag or contiguous): one place decides (attention.zigzag_places, used by inputs.py and the attention); below.
- 17 (packed recurrent state): there is no recurrent layer; that documents do not see each other is a case of the contract.
- 21 (mask off by one): labels are shifted in mrl.batch alone; the row with one trained token has the loss of that token.
- 26 (parameter all-gather overlapped with a save): `overlap_param_gather` is never on.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from mrl.batch import make_batch
from mrl.config.schema import MoEConfig
from mrl.engine.megatron.engine import MegatronEngine
from mrl.engine.megatron.inputs import padded_lengths, prepare
from mrl.engine.megatron.scaling import megatron_loss, megatron_scale
from mrl.mcore_models.attention import zigzag_places
from mrl.parallel import ParallelDims
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.engine.parity import Row
from tests.tiers import slow_but

from megatron.core.pipeline_parallel import schedules  # isort: skip  after the engine, which prepares its import
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler  # isort: skip
from unittest import mock

import torch.distributed as dist
from megatron.core import tensor_parallel
from safetensors.torch import load_file

from mrl.batch import Batch
from mrl.config.schema import RoleConfig
from mrl.engine.guards import checksum
from mrl.engine.megatron import optim, streams
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


MOE = MoEConfig(aux_loss=0.01, z_loss=0.001)


@pytest.fixture(scope="module")
def schedule_config(folder):
    """megatron's configuration of a mixture of experts, as the engine makes it."""
    return MegatronEngine(config_of(folder("mixtral"), "dp1")).model.transformer


@pytest.fixture(scope="module")
def folder(folder):
    """The models have four layers here."""
    return lambda family="llama", **fields: folder(family, **{"layers": 4, **fields})


def config_of(folder, layout, **options):
    options = {"tokens": 64, **options}
    return tiny.role(folder, backend="megatron", parallel=Row("llama", layout).parallel, **options)


def run(case, folder, layout, *, options=None, **kwargs):
    config = config_of(folder, layout, **(options or {}))
    return run_case(
        Row("llama", layout).world_size, f"tests.engine.test_traps_megatron:{case}", config=config, **kwargs
    )


# -- gradients and their reduction -------------------------------------------------------------------------------------


def test_trap_1_gradients_are_reduced_by_the_engine_once(folder):
    run("gradients_are_summed_once_over_replicas", folder("llama"), "dp2")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (("llama", {}), "dp2"),
        (("qwen3", {}), "tp2+sp"),
        (("qwen3_5", {}), "tp2"),  # norms of gated delta nets, without sequence parallelism
        pytest.param(("llama", {"tied": True}), "pp4", marks=pytest.mark.slow),
        pytest.param(("llama", {"tied": True}), "tp2+spxpp2xdp2", marks=pytest.mark.nightly),
        pytest.param(("qwen3", {}), "tp2xcp2", marks=pytest.mark.slow),
        pytest.param(("mixtral", {}), "dp4xep2", marks=pytest.mark.nightly),
        (("qwen3_moe", {"decoder_sparse_step": 2}), "tp2+spxdp2xep2"),
    ],
    ids=str,
)
def test_traps_1_11_24_every_parameter_trains_and_replicas_stay_equal(folder, model, layout):
    """11: both copies of tied embeddings (more than two stages too). 24: dense parameters are updated beside experts."""
    family, fields = model
    run("replicas_stay_equal", folder(family, **fields), layout)


@pytest.mark.parametrize(
    ("family", "layout", "head"),
    [
        ("qwen3", "tp2", "lm"), ("qwen3", "tp2+spxpp2", "lm"), ("llama", "tp2", "value"), ("llama", "tp2+spxpp2", "value"),
        ("mixtral", "tp2+spxdp2xep2", "lm"), ("mixtral", "tp2+spxdp2xep2xetp2", "lm"), ("gpt_oss", "tp2+spxetp1", "lm"),
    ],
)  # fmt: skip
def test_trap_10_parameters_carry_megatron_attributes(folder, family, layout, head):
    """With them, the norm counts each parameter once: every parity row compares the norm and a clipped update."""
    run("split_parameters_say_so", folder(family, tied=family == "qwen3"), layout, options={"head": head})


@pytest.mark.parametrize(("layout", "tied"), [("tp2", False), ("tp4+sp", True)])
def test_trap_13_padding_of_the_vocabulary_is_never_trained(folder, layout, tied):
    run("padding_of_the_vocabulary_stays_zero", folder("llama", tied=tied), layout)


@pytest.mark.parametrize("layout", ["dp2", "cp2", "pp2", "pp2xvpp2", "tp2+sp", "pp2xdp2"])
def test_traps_6_and_8_reported_numbers(folder, layout):
    """6: the loss that is reported is the loss that was trained, on every rank. 8: nobody waits for a rank without a metric."""
    run("results_are_the_same_on_every_rank", folder("llama"), layout, options={"tokens": None, "size": 2})


@pytest.mark.parametrize(("dp", "cp", "count", "share"), list(itertools.product((1, 2), (1, 2), (1, 3), (1.0, 0.25))))
def test_trap_2_what_megatron_multiplies_is_cancelled(monkeypatch, schedule_config, dp, cp, count, share):
    """megatron's own schedule divides each micro-batch's loss; its scale function and DDP's `/ (dp * cp)` follow by hand.

    The cp ranks' parts add up to one gradient. What the schedule gives to router losses is the derivation's, too.
    """
    scale = megatron_scale(share)
    monkeypatch.setattr(schedule_config, "grad_scale_func", scale)
    sums = torch.arange(1.0, 1 + dp * count)
    reduced = 0.0
    for loss_sum in sums:
        own = megatron_loss(loss_sum, denominator=7.0, micro_batches=count, dp=dp, share=share)
        output, _ = schedules.forward_step_calc_loss(
            None, torch.zeros(1), lambda _, own=own: (own, {}), schedule_config, None, False, count, [],
            cp_group_size=cp, is_last_stage=True,
        )  # fmt: skip
        assert float(MoEAuxLossAutoScaler.main_loss_backward_scale) == pytest.approx(share * cp / count)
        reduced += float((scale or float)(output)) / (dp * cp)
    assert reduced == pytest.approx(float(sums.sum()) / 7.0)


# -- sequences over context-parallel ranks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "cp", "sp"), [(1, 1, False), (2, 1, True), (1, 2, False), (2, 2, True), (4, 4, True), (1, 3, False)]
)
@pytest.mark.parametrize("packed", [True, False])
def test_traps_14_and_15_short_sequences_come_back_from_the_zigzag(tp, cp, sp, packed):
    """Sequences of one token and more, shorter than 2*cp*tp: every place is a real token or padding, and none is lost."""
    dims = ParallelDims(world_size=tp * cp, tp=tp, cp=cp, sp=sp)
    for lengths in ([1], [1, 1, 1], [5, 1, 9], [2 * cp * tp, 2 * cp * tp + 1], []):
        batch = make_batch([list(range(10, 11 + n)) for n in lengths], [[1.0] * (n + 1) for n in lengths])
        padded = padded_lengths(lengths, dims, packed=packed)
        assert sum(padded) % (cp * (tp if sp else 1)) == 0
        assert cp == 1 or all(n % (2 * cp) == 0 for n in padded)
        shards = [
            prepare(batch, dims, dims.coordinates(tp * r), packed=packed, device=torch.device("cpu"), thd=False)
            for r in range(cp)
        ]
        for field in ("tokens", "labels"):
            whole = torch.cat([getattr(shard, field) for shard in shards])
            order = shards[0].layout.order
            whole = whole if order is None else whole[order]
            assert torch.equal(whole[shards[0].places], getattr(batch, field))
        assert sum(int((~shard.padding).sum()) for shard in shards) == sum(lengths)


def test_trap_15_each_rank_has_one_early_and_one_late_segment_of_every_sequence():
    assert zigzag_places((8, 4), 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag_places((8, 4), 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


# -- state of the process ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layouts",
    [
        ("tp2+spxpp2", "dp4"),
        pytest.param(("cp2xdp2", "pp4"), marks=pytest.mark.nightly),
        pytest.param(("tp4", "pp2xvpp2xcp2"), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_trap_27_two_engines_in_one_process(folder, layouts):
    """One is a mixture of experts with more layers, both draw dropout masks: groups, RNG and tables are each engine's own."""
    first = config_of(folder("llama", attention_dropout=0.3), layouts[0])
    second = config_of(folder("mixtral", layers=5, attention_dropout=0.3), layouts[1].replace("dp4", "dp4xep4"))
    second = dataclasses.replace(second, engine=dataclasses.replace(second.engine, moe=MOE))
    run_case(4, "tests.engine.test_traps_megatron:two_engines_as_if_alone", first=first, second=second)


@pytest.mark.parametrize("layout", ["tp2+spxpp2", "cp2xdp2"])
def test_trap_29_ranks_draw_dropout_masks_of_their_own(folder, layout):
    """Inside tensor-parallel regions (attention heads) every rank draws its own; outside, tensor-parallel ranks alike."""
    ranks = run("random_numbers_by_rank", folder("llama", attention_dropout=0.5), layout)
    assert len({tuple(inside) for _, inside, _ in ranks}) == len(ranks)
    for (a, _, outside_a), (b, _, outside_b) in itertools.combinations(ranks, 2):
        alike = all(a[axis] == b[axis] for axis in ("cp_rank", "dp_rank", "pp_rank"))
        assert (outside_a == outside_b) == alike


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", slow_but(["tp2"], ["tp2", "tp2xpp2"]))
def test_weights_travel_in_batches(folder, layout):
    run("weights_travel_in_batches", folder("llama"), layout)


# -- bfloat16 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["tp2+sp", "pp2", "dp2xep2"])
def test_trap_30_gradients_and_masters_are_fp32(folder, layout):
    family = "mixtral" if "ep" in layout else "llama"
    run("gradients_and_masters_are_fp32", folder(family), layout, options={"dtype": "bfloat16"})


def test_trap_30_bf16_is_close_to_fp32_and_alike_in_every_layout(folder):
    """bfloat16 rounds each value to 4e-3; loss and norm are means over many, so they agree better than that.

    The second step's norm is not compared: AdamW's first steps turn the rounding of small gradients into whole updates.
    """
    exact = run("loss_and_norm", folder("llama"), "dp1")
    one = run("loss_and_norm", folder("llama"), "dp1", options={"dtype": "bfloat16"})
    for layout in ("tp2+sp", "pp2", "cp2", "dp2"):
        rounded = run("loss_and_norm", folder("llama"), layout, options={"dtype": "bfloat16"})
        assert rounded[0] == pytest.approx(exact[0], rel=1e-2), layout
        assert rounded[0] == pytest.approx(one[0], rel=4e-3), layout
        assert rounded[1][0] == pytest.approx(exact[1][0], rel=4e-3), layout
