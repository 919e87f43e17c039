"""The keys of preference training and reward models: what null stands for, and contradictions, each refused in one line."""

from __future__ import annotations

import functools

import pytest

from mrl.commands.dpo import COMMAND
from mrl.commands.rm import COMMAND as RM
from mrl.config.dpo import ROWS, DPOConfig
from mrl.config.rm import RMConfig
from mrl.parallel import ParallelDims
from tests.config.refused import assert_refused, config_of

BASE = {
    "output_dir": "runs/dpo",
    "model": {"path": "model"},
    "loss": {"name": "dpo"},
    "data": {"train": "pairs.jsonl", "max_length": 100},
    "train": {"steps": 10, "global_batch_size": 8},
}
KTO = ("loss.name=kto",)


made = functools.partial(config_of, DPOConfig, BASE)


REFUSED = [
    (("loss.gamma=1",), "loss.gamma: value 1.0 is not read by loss dpo; leave it out; it is of simpo"),
    (("loss.name=ipo", "loss.label_smoothing=0.1"), "loss.label_smoothing: value 0.1 is not read by loss ipo"),
    (("loss.name=simpo", "loss.reference_free=true"), "loss.reference_free: value true is not read by loss simpo"),
    ((*KTO, "loss.length_normalized=true"), "is not read by loss kto; leave it out; it is of dpo, ipo"),
    ((*KTO, "loss.desirable_weight=0", "loss.undesirable_weight=0"), "loss.desirable_weight: value 0 is 0 and"),
    ((*KTO, "train.global_batch_size=1"), "train.global_batch_size: value 1 leaves kto's KL no other row"),
    (("data.format=unpaired",), 'data.format: value "unpaired" has no pairs'),
    ((*KTO, "data.format=unpaired", "data.prompt_end=x"), 'data.prompt_end: value "x" is of the format preference'),
    (
        (*KTO, 'data.train=[{"path": "a", "format": "unpaired", "prompt_end": "x"}]'),
        'data.train[0].prompt_end: value "x" is of the format preference, and rows have the format unpaired',
    ),
    (("loss.name=orpo", "reference.cache=true"), "reference.cache: value true is not used by loss orpo"),
    (
        ("loss.reference_free=true", "reference.cache=true"),
        "reference.cache: value true is not used with loss.reference",
    ),
    ((*KTO, "reference.cache=true"), "reference.cache: value true cannot be true with kto"),
    (
        ("engine.batch_invariant=true", "engine.micro_batch.size=1"),
        "engine.batch_invariant: value true needs micro-batches",
    ),
    (("engine.micro_batch.size=3",), "engine.micro_batch.size: value 3 is odd"),
    (("engine.micro_batch.tokens=199",), "engine.micro_batch.tokens: value 199 is less than a pair of sequences of"),
    (  # with which each of a pair has a multiple of 4 places, and no micro-batch more than the budget
        (
            "data.max_length=98",
            "engine.parallel.cp=2",
            "engine.micro_batch.tokens=199",
            'engine.megatron={"tp_comm_overlap": true}',
        ),
        "engine.micro_batch.tokens: value 199 is less than a pair of sequences of data.max_length 98",
    ),
    (("reference.engine.micro_batch.tokens=50",), "reference.engine.micro_batch.tokens: value 50 is less than a pair"),
    (
        ("reference.engine.recompute=full",),
        'reference.engine.recompute: value "full" is for training, and the reference never trains; leave it out',
    ),
    (
        ('data.train=[{"path": "a"}, {"path": "b", "format": "unpaired"}]',),
        'data.train[1].format: value "unpaired" has no pairs, which loss.name dpo is of; set loss.name to kto, or data.tr',
    ),
    (('data.eval={"b": {"path": "b", "format": "unpaired"}}',), 'data.eval.b.format: value "unpaired" has no pairs'),
    (("reference.engine.backend=fsdp", "reference.engine.parallel.tp=2"), "reference.engine.parallel.tp"),
    (("train.epochs=1",), "train.steps: value 10 is given together with train.epochs 1"),
    (("engine.backend=fsdp", "model.mtp.detach=true"), "model.mtp: value "),
    (("model.lora.rank=4", "model.init=random"), 'model.init: value "random" makes a base that no other run has'),
]


@pytest.mark.parametrize("overrides, says", REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_contradictions_are_one_line(overrides, says):
    assert_refused(DPOConfig, BASE, overrides, says)


@pytest.mark.parametrize("name", ROWS)
def test_null_is_the_number_of_the_losss_row(name):
    loss = made(f"loss.name={name}").loss
    assert loss.resolved["beta"] == {"simpo": 2.0}.get(name, 0.1)
    assert loss.resolved["sft_weight"] == {"orpo": 1.0}.get(name, 0.0)
    given = made(f"loss.name={name}", "loss.beta=0.7", "loss.sft_weight=0").loss
    assert (given.value("beta"), given.value("sft_weight")) == (0.7, 0.0)


def test_whole_texts_may_be_rows_of_one_source():
    source = '{"path": "a", "format": %s, "prompt_end": "x"}'
    assert made(f"data.train=[{source % 'null'}]").data.train[0].prompt_end == "x"
    assert made(*KTO, "data.format=unpaired", f"data.train=[{source % 'preference'}]").data.train[0].prompt_end == "x"


def test_which_losses_need_a_reference_and_pairs():
    configs = {name: made(f"loss.name={name}") for name in ROWS}
    assert {name for name, c in configs.items() if c.loss.needs_reference} == {"dpo", "ipo", "kto"}
    assert {name for name, c in configs.items() if c.group == 2} == set(ROWS) - {"kto"}
    assert not made("loss.reference_free=true").loss.needs_reference


def test_a_micro_batch_of_kto_holds_one_sequence():
    assert made(*KTO, "engine.micro_batch.tokens=100").longest_group[0] == 100
    assert made("engine.micro_batch.tokens=200").longest_group[0] == 200


def test_a_pair_takes_more_places_where_userbuffers_and_context_parallelism_meet():
    """Each alone lets a micro-batch hold as many tokens as a pair has."""
    pair = "data.max_length=99", "engine.micro_batch.tokens=198"
    made(*pair, "engine.parallel.cp=2")
    made(*pair, 'engine.megatron={"tp_comm_overlap": true}')


@pytest.mark.parametrize(
    "overrides, own, start",
    [
        ((), True, True),
        (("model.lora.rank=4",), False, True),
        (("model.lora.rank=4", "reference.model.path=other"), True, False),
        (("model.lora.rank=4", "reference.model.dtype=float32"), True, False),
        (("model.lora.rank=4", "reference.model.dtype=bfloat16"), False, True),  # the model's own
        (("reference.engine.parallel.tp=2",), True, False),
        (("loss.name=orpo",), False, True),
    ],
)
def test_where_the_reference_comes_from(overrides, own, start):
    config = made(*overrides)
    assert (config.reference_has_own_model, config.reference_is_start) == (own, start)


def test_the_references_model_has_no_adapters_and_weights_of_its_own():
    config = made("model.lora.rank=4", "reference.model.path=other")
    assert config.reference_model.lora is None and config.reference_model.path == "other"
    random = made("model.init=random", "reference.model.path=other").reference_model
    assert (random.init, made("model.init=random").reference_model.init) == ("pretrained", "random")


def test_a_dry_run_says_the_loss_with_its_numbers_and_where_the_reference_is():
    dims = ParallelDims(world_size=2)

    def lines(*overrides: str) -> list[str]:
        config = made(*overrides)
        needed = [part for part in COMMAND.parts(config) if part.role in COMMAND.needed(config)]
        return COMMAND.describe(config, needed, [dims] * len(needed))

    assert lines("loss.beta=0.2") == [
        "layout: dp2 on 2 processes, micro-batches of up to 4096 tokens",
        "reference: dp2 on 2 processes, micro-batches of up to 4096 tokens",
        "loss: dpo (beta 0.2, label_smoothing 0.0, reference_free False, length_normalized False, sft_weight 0.0)",
        "reference: a model of its own", "length: 10 steps of 8 rows a step",
    ]  # fmt: skip
    assert lines("model.lora.rank=4")[-2] == "reference: the model without its adapters"
    assert (
        lines("reference.cache=true")[-2] == "reference: its log-probs of all rows are computed before the first step"
    )
    assert lines("loss.name=simpo")[1:3] == ["loss: simpo (beta 2.0, gamma 1.0, sft_weight 0.0)", "reference: none"]


# -- reward models --

RM_BASE = {
    "output_dir": "runs/rm",
    "model": {"path": "model"},
    "loss": {"name": "bradley_terry"},
    "data": {"train": "pairs.jsonl", "max_length": 100},
    "train": {"steps": 10, "global_batch_size": 8},
}
STEPS, GRADED = ("loss.name=steps",), ("loss.name=regression",)


made_rm = functools.partial(config_of, RMConfig, RM_BASE)


REFUSED_RM = [
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


@pytest.mark.parametrize("overrides, says", REFUSED_RM, ids=[" ".join(o) for o, _ in REFUSED_RM])
def test_contradictions_of_reward_models_are_one_line(overrides, says):
    assert_refused(RMConfig, RM_BASE, overrides, says)


def test_a_micro_batch_holds_a_pair_or_one_answer():
    assert made_rm("engine.micro_batch.tokens=200").longest_group[0] == 200 and made_rm().group == 2
    single = made_rm(*STEPS, "engine.micro_batch.tokens=100", "data.step_separator=x")
    assert (single.longest_group[0], single.group) == (100, 1)


def test_a_dry_run_says_the_loss_its_micro_batches_and_the_length():
    def lines(*overrides: str) -> list[str]:
        config = made_rm(*overrides)
        return RM.describe(config, RM.parts(config), [ParallelDims(world_size=2, tp=2, etp=2)])

    assert lines("loss.centering=0.5") == [
        "layout: tp2 on 2 processes", "micro-batch: up to 4096 tokens", "loss: bradley_terry (centering 0.5)",
        "length: 10 steps of 8 rows a step",
    ]  # fmt: skip
    single = lines(*STEPS, "engine.micro_batch.size=3", "data.packing=false", "train.steps=null", "train.epochs=1")
    assert single[1:] == ["micro-batch: 3 sequences", "loss: steps", "length: 1 epoch of 8 rows a step"]
