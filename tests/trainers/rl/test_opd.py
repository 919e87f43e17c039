"""On-policy distillation (`algorithm.name: opd`): a step written out with Hugging Face models, layouts, and what is refused."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.config.ppo_checks import REWARD_METRICS
from tests.tiers import in_tiers, nightly_but
from tests.trainers.rl import tiny_policies
from tests.trainers.rl.test_by_hand import log_probs_and_entropy
from tests.trainers.rl.test_layouts import FSDP, MEGATRON, check_equal, run_once  # noqa: F401  # a fixture
from tests.trainers.rl.tiny_policies import SEQUENCES, make_config, rows_of_two, train
from tests.trainers.test_distill import divergence
from tests.trainers.test_teacher_server import answering

TEMPERATURE = 0.8


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
        of_student, _ = log_probs_and_entropy(student, row)
        with torch.no_grad():
            advantages = log_probs_and_entropy(teacher, row)[0] - of_student
        assert row["reward"] == 0 and row["advantage"] == pytest.approx(float(advantages.mean()), abs=1e-5)
        if row["advantages"] is not None:
            assert row["advantages"][-len(advantages) :] == pytest.approx(advantages.tolist(), abs=2e-5)
        total, tokens = total - (advantages * of_student).sum(), tokens + len(advantages)
        kls.append(-float(advantages.sum()))
    (total / tokens).backward()
    norm = float(torch.cat([p.grad.flatten() for p in student.parameters()]).norm())
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=2e-5)
    assert metrics["actor/sequence_kl"] == pytest.approx(sum(kls) / len(kls), rel=1e-5)
    assert metrics["actor/kl_coef"] == 1 and not set(metrics) & set(REWARD_METRICS)


SAMPLED = {  # engines of actor and teacher
    "actor tp2, teacher pp2": {"actor": MEGATRON(tp=2), "reference": MEGATRON(pp=2, size=2)},
    "fsdp cp2, padded": {"actor": FSDP(cp=2)},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", nightly_but(["actor tp2, teacher pp2"], SAMPLED))
def test_an_iteration_is_the_same_everywhere(run_once, inputs, layout):  # noqa: F811
    check_equal(run_once, inputs, "opd", "model", layout, SAMPLED[layout], 2)


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_bit_and_checkpoints_hold_no_teacher(inputs, tmp_path):
    """With two teachers; stopped within an iteration, whose rollout goes on."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    reference = {"others": {"second": {"model": {"path": str(inputs / "moe")}}}}
    steps = {
        "train": {"steps": 4}, "checkpoint": {"every": 1, "export_hf": False}, "reference": reference,
        "algorithm": {"distill": {"top_k": 5}}, "data": {"train": rows_of_two(inputs, tmp_path, 3)[1]},
    }  # fmt: skip
    train(make_config(inputs, whole, "opd", **steps))
    train(make_config(inputs, stopped, "opd", **(steps | {"train": {"steps": 2}})))
    shutil.rmtree(stopped / "checkpoints" / "step_00000002")
    train(make_config(inputs, stopped, "opd", **steps))
    assert tiny_policies.metrics_of(stopped) == tiny_policies.metrics_of(whole)
    held = [path for path in (whole / "checkpoints").rglob("*reference*")]
    assert not held and (whole / "checkpoints" / "step_00000004").is_dir()


@pytest.mark.slow
def test_a_reference_that_never_changes_is_in_no_checkpoint(inputs, tmp_path):
    """Of any algorithm. The run goes on to the bit, and with no other one's weights."""
    shutil.copytree(inputs / "other", tmp_path / "reference")
    steps = {
        "checkpoint": {"every": 2, "export_hf": False},
        "reference": {"model": {"path": str(tmp_path / "reference")}},
    }
    for run, count in (("whole", 4), ("run", 2), ("run", 4)):
        train(make_config(inputs, tmp_path / run, **steps, train={"steps": count}))
    assert tiny_policies.metrics_of(tmp_path / "run") == tiny_policies.metrics_of(tmp_path / "whole")
    assert not list((tmp_path / "run" / "checkpoints").rglob("reference"))
    shutil.copy(inputs / "model" / "model.safetensors", tmp_path / "reference" / "model.safetensors")
    said = train(make_config(inputs, tmp_path / "run", **steps, train={"steps": 6}), ended="ConfigError")
    assert said.startswith("reference.model.path: value") and "is not the model of the checkpoint" in said


# -- distributions ---------------------------------------------------------------------------------------------------------


def distributions(model, row):
    """[N, V] float64 log-probs before each sampled token of a sequence, at the sampler's temperature."""
    tokens = torch.tensor(row["tokens"])
    found = torch.log_softmax(model(input_ids=tokens[None, :-1]).logits[0].double() / TEMPERATURE, -1)
    return found[torch.tensor(row["mask"][1:]) == 1]


def test_a_source_names_the_teacher_of_its_rows(inputs, tmp_path):
    """The second has the student's own weights."""
    reference = {"others": {"second": {"model": {"path": str(inputs / "model")}}}}
    found = []
    for data in ({}, {"teacher": "second"}):
        run = tmp_path / str(len(data))
        train(make_config(inputs, run, "opd", reference=reference, data=data, train={"guards": False}))
        found.append(tiny_policies.metrics_of(run)[0]["actor/kl"])
    assert found[0] != 0 and found[1] == 0


def check_step(inputs, run, loss, top_k, teachers, of_rows=None):
    """The only step of a run against Hugging Face models. teachers: name -> folder, None for that of rows that name none.
    of_rows: the rows of data.train, where some name one."""
    (rows,), (metrics,) = tiny_policies.samples_of(run).values(), tiny_policies.metrics_of(run)
    load = functools.partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    student, models = load(inputs / "model"), {name: load(inputs / folder) for name, folder in teachers.items()}
    student.get_input_embeddings().padding_idx = None  # a pad token that was sampled trains like any other
    total, tail, tokens, kls = 0.0, 0.0, 0, {name: [] for name in teachers}
    for row in rows:
        assert row["advantage"] == 0
        name = None if of_rows is None else of_rows[int(row["row"].rpartition(":")[2]) - 1].get("teacher")
        of_student = distributions(student, row)
        with torch.no_grad():
            of_teacher = distributions(models[name], row)
            sampled = torch.tensor(row["tokens"])[torch.tensor(row["mask"]) == 1]
            kls[name].append(float((of_student - of_teacher).gather(1, sampled[:, None]).sum()))
        value, tails = divergence({"loss": loss, "top_k": top_k, "beta": 0.3}, of_teacher, of_student)
        total, tail, tokens = total + value, tail + tails, tokens + len(of_student)
    (total / tokens).backward()
    total = float(total.detach()) / tokens
    norm = float(torch.cat([p.grad.flatten() for p in student.parameters()]).norm())
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=2e-5)
    assert metrics["train/loss"] == metrics["actor/divergence"] == pytest.approx(total, rel=1e-5)
    if top_k is None:
        assert "actor/teacher_tail" not in metrics
    else:
        assert metrics["actor/teacher_tail"] == pytest.approx(tail / tokens, rel=1e-4)
    if len(teachers) > 1:
        assert all(kls.values()), "a teacher has no sequence"
        for name, each in kls.items():
            found = metrics[f"actor/sequence_kl/{name or 'reference'}"]
            assert found == pytest.approx(sum(each) / len(each), rel=1e-5), name


def exact(loss="reverse_kl", top_k=5, **keys):
    """The sections of a run of one step over distributions."""
    distill = {"loss": loss, "top_k": top_k, **keys}
    return {"algorithm": {"distill": distill, "mini_batch_size": SEQUENCES}, "train": {"steps": 1}}


@pytest.mark.slow
def test_a_step_minimizes_the_divergence_of_whole_distributions(inputs, tmp_path):
    train(make_config(inputs, tmp_path / "run", "opd", **exact("reverse_kl", None)))
    check_step(inputs, tmp_path / "run", "reverse_kl", None, {None: "other"})


BY_ROW = {
    "reverse_kl": (1, FSDP(), None, None),
    "forward_kl": (2, MEGATRON(tp=2), MEGATRON(pp=2, size=2), FSDP(size=1)),
    "jsd": (2, MEGATRON(cp=2), None, MEGATRON(tp=2)),
}
"""Loss -> processes, and the engines of actor, reference, and second teacher; None: the actor's."""


@pytest.mark.parametrize("loss", in_tiers(["reverse_kl"], ["forward_kl"], BY_ROW))
def test_each_row_learns_from_the_teacher_that_it_names(inputs, tmp_path, loss):
    """The second teacher has experts; as many rows as not name it."""
    world, actor, reference, second = BY_ROW[loss]
    rows, file = rows_of_two(inputs, tmp_path, 2)
    beta = {"beta": 0.3} if loss == "jsd" else {}
    others = {"second": {"model": {"path": str(inputs / "moe")}, **({} if second is None else {"engine": second})}}
    config = make_config(
        inputs, tmp_path / "run", "opd", **exact(loss, **beta), actor={"engine": actor}, data={"train": file},
        reference={"others": others, **({} if reference is None else {"engine": reference})},
    )  # fmt: skip
    train(config, world)
    check_step(inputs, tmp_path / "run", loss, 5, {None: "other", "second": "moe"}, rows)


@pytest.mark.slow
def test_a_run_by_a_server_is_the_run_by_an_engine(inputs, tmp_path):
    """The two round apart. On two ranks the main process alone asks."""
    changes = {
        "rollout": {"temperature": 1.0},
        "algorithm": {"distill": {"top_k": 5}},
        "actor": {"engine": MEGATRON(size=2)},
    }
    with answering(inputs / "other") as server:
        served = {"reference": {"server": {"url": server.url}}}
        train(make_config(inputs, tmp_path / "served", "opd", **changes, **served), 2)
        assert len(server.asked) == SEQUENCES
    train(make_config(inputs, tmp_path / "engine", "opd", **changes), 2)
    found, expected = (tiny_policies.metrics_of(tmp_path / name) for name in ("served", "engine"))
    tiny_policies.assert_close_metrics(found, expected, 1e-5)
