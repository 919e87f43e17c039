"""On-policy distillation (`algorithm.name: opd`): a step written out with Hugging Face models, layouts, and what is refused."""

from __future__ import annotations

import functools
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from mrl.config.ppo_checks import REWARD_METRICS
from tests.engine.harness import run_case
from tests.tiers import in_tiers, nightly_but
from tests.trainers.rl import tiny_policies
from tests.trainers.rl.test_by_hand import log_probs_and_entropy
from tests.trainers.rl.test_layouts import FSDP, MEGATRON, check_equal, run_once  # noqa: F401  # a fixture
from tests.trainers.rl.tiny_policies import SEQUENCES, make_config
from tests.trainers.test_teacher_server import answering

TEMPERATURE = 0.8


def train(config, world=1, ended="done", **kwargs):
    found = run_case(world, "tests.trainers.rl.cases:train", config=config, **kwargs)
    assert found[0] == ended, found
    return found


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


SAMPLED = [  # layout, student, engines of actor and teacher
    ("actor tp2, teacher pp2", "model", {"actor": MEGATRON(tp=2), "reference": MEGATRON(pp=2, size=2)}),
    ("dp2, teacher fsdp", "model", {"actor": MEGATRON(size=2), "reference": FSDP(size=1)}),
    ("fsdp cp2, padded", "model", {"actor": FSDP(cp=2)}),
    ("cp2, by ones", "model", {"actor": MEGATRON(cp=2, size=1)}),
    ("pp2 vpp2", "deep", {"actor": MEGATRON(pp=2, vpp=2, size=2), "reference": FSDP()}),
    ("ep2", "moe", {"actor": MEGATRON(ep=2), "reference": FSDP()}),
    ("ep2, padded", "moe", {"actor": MEGATRON(ep=2), "reference": MEGATRON(size=2)}),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout, student, engines", nightly_but(SAMPLED[:3], SAMPLED))
def test_an_iteration_is_the_same_everywhere(run_once, inputs, deep, layout, student, engines):  # noqa: F811
    check_equal(run_once, inputs, "opd", student, layout, engines, 2)


@pytest.mark.slow
@pytest.mark.parametrize("distill", [None, {"top_k": 5}], ids=["sampled", "distributions"])
def test_a_stopped_run_goes_on_to_the_bit_and_checkpoints_hold_no_teacher(inputs, tmp_path, distill):
    """With two teachers; stopped within an iteration, whose rollout goes on."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps(json.loads(line) | ({"teacher": "second"} if i % 3 == 0 else {})) + "\n"
            for i, line in enumerate((inputs / "train.jsonl").read_text().splitlines())
        )
    )
    reference = {"others": {"second": {"model": {"path": str(inputs / "moe")}}}}
    steps = {
        "train": {"steps": 4}, "checkpoint": {"every": 1, "export_hf": False}, "reference": reference,
        "algorithm": {"distill": distill}, "data": {"train": str(tmp_path / "rows.jsonl")},
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
    """Of any algorithm: the run goes on to the bit, also from a checkpoint that holds it, and with no other one's weights,
    which a checkpoint after that would no longer tell from them."""
    shutil.copytree(inputs / "other", tmp_path / "reference")
    steps = {"train": {"steps": 4}, "checkpoint": {"every": 2, "export_hf": False}}
    steps["reference"] = {"model": {"path": str(tmp_path / "reference")}}
    train(make_config(inputs, tmp_path / "whole", **steps))
    for name, happening in (("new", None), ("old", "references_are_saved")):
        run = tmp_path / name
        train(make_config(inputs, run, **(steps | {"train": {"steps": 2}})), happening=happening)
        assert bool(list((run / "checkpoints").rglob("reference"))) == (name == "old")
        if name == "old":
            shutil.copytree(run, tmp_path / "older")
        train(make_config(inputs, run, **steps))
        assert tiny_policies.metrics_of(run) == tiny_policies.metrics_of(tmp_path / "whole"), name
    shutil.copy(inputs / "model" / "model.safetensors", tmp_path / "reference" / "model.safetensors")
    for name, says in (
        ("new", "is not the model of the checkpoint"),
        ("older", "has other weights than the reference of"),
    ):
        said = train(make_config(inputs, tmp_path / name, **(steps | {"train": {"steps": 6}})), ended="ConfigError")[1]
        assert said.startswith("reference.model.path: value") and says in said and "\n" not in said


# -- distributions ---------------------------------------------------------------------------------------------------------


def divergence(of_teacher, of_student, loss, top_k):
    """[N]: between the teacher's likeliest tokens and all others, from the formulas of the papers; [N] the teacher's others."""
    p, q = of_teacher.exp(), of_student.exp()
    if top_k is not None:
        ids = p.topk(top_k, -1).indices
        p, q = (torch.cat([each.gather(1, ids), 1 - each.gather(1, ids).sum(1, True)], 1) for each in (p, q))
    m = 0.3 * p + 0.7 * q
    return {
        "forward_kl": p * (p / q).log(), "reverse_kl": q * (q / p).log(),
        "jsd": 0.3 * p * (p / m).log() + 0.7 * q * (q / m).log(),
    }[loss].sum(1), p[:, -1]  # fmt: skip


def distributions(model, row):
    """[N, V] float64 log-probs before each sampled token of a sequence, at the sampler's temperature."""
    tokens = torch.tensor(row["tokens"])
    found = torch.log_softmax(model(input_ids=tokens[None, :-1]).logits[0].double() / TEMPERATURE, -1)
    return found[torch.tensor(row["mask"][1:]) == 1]


def check_step(inputs, run, loss, top_k, teachers, of_rows=None, student="model"):
    """The only step of a run against Hugging Face models. teachers: name -> folder, None for that of rows that name none.
    of_rows: the rows of data.train, where some name one."""
    (rows,), (metrics,) = tiny_policies.samples_of(run).values(), tiny_policies.metrics_of(run)
    load = functools.partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    student, models = load(inputs / student), {name: load(inputs / folder) for name, folder in teachers.items()}
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
        values, tails = divergence(of_teacher, of_student, loss, top_k)
        total, tail, tokens = total + values.sum(), tail + float(tails.sum()), tokens + len(values)
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
@pytest.mark.parametrize(("loss", "top_k"), [("forward_kl", 4), ("jsd", 6), ("reverse_kl", None)])
def test_a_step_minimizes_the_divergence_of_distributions(inputs, tmp_path, loss, top_k):
    keys = {"beta": 0.3} if loss == "jsd" else {}
    train(make_config(inputs, tmp_path / "run", "opd", **exact(loss, top_k, **keys)))
    check_step(inputs, tmp_path / "run", loss, top_k, {None: "other"})


BY_ROW = {
    "one process": (1, FSDP(), None, None),
    "micro-batches of 1, the second teacher in other ones": (1, MEGATRON(size=1), None, MEGATRON(size=2)),
    "tp2, teachers pp2 and fsdp2": (2, MEGATRON(tp=2), MEGATRON(pp=2, size=2), FSDP(size=1)),
    "pp2": (2, MEGATRON(pp=2, size=2), None, None),
    "cp2": (2, MEGATRON(cp=2), None, MEGATRON(tp=2)),
    "dp2": (2, MEGATRON(size=2), None, None),
}
"""Name -> processes, and the engines of actor, reference, and second teacher; None: the actor's."""


@pytest.mark.parametrize(
    ("name", "loss"),
    in_tiers(
        [("one process", "reverse_kl")],
        [
            ("tp2, teachers pp2 and fsdp2", "forward_kl"),
            ("cp2", "jsd"),
        ],
        [(name, loss) for name in BY_ROW for loss in ("reverse_kl", "forward_kl", "jsd")],
    ),
)
def test_each_row_learns_from_the_teacher_that_it_names(inputs, tmp_path, name, loss):
    """The second teacher has experts; as many rows as not name it."""
    world, actor, reference, second = BY_ROW[name]
    rows = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    rows = [{**row, "teacher": "second"} if i % 2 else row for i, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    beta = {"beta": 0.3} if loss == "jsd" else {}
    others = {"second": {"model": {"path": str(inputs / "moe")}, **({} if second is None else {"engine": second})}}
    config = make_config(
        inputs, tmp_path / "run", "opd", **exact(loss, **beta), actor={"engine": actor},
        data={"train": str(tmp_path / "rows.jsonl")},
        reference={"others": others, **({} if reference is None else {"engine": reference})},
    )  # fmt: skip
    train(config, world)
    check_step(inputs, tmp_path / "run", loss, 5, {None: "other", "second": "moe"}, rows)


@pytest.fixture(scope="module")
def deep(inputs):
    """A student of four layers, for two virtual stages of two."""
    config = AutoModelForCausalLM.from_pretrained(inputs / "model").config
    config.num_hidden_layers, config.layer_types = 4, config.layer_types * 2
    torch.manual_seed(5)
    model = Qwen3ForCausalLM(config)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.15)
    shutil.copytree(inputs / "model", inputs / "deep")
    model.save_pretrained(inputs / "deep")


@pytest.mark.nightly
@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize(
    ("student", "actor"), [("deep", MEGATRON(pp=2, vpp=2, size=2)), ("moe", MEGATRON(ep=2))], ids=["pp2 vpp2", "ep2"]
)
def test_layouts_of_deeper_students_and_of_experts(inputs, deep, tmp_path, student, actor, loss):
    keys = exact(loss, 5, **({"beta": 0.3} if loss == "jsd" else {}))
    sections = {"actor": {"model": {"path": str(inputs / student)}, "engine": actor}, "reference": {"engine": FSDP()}}
    train(make_config(inputs, tmp_path / "run", "opd", **keys, **sections), 2)
    check_step(inputs, tmp_path / "run", loss, 5, {None: "other"}, student=student)


@pytest.mark.slow
@pytest.mark.parametrize("engine", nightly_but([MEGATRON()], [FSDP(), MEGATRON()]), ids=["fsdp", "megatron"])
def test_over_distributions_a_student_that_is_its_teacher_does_not_move(inputs, tmp_path, engine):
    reference = {"model": {"path": str(inputs / "model")}}
    config = make_config(inputs, tmp_path / "run", "opd", reference=reference, actor={"engine": engine}, **exact())
    train(config)
    (row,) = tiny_policies.metrics_of(tmp_path / "run")
    assert (row["train/loss"], row["train/grad_norm"], row["actor/divergence"]) == (0, 0, 0)
    assert row["actor/teacher_tail"] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("distill", nightly_but([{"top_k": 5}], [None, {"top_k": 5}]), ids=["sampled", "distributions"])
def test_a_run_by_a_server_is_the_run_by_an_engine(inputs, tmp_path, distill):
    """The two round apart. On two ranks the main process alone asks."""
    changes = {
        "rollout": {"temperature": 1.0},
        "algorithm": {"distill": distill},
        "actor": {"engine": MEGATRON(size=2)},
    }
    with answering(inputs / "other") as server:
        served = {"reference": {"server": {"url": server.url}}}
        train(make_config(inputs, tmp_path / "served", "opd", **changes, **served), 2)
        assert len(server.asked) == SEQUENCES
    train(make_config(inputs, tmp_path / "engine", "opd", **changes), 2)
    found, expected = (tiny_policies.metrics_of(tmp_path / name) for name in ("served", "engine"))
    tiny_policies.assert_close_metrics(found, expected, 1e-5)


@pytest.mark.slow
def test_adapters_learn_from_distributions(inputs, tmp_path):
    """Steps of several mini-batches and epochs on a rollout, whose ratios are no longer 1: the divergence falls."""
    actor = {"model": {"lora": {"rank": 4}}, "optimizer": {"lr": 1e-2}}
    algorithm = {"distill": {"top_k": 8}, "epochs": 3}
    train(make_config(inputs, tmp_path / "run", "opd", actor=actor, algorithm=algorithm, train={"steps": 6}))
    found = [row["actor/divergence"] for row in tiny_policies.metrics_of(tmp_path / "run")]
    assert found[-1] < 0.9 * found[1]
    assert (tmp_path / "run" / "hf" / "adapter_config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but(["opd"], ["opd", "grpo"]))
def test_another_vocabulary_is_refused(inputs, tmp_path, name):
    """Of a teacher and of any other reference."""
    shutil.copytree(inputs / "other", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace('"7": ', '"seven": '))
    config = make_config(inputs, tmp_path / "run", name, reference={"model": {"path": str(tmp_path / "other")}})
    said = train(config, ended="ConfigError")[1]
    assert "reference.model.path: value" in said and "has another vocabulary than actor.model.path: 2 tokens" in said
