"""On-policy distillation (`algorithm.name: opd`): a step written out with Hugging Face models, layouts, and what is refused."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.config.load import from_dict
from mrl.config.ppo import PPOConfig
from mrl.errors import ConfigError
from tests.engine.harness import run_case
from tests.trainers.rl import tiny_policies
from tests.trainers.rl.test_layouts import FSDP, MEGATRON, check_equal, run_once  # noqa: F401  # a fixture
from tests.trainers.rl.tiny_policies import SEQUENCES, make_config

TEMPERATURE = 0.8


def train(config, world=1, ended="done", **kwargs):
    found = run_case(world, "tests.trainers.rl.cases:train", config=config, **kwargs)
    assert found[0] == ended, found
    return found


def log_probs(model, row):
    """Of the sampled tokens of a sequence, at the sampler's temperature."""
    tokens = torch.tensor(row["tokens"])
    found = torch.log_softmax(model(input_ids=tokens[None, :-1]).logits[0] / TEMPERATURE, -1)
    return found.gather(1, tokens[1:, None])[:, 0][torch.tensor(row["mask"][1:]) == 1]


def test_a_step_is_the_policy_gradient_of_the_reverse_kl(inputs, tmp_path):
    """Each sampled token's advantage is log p of the teacher less log p of the student, whatever comes after it."""
    config = make_config(inputs, tmp_path / "run", "opd", algorithm={"mini_batch_size": SEQUENCES}, train={"steps": 1})
    train(config)
    (rows,), (metrics,) = (
        tiny_policies.samples_of(tmp_path / "run").values(),
        tiny_policies.metrics_of(tmp_path / "run"),
    )
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(inputs / name, dtype=torch.float32) for name in ("model", "other")
    )
    student.get_input_embeddings().padding_idx = None  # a pad token that was sampled trains like any other
    total, tokens, kls = 0.0, 0, []
    for row in rows:
        of_student = log_probs(student, row)
        with torch.no_grad():
            advantages = log_probs(teacher, row) - of_student
        assert row["reward"] == 0 and row["advantage"] == pytest.approx(float(advantages.mean()), abs=1e-5)
        if row["advantages"] is not None:
            assert row["advantages"][-len(advantages) :] == pytest.approx(advantages.tolist(), abs=2e-5)
        total, tokens = total - (advantages * of_student).sum(), tokens + len(advantages)
        kls.append(-float(advantages.sum()))
    (total / tokens).backward()
    norm = float(torch.cat([p.grad.flatten() for p in student.parameters()]).norm())
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=2e-5)
    assert metrics["actor/sequence_kl"] == pytest.approx(sum(kls) / len(kls), rel=1e-5)
    assert (metrics["reward/mean"], metrics["actor/kl_coef"]) == (0, 1)


@pytest.mark.slow
def test_a_student_that_is_its_teacher_does_not_move(inputs, tmp_path):
    reference = {"model": {"path": str(inputs / "model")}}
    config = make_config(inputs, tmp_path / "run", "opd", reference=reference, train={"guards": False})
    train(config)
    first, _ = tiny_policies.metrics_of(tmp_path / "run")
    assert (first["train/loss"], first["train/grad_norm"], first["actor/kl"]) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, world, engines",
    [
        ("actor tp2, teacher pp2", 2, {"actor": MEGATRON(tp=2), "reference": MEGATRON(pp=2, size=2)}),
        ("dp2, teacher fsdp", 2, {"actor": MEGATRON(size=2), "reference": FSDP(size=1)}),
        ("fsdp cp2, padded", 2, {"actor": FSDP(cp=2)}),
    ],
)
def test_an_iteration_is_the_same_everywhere(run_once, inputs, layout, world, engines):  # noqa: F811
    check_equal(run_once, inputs, "opd", "model", layout, engines, world)


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_bit_and_checkpoints_hold_no_teacher(inputs, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    steps = {"train": {"steps": 4}, "checkpoint": {"every": 2, "export_hf": False}}
    train(make_config(inputs, whole, "opd", **steps))
    train(make_config(inputs, stopped, "opd", **(steps | {"train": {"steps": 2}})))
    train(make_config(inputs, stopped, "opd", **steps))
    assert tiny_policies.metrics_of(stopped) == tiny_policies.metrics_of(whole)
    held = [path for path in (whole / "checkpoints").rglob("*reference*")]
    assert not held and (whole / "checkpoints" / "step_00000004").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opd", "grpo"])
def test_another_vocabulary_is_refused(inputs, tmp_path, name):
    """Of a teacher and of any other reference."""
    shutil.copytree(inputs / "other", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace('"7": ', '"seven": '))
    config = make_config(inputs, tmp_path / "run", name, reference={"model": {"path": str(tmp_path / "other")}})
    said = train(config, ended="ConfigError")[1]
    assert "reference.model.path: value" in said and "has another vocabulary than actor.model.path: 2 tokens" in said


@pytest.mark.parametrize(
    "changes, says",
    [
        (
            {"reference": {"model": {"path": None}}},
            "reference.model.path: value null leaves algorithm.name opd no teacher",
        ),
        ({"reference": {"update_every": 2}}, "reference.update_every: value 2 would make the actor its own teacher"),
        ({"algorithm": {"kl_in": "loss"}}, 'algorithm.kl_in: value "loss" takes from algorithm.name opd its reward'),
        ({"algorithm": {"name": "grpo"}}, "rewards: value null leaves nothing to learn from"),
    ],
)
def test_contradictions_are_one_line(inputs, tmp_path, changes, says):
    with pytest.raises(ConfigError) as caught:
        from_dict(make_config(inputs, tmp_path, "opd", **changes), PPOConfig)
    assert says in str(caught.value) and "\n" not in str(caught.value)
