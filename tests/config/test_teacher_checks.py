"""The section `teacher` of `mrl sft`: what null stands for, and contradictions, each refused in one line."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from mrl.algorithms.recipes import check_algorithm
from mrl.commands.ppo import COMMAND as PPO
from mrl.commands.sft import COMMAND
from mrl.config.ppo import PPOConfig
from mrl.config.schema import EngineConfig, MicroBatchConfig, SFTConfig
from mrl.errors import ConfigError
from mrl.parallel import ParallelDims
from mrl.trainers.teacher import role_of
from tests.config.refused import assert_refused, config_of

BASE = {
    "output_dir": "runs/distill",
    "model": {"path": "model", "lora": {"rank": 4}},
    "teacher": {"model": {"path": "teacher"}},
    "data": {"train": "rows.jsonl", "max_length": 100},
    "train": {"steps": 10, "global_batch_size": 8},
}
ONE = ParallelDims(world_size=1, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1, sp=False)
SERVER = ("teacher.server.url=http://host:8000",)


made = functools.partial(config_of, SFTConfig, BASE)


REFUSED = [
    (("model.mtp.loss_weight=0.1",), 'model.mtp: value {"loss_weight": 0.1, "detach": false} predicts one label for each token, and a teacher'),
    (("teacher.beta=0.5",), "teacher.beta: value 0.5 is not used by teacher.loss forward_kl; leave it out; it is of jsd"),
    (("teacher.alpha=0.5",), "teacher.alpha: value 0.5 is given to an unknown key; did you mean teacher.weight?"),
    (("teacher.model.lora.rank=4",), "teacher.model.lora"),
    (("teacher.engine.micro_batch.tokens=50",), "teacher.engine.micro_batch.tokens: value 50 is less than"),
    (("teacher.engine.recompute=full",), 'teacher.engine.recompute: value "full" is for training, and the teacher never'),
    (("teacher.engine.backend=fsdp", "teacher.engine.parallel.tp=2"), "teacher.engine.parallel.tp"),
    ((*SERVER, "teacher.engine.backend=fsdp"), "teacher.engine: is given and not used beside teacher.server"),
    ((*SERVER, "teacher.model.dtype=float32"), 'teacher.model.dtype: value "float32" is not used beside teacher.server'),
    ((*SERVER, "teacher.top_k=null"), "teacher.top_k: value null is the whole vocabulary, which no server gives"),
    ((*SERVER, "teacher.temperature=2"), "teacher.temperature: value 2 is not what a server's log-probs are taken at"),
    (("teacher.server.url=host:8000",), 'teacher.server.url: value "host:8000" is no URL; write it as http://host'),
    (("teacher.others={math: {model: {path: x}, engine: {backend: fsdp, parallel: {tp: 2}}}}",), "teacher.others.math.engine.parallel.tp"),
    (("teacher.others={teacher: {model: {path: x}}}",), 'teacher.others: value "teacher" is the name of the teacher in teacher.model'),
    (("teacher.others={a.b: {model: {path: x}}}",), 'teacher.others: value "a.b" is no name of a teacher'),
    (("data.teacher=math",), 'data.teacher: value "math" is no teacher of teacher.others; give it there'),
    (("data.train=[{path: a, teacher: code}]", "teacher.others={math: {model: {path: x}}}"),
     'data.train[0].teacher: value "code" is no teacher of teacher.others; give one of math'),
]  # fmt: skip


OPD = {
    "output_dir": "runs/opd",
    "actor": {"model": {"path": "model"}},
    "reference": {"model": {"path": "teacher"}},
    "algorithm": {"name": "opd"},
    "data": {"train": "prompts.jsonl"},
    "train": {"steps": 10, "global_batch_size": 8},
}
OVER = ("algorithm.distill.loss=reverse_kl",)
SERVED = ("reference.server.url=http://host:8000",)
MATH = ("reference.others={math: {model: {path: x}}}",)
REFUSED_OPD = [
    (("reference.model.path=null",), "reference.model.path: value null leaves algorithm.name opd no teacher"),
    (("reference.update_every=2",), "reference.update_every: value 2 would make the actor its own teacher"),
    (("algorithm.kl_in=loss",), 'algorithm.kl_in: value "loss" is not what algorithm.name opd minimizes'),
    (("algorithm.name=grpo",), "rewards: value null leaves nothing to learn from"),
    ((*OVER, "algorithm.distill.beta=0.5"), "algorithm.distill.beta: value 0.5 is not used by algorithm.distill.loss reverse_kl; leave it out"),
    ((*OVER, "algorithm.kl_in=reward"), 'algorithm.kl_in: value "reward" is not what algorithm.name opd minimizes'),
    ((*OVER, "algorithm.kl_estimator=k3"), 'algorithm.kl_estimator: value "k3" would not be read by this opd'),
    ((*OVER, "algorithm.clip_low=0.1"), "algorithm.clip_low: value 0.1 is of the objective on rewards, and there are none beside algorithm.distill; leave it out, or give rewards.functions with a weight"),
    ((*OVER, "algorithm.correction=truncate", "rewards.functions=[{name: math, weight: 0}]"), 'algorithm.correction: value "truncate" is of the objective on rewards'),
    (("algorithm.kl_coef=0",), "algorithm.kl_coef: value 0 leaves nothing to learn from: it weighs the teacher, and nothing is rewarded; give one above 0, leave it out, or give rewards.functions with a weight"),
    (("algorithm.dynamic_sampling=true",), "algorithm.dynamic_sampling: value true compares the rewards of a prompt's samples, and nothing is rewarded"),
    ((*OVER, "algorithm.name=grpo", "rewards.functions=[{name: math}]"), "algorithm.distill: is given, and algorithm.name grpo has no teacher; leave it out, or set algorithm.name to opd"),
    ((*MATH, "algorithm.name=grpo", "rewards.functions=[{name: math}]"), "reference.others: is given, and algorithm.name grpo has no teacher"),
    ((*SERVED, "algorithm.name=grpo", "rewards.functions=[{name: math}]"), "reference.server: is given, and algorithm.name grpo has no teacher"),
    (("algorithm.name=grpo", "algorithm.kl_in=exact", "rewards.functions=[{name: math}]"), 'algorithm.kl_in: value "exact" is not known; use one of none, reward, loss'),
    ((*MATH, "data.teacher=code"), 'data.teacher: value "code" is no teacher of reference.others; give one of math'),
    (("data.train=[{path: a, teacher: code}]",), 'data.train[0].teacher: value "code" is no teacher of reference.others; give it there'),
    (("reference.others={reference: {model: {path: x}}}",), 'reference.others: value "reference" is the name of the teacher in reference.model'),
    (("reference.others={math: {model: {path: x}, engine: {backend: fsdp, parallel: {tp: 2}}}}",), "reference.others.math.engine.parallel.tp"),
    ((*SERVED, "algorithm.distill.top_k=null"), "algorithm.distill.top_k: value null is the whole vocabulary, which no server gives"),
    ((*SERVED, "rollout.temperature=0.7"), "rollout.temperature: value 0.7 is not what a server's log-probs are taken at"),
    ((*OVER, "actor.model.mtp.loss_weight=0.1"), "actor.model.mtp: value"),
    (("checkpoint.best=actor/divergence",), 'checkpoint.best: value "actor/divergence" is no metric that the run can be best at'),
]  # fmt: skip


@pytest.mark.parametrize("overrides, says", REFUSED_OPD, ids=[" ".join(o) for o, _ in REFUSED_OPD])
def test_contradictions_of_on_policy_teachers_are_one_line(overrides, says):
    with pytest.raises(ConfigError) as caught:
        check_algorithm(config_of(PPOConfig, OPD, *overrides))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "more", [("rewards.functions=[{name: math}]",), ("algorithm.overlong_fraction=0.5",)], ids=["rewards", "length"]
)
def test_beside_rewards_the_policy_has_an_objective(more):
    assert check_algorithm(config_of(PPOConfig, OPD, *OVER, "algorithm.clip_low=0.1", *more)).clip_low == 0.1


def test_each_on_policy_teacher_is_a_role_of_its_own():
    others = "reference.others={a: {model: {path: x}, engine: {parallel: {tp: 2}}}, b: {model: {path: y}, server: {url: http://h}}}"
    config = config_of(PPOConfig, OPD, others, *OVER)
    parts = PPO.parts(config)
    assert [(part.role, part.model.path, part.engine.parallel.tp) for part in parts if part.role.startswith("ref")] == [
        ("reference", "teacher", 1), ("reference.others.a", "x", 2),
    ]  # fmt: skip
    assert [phase.role for phase in PPO.phases(config).phases][-3:] == ["reference", "reference.others.a", "actor"]
    two = dataclasses.replace(ONE, world_size=2, tp=2, etp=2)
    lines = PPO.describe(config, parts, [two if part.role.endswith("a") else ONE for part in parts])
    assert "distill: reverse_kl to the teacher over its 64 likeliest tokens and the rest at temperature 1" in lines
    assert any(line.startswith("reference.others.a: megatron tp2 on 2 processes") for line in lines)
    assert "reference.others.b: at http://h" in lines


@pytest.mark.parametrize("overrides, says", REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_contradictions_are_one_line(overrides, says):
    assert_refused(SFTConfig, BASE, overrides, says)


def test_null_is_the_students():
    """But its adapters, which a teacher has not."""
    config = made("model.dtype=float32")
    model = config.teacher_model(config.teacher.model)
    assert (model.path, model.dtype, model.lora) == ("teacher", "float32", None)
    assert [part.role for part in COMMAND.parts(config)] == ["", "teacher"]
    assert COMMAND.parts(config)[1].engine == config.engine and COMMAND.parts(config)[1].optimizer is None
    assert [phase.role for phase in COMMAND.phases(config).phases] == ["teacher", ""]
    assert [phase.role for phase in COMMAND.phases(made("teacher.cache=true")).phases] == [""]
    assert [part.role for part in COMMAND.parts(made(*SERVER))] == [""]


def test_each_of_several_teachers_is_a_model_of_its_own():
    others = "teacher.others={a: {model: {path: x}, engine: {parallel: {tp: 2}}}, b: {model: {path: y}, server: {url: http://h}}}"
    config = made(others)
    parts = COMMAND.parts(config)
    assert [(part.role, part.model.path, part.engine.parallel.tp) for part in parts[1:]] == [
        ("teacher", "teacher", 1), ("teacher.others.a", "x", 2),
    ]  # fmt: skip
    assert [phase.role for phase in COMMAND.phases(config).phases] == ["teacher", "teacher.others.a", ""]
    lines = COMMAND.describe(config, parts, [ONE, ONE, dataclasses.replace(ONE, world_size=2, tp=2, etp=2)])
    assert "teacher.others.a: tp2 on 2 processes" in lines and "teacher.others.b: at http://h" in lines


def test_the_teachers_engine_is_what_its_section_says():
    """Whole, whatever its keys are; a token budget that is null is resolved."""
    own = "teacher.engine.parallel.pp=2", "teacher.engine.micro_batch.size=3", "teacher.engine.device=cpu"
    config = made(*own, "data.packing=false", "seed=3")
    role = role_of(config, config.teacher, "folder")
    named = EngineConfig(device="cpu", micro_batch=MicroBatchConfig(size=3))
    expected = dataclasses.replace(named, parallel=dataclasses.replace(named.parallel, pp=2))
    assert role.engine == expected and role.optimizer is None and (role.packing, role.seed) == (False, 3)
    assert role.model.path == "folder" and role_of(made(), made().teacher, "folder").engine.micro_batch.tokens == 4096


def test_a_dry_run_says_what_is_compared():
    config = made("teacher.loss=jsd", "teacher.top_k=null", "teacher.weight=0.25", "teacher.temperature=2")
    lines = COMMAND.describe(config, COMMAND.parts(config), [ONE, ONE])
    assert (
        lines[2].startswith("teacher: ")
        and "0.25 jsd (beta 0.5) over the whole vocabulary at temperature 2" in lines[3]
    )
    assert COMMAND.describe(made(*SERVER), COMMAND.parts(made(*SERVER)), [ONE])[2] == "teacher: at http://host:8000"
