"""`mrl sft` with a teacher, end to end on tiny models: equal to transformers and torch's AdamW, on every layout, with a
cache, and after a stop."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from mrl.config.load import from_dict
from mrl.config.schema import DataConfig
from mrl.data.dataset import SFTDataset
from mrl.metric_names import DISTILL_METRICS, SFT_METRICS
from mrl.metrics import read
from mrl.trainers.teacher import Teacher
from mrl.weights.hf_config import read_hf_config
from tests.engine.harness import run_case
from tests.tiers import in_tiers
from tests.trainers import tiny_runs
from tests.trainers.test_dpo import OF_KIND
from tests.trainers.tiny_runs import adamw_numbers, assert_goes_on_to_the_bit, numbers, read_rows, write_rows

CASE = "tests.trainers.cases:train"
ROWS, BATCH, STEPS = tiny_runs.TRAIN_ROWS, tiny_runs.BATCH, 3

KINDS = {  # teacher
    "forward_kl, exact": {"loss": "forward_kl", "top_k": None},
    "forward_kl, top 5, hot, with sft": {"loss": "forward_kl", "top_k": 5, "temperature": 2.0, "weight": 0.75},
    "reverse_kl, exact, hot": {"loss": "reverse_kl", "top_k": 10**6, "temperature": 1.5},
    "reverse_kl, top 5": {"loss": "reverse_kl", "top_k": 5},
    "jsd, exact, with sft": {"loss": "jsd", "beta": 0.3, "top_k": None, "weight": 0.5},
    "jsd, top 5": {"loss": "jsd", "top_k": 5},
}


@pytest.fixture(scope="module")
def places(inputs, tmp_path_factory) -> pathlib.Path:
    """`model`, `teacher` (the same but wider, with other weights), both also `deep` and with `experts`;
    `train.jsonl` and `eval.jsonl`."""
    folder = tmp_path_factory.mktemp("distillation")
    for name in ("train.jsonl", "eval.jsonl"):
        shutil.copy(inputs / name, folder / name)
    shutil.copytree(inputs / "model", folder / "model")
    shutil.copytree(inputs / "model", folder / "teacher")
    config = AutoModelForCausalLM.from_pretrained(folder / "model").config
    config.hidden_size, config.num_hidden_layers, config.initializer_range = 64, 2, 0.2
    torch.manual_seed(7)
    Qwen3ForCausalLM(config).save_pretrained(folder / "teacher")
    for kind in ("deep ", "experts "):
        for name, scale in (("model", 0.02), ("teacher", 0.2)):
            config = AutoModelForCausalLM.from_pretrained(inputs / "model").config
            config.initializer_range = scale
            shutil.copytree(inputs / "model", folder / f"{kind}{name}")
            OF_KIND[kind](config).save_pretrained(folder / f"{kind}{name}")
    return folder


def make_config(places: pathlib.Path, output_dir: pathlib.Path, **changes: Any) -> dict[str, Any]:
    own = {
        "optimizer": {"lr": 1e-3, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0},
        "teacher": {"model": {"path": str(places / "teacher")}, "top_k": 5},
        "data": {"shuffle": False},
        "train": {"steps": STEPS, "global_batch_size": BATCH},
        "checkpoint": {"export_hf": False},
    }
    return tiny_runs.make_config(places, output_dir, **tiny_runs.over(own, changes))


def train(config: dict[str, Any], world: int = 1, **details: Any) -> tuple[str, str]:
    return run_case(world, CASE, config=config, **details)[:2]


# ---------------------------------------------------------------------------------------------- transformers and torch


def logits(model: torch.nn.Module, ids: list[int], mask: list[int]) -> Tensor:
    """Those before the trained tokens, in float64."""
    return model(torch.tensor([ids])).logits[0, :-1].double()[torch.tensor(mask[1:], dtype=torch.bool)]


def divergence(keys: dict[str, Any], teacher: Tensor, student: Tensor) -> tuple[Tensor, float]:
    """The papers' sums, of whole distributions or of the teacher's likeliest tokens and all others in one; and the sum of
    what the teacher gives these others. teacher, student: logits or log-probs."""
    p, q = ((z / keys.get("temperature", 1.0)).softmax(-1) for z in (teacher, student))
    if keys["top_k"] == 5:
        ids = p.topk(keys["top_k"]).indices
        p, q = (torch.cat([x.gather(1, ids), 1 - x.gather(1, ids).sum(1, keepdim=True)], 1) for x in (p, q))
    kl = lambda a, b: (a * (a / b).log()).sum()  # noqa: E731
    beta = keys.get("beta", 0.5)
    m = beta * p + (1 - beta) * q
    kinds = {"forward_kl": kl(p, q), "reverse_kl": kl(q, p), "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m)}
    return kinds[keys["loss"]], float(p[:, -1].sum())


def oracle(
    places: pathlib.Path, keys: dict[str, Any], which: str = "train", steps: int = STEPS, others: tuple[str, ...] = (),
    kind: str = "", apart: list[list[float]] | None = None,
) -> list[float]:  # fmt: skip
    """What `numbers` has of a run, by transformers and torch's AdamW. others: the folders of further teachers, which rows name. kind: of
    the student and its teacher. apart: gets each step's mean divergence from each teacher, over its own tokens."""
    folders = (f"{kind}model", f"{kind}teacher", *others)
    model, *teachers = (AutoModelForCausalLM.from_pretrained(places / name) for name in folders)
    data = DataConfig(train=str(places / f"{which}.jsonl"), max_length=64)
    dataset = SFTDataset(data, AutoTokenizer.from_pretrained(places / "model"), teachers=others)
    weight, batch = keys.get("weight", 1.0), len(dataset) if which == "eval" else BATCH

    def loss_of(step: int) -> Tensor:
        rows = [dataset.load((step * batch + i) % len(dataset)) for i in range(batch)]
        count = sum(sum(row.mask[1:]) for row in rows)
        loss = torch.zeros((), dtype=torch.float64)
        sums, counts = [0.0] * len(teachers), [0] * len(teachers)
        for row in rows:
            of_student = logits(model, row.ids, row.mask)
            with torch.no_grad():
                of_teacher = logits(teachers[row.teacher], row.ids, row.mask)
            labels = torch.tensor([i for i, m in zip(row.ids[1:], row.mask[1:], strict=True) if m])
            nll = -of_student.log_softmax(-1).gather(1, labels[:, None]).sum()
            far, _ = divergence(keys, of_teacher, of_student)
            sums[row.teacher] += float(far.detach())
            counts[row.teacher] += len(labels)
            far = far * keys.get("temperature", 1.0) ** 2
            loss = loss + ((1 - weight) * nll + weight * far) / count
        if apart is not None:
            apart.append([value / tokens for value, tokens in zip(sums, counts, strict=True)])
        return loss

    return adamw_numbers(model, steps, loss_of)


@pytest.fixture(scope="module")
def numbers_of(places):
    return functools.cache(lambda name, kind="": oracle(places, KINDS[name], kind=kind))


@pytest.mark.parametrize("name", list(KINDS)[:2])
def test_steps_are_those_of_transformers_and_adamw(places, tmp_path, numbers_of, name):
    """Three steps, the later ones of a trained student: equal losses and norms show equal gradients and updates. All kinds
    in layouts below."""
    assert train(make_config(places, tmp_path, teacher=KINDS[name])) == ("done", "")
    assert numbers(tmp_path) == pytest.approx(numbers_of(name), rel=2e-5)


MEGATRON = {"backend": "megatron"}
LAYOUTS = {  # processes, the student's engine, the teacher's where it is another, data
    "fsdp2, padded, the teacher at tp2": (2, {}, {**MEGATRON, "parallel": {"tp": 2}}, {"packing": False}),
    "dp2, packed, by tokens": (2, {**MEGATRON, "micro_batch": {"tokens": 80, "size": None}}, None, {}),
    "tp2, the teacher at pp2": (
        2, {**MEGATRON, "parallel": {"tp": 2}}, {**MEGATRON, "parallel": {"pp": 2}, "micro_batch": {"size": 4}}, {},
    ),
    "cp2": (2, {**MEGATRON, "parallel": {"cp": 2}}, None, {}),
    "fsdp cp2": (2, {"parallel": {"cp": 2}}, None, {}),
    "pp2 vpp2": (2, {**MEGATRON, "parallel": {"pp": 2, "vpp": 2}}, None, {}),
    "ep2": (2, {**MEGATRON, "parallel": {"ep": 2}}, None, {}),
}  # fmt: skip
KIND_OF = {"pp2 vpp2": "deep ", "ep2": "experts "}  # of the models, by the layout, where it is another
PAIRS = [(layout, list(KINDS)[i % len(KINDS)]) for i, layout in enumerate(LAYOUTS)]


@pytest.mark.parametrize("layout, name", in_tiers(PAIRS[2:3], [PAIRS[1], PAIRS[4]], PAIRS))
def test_layouts_give_the_same_steps(places, tmp_path, numbers_of, layout, name):
    world, engine, own, data = LAYOUTS[layout]
    every = {"device": "cpu", "micro_batch": {"size": 2}, "backend": "fsdp"}
    kind = KIND_OF.get(layout, "")
    teacher = KINDS[name] | ({} if own is None else {"engine": every | own})
    teacher["model"] = {"path": str(places / f"{kind}teacher")}
    config = make_config(places, tmp_path, teacher=teacher, engine=every | engine, data=data)
    config["model"]["path"] = str(places / f"{kind}model")
    assert train(config, world) == ("done", "")
    assert numbers(tmp_path) == pytest.approx(numbers_of(name, kind), rel=2e-5)


# --------------------------------------------------------------------------------------------------------- the teacher


def test_a_student_that_is_its_teacher_does_not_move(places, tmp_path):
    """Loss and gradient are 0 to the bit: no step of AdamW is made of rounding."""
    teacher = {"model": {"path": str(places / "model")}, "loss": "jsd"}
    config = make_config(places, tmp_path, teacher=teacher, engine=MEGATRON, train={"guards": False})
    assert train(config) == ("done", "")
    assert [(row["train/loss"], row["train/grad_norm"]) for row in read(tmp_path / "metrics.jsonl")] == [(0, 0)] * STEPS


def test_cached_log_probs_are_those_of_the_teacher_to_the_bit(places, tmp_path):
    """Evaluation too; a second run of another length takes what is there, and adds nothing."""
    live, cached = tmp_path / "live", tmp_path / "cached"
    data = {"eval": str(places / "eval.jsonl"), "shuffle": True}
    for folder, cache in ((live, False), (cached, True)):
        assert train(make_config(places, folder, teacher={"cache": cache}, data=data)) == ("done", "")
    assert tiny_runs.steps(live) == tiny_runs.steps(cached)
    never = {"perf/mfu", "perf/save_held_s", "perf/save_write_s", "train/mtp_loss"}  # the one save is the last step's
    never |= {"distill/divergence/<teacher>", "eval/distill/divergence/<teacher>"}  # of several
    assert set(read(live / "metrics.jsonl")[-1]) == (set(SFT_METRICS) | set(DISTILL_METRICS)) - never


def test_a_damaged_cache_is_made_anew_and_one_that_lacks_rows_gets_them(places, tmp_path):
    run = tmp_path / "run"
    config = make_config(places, run, teacher={"cache": True}, train={"steps": 1})
    said = run_case(1, CASE, config=config)[2]
    assert "teacher: its log-probs of 10 rows are written to" in said
    assert "goes on" not in said and "made anew" not in said
    whole, file = numbers(run), run / "teacher" / "log_probs-00000.pt"

    def again(config: dict[str, Any]) -> str:
        shutil.rmtree(run / "checkpoints")
        (run / "metrics.jsonl").unlink()
        ended, message, said = run_case(1, CASE, config=config)
        assert (ended, message) == ("done", "")
        return said

    assert "teacher: its log-probs of 10 rows are in" in again(config) and numbers(run) == whole
    file.write_bytes(file.read_bytes()[:100])
    said = again(config)
    assert "are written to" in said and numbers(run) == whole and not file.exists()
    assert f"files in {file.parent} are damaged, or of another model or config, and are made anew" in said
    said = again(
        make_config(places, run, teacher={"cache": True}, train={"steps": 1}, data={"eval": str(places / "eval.jsonl")})
    )
    assert "teacher: its log-probs of 17 rows are written to" in said and "made anew" not in said


def test_a_cache_is_known_by_all_that_its_log_probs_depend_on(places, tmp_path):
    model = {"path": shutil.copytree(places / "teacher", str(tmp_path / "teacher"))}
    tokenizer, hf_config = AutoTokenizer.from_pretrained(places / "model"), read_hf_config(places / "model")

    def made_by(**keys: Any) -> dict[str, Any]:
        teacher = Teacher(from_dict(make_config(places, tmp_path / "run", teacher={"model": model, **keys})))
        teacher.check(tokenizer, hf_config)
        return teacher._made_by(SimpleNamespace(on_main=lambda fn: fn()))

    first = made_by()
    assert made_by() == first
    for keys in ({"temperature": 2.0}, {"top_k": 4}, {"model": model | {"dtype": "bfloat16"}}):
        assert made_by(**keys) != first
    weights = load_file(tmp_path / "teacher" / "model.safetensors")
    other = {name: weight * 1.5 for name, weight in weights.items()}  # of the same names and sizes
    save_file(other, tmp_path / "teacher" / "model.safetensors")
    assert made_by() != first


def test_a_teacher_has_no_dropout(places, tmp_path, numbers_of):
    """On megatron, whose models are in training until they are told otherwise."""
    shutil.copytree(places / "teacher", tmp_path / "teacher")
    file = tmp_path / "teacher" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_dropout": 0.5}))
    teacher = KINDS["forward_kl, exact"] | {"model": {"path": str(tmp_path / "teacher")}}
    config = make_config(places, tmp_path / "run", teacher=teacher, engine=MEGATRON)
    assert train(config) == ("done", "")
    assert numbers(tmp_path / "run") == pytest.approx(numbers_of("forward_kl, exact"), rel=2e-5)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_bit(places, tmp_path):
    keys = {"teacher": {"cache": True}, "data": {"shuffle": True}}
    assert_goes_on_to_the_bit(CASE, lambda folder: make_config(places, folder, **keys), tmp_path, step=2, world=2)


def test_another_teacher_does_not_go_on_with_a_run(places, tmp_path):
    """One that is refused leaves the cache of the run's own as it was."""

    def ends(path: pathlib.Path, steps: int) -> tuple[str, str]:
        teacher = {"cache": True, "model": {"path": str(path)}}
        return train(make_config(places, tmp_path / "run", teacher=teacher, train={"steps": steps}))

    assert ends(places / "teacher", 1) == ("done", "")
    kept = (tmp_path / "run" / "teacher" / "log_probs-00000.pt").read_bytes()
    ended, said = ends(places / "model", 2)
    assert (tmp_path / "run" / "teacher" / "log_probs-00000.pt").read_bytes() == kept
    assert ended == "ConfigError" and said.startswith("teacher.model.path: value")
    assert "config.json and weights differ" in said


def test_an_evaluation_is_the_loss_on_all_rows(places, tmp_path):
    name = "forward_kl, top 5, hot, with sft"
    config = make_config(places, tmp_path, teacher=KINDS[name], optimizer={"lr": 1e-12}, train={"steps": 1},
                         data={"eval": str(places / "eval.jsonl")})  # fmt: skip
    assert train(config) == ("done", "")
    (found,) = read(tmp_path / "metrics.jsonl")
    assert found["eval/loss"] == pytest.approx(oracle(places, KINDS[name], "eval", 1)[0], rel=2e-5)
    parts = 0.25 * found["eval/distill/nll"] + 0.75 * 4 * found["eval/distill/divergence"]
    assert found["eval/loss"] == pytest.approx(parts, rel=1e-6)


# ------------------------------------------------------------------------------------------------- several, row by row

SEVERAL = {  # processes, engine, what the second teacher has of its own, keys of `teacher`
    "one process": (1, {}, {}, {}),
    "dp2, with a cache": (2, {**MEGATRON}, {}, {"cache": True}),
    "tp2, the second at pp2": (
        2, {**MEGATRON, "parallel": {"tp": 2}}, {"engine": {**MEGATRON, "parallel": {"pp": 2}}}, {},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def by_row(places) -> pathlib.Path:
    """`third`, another teacher, and rows of which every third names it: batches of four have one or two of them."""
    shutil.copytree(places / "model", places / "third")
    config = AutoModelForCausalLM.from_pretrained(places / "model").config
    config.initializer_range = 0.3
    torch.manual_seed(11)
    Qwen3ForCausalLM(config).save_pretrained(places / "third")
    rows = enumerate(read_rows(places / "train.jsonl"))
    write_rows(places / "by_row.jsonl", [{**row, "teacher": "third"} if i % 3 == 1 else row for i, row in rows])
    return places


@pytest.mark.parametrize("name", in_tiers(["one process"], ["dp2, with a cache"], SEVERAL))
def test_each_row_learns_from_the_teacher_that_it_names(by_row, tmp_path, name):
    world, engine, own, keys = SEVERAL[name]
    keys = {"loss": "forward_kl", "top_k": 5, **keys}
    third = {"model": {"path": str(by_row / "third")}, **own}
    if "engine" in own:
        third["engine"] = {"device": "cpu", "micro_batch": {"size": 2}, **own["engine"]}
    config = make_config(
        by_row, tmp_path, teacher={**keys, "others": {"third": third}}, data={"train": str(by_row / "by_row.jsonl")},
        engine={"device": "cpu", "micro_batch": {"size": 2}, "backend": "fsdp", **engine},
    )  # fmt: skip
    assert train(config, world) == ("done", "")
    apart: list[list[float]] = []
    expected = oracle(by_row, keys, "by_row", others=("third",), apart=apart)
    assert numbers(tmp_path) == pytest.approx(expected, rel=2e-5)
    for row, step in zip(read(tmp_path / "metrics.jsonl"), apart, strict=True):
        found = [row[f"distill/divergence/{name}"] for name in ("teacher", "third")]
        assert found == pytest.approx(step, rel=2e-5)


@pytest.mark.slow
def test_adapters_learn_from_the_teacher_that_a_source_names(by_row, tmp_path):
    """As whole models would at first, where adapters add nothing; then the divergence falls."""
    keys = {"loss": "forward_kl", "top_k": 5}
    data = [{"path": str(by_row / "train.jsonl"), "teacher": "third"}]
    config = make_config(
        by_row, tmp_path, teacher=keys | {"others": {"third": {"model": {"path": str(by_row / "third")}}}},
        data={"train": data}, model={"lora": {"rank": 4}}, optimizer={"lr": 1e-2}, train={"steps": 12},
    )  # fmt: skip
    assert train(config) == ("done", "")
    rows = [{**row, "teacher": "third"} for row in read_rows(by_row / "train.jsonl")]
    write_rows(by_row / "named.jsonl", rows)
    losses = numbers(tmp_path)[:12]
    assert losses[0] == pytest.approx(oracle(by_row, keys, "named", 1, others=("third",))[0], rel=2e-5)
    assert losses[-1] < 0.8 * losses[0]


def test_a_teacher_without_rows_is_said_and_an_evaluation_has_those_of_its_rows(by_row, tmp_path):
    """With a cache all rows are read before the first step, so that it is known; else the sources' keys tell."""
    others = {name: {"model": {"path": str(by_row / "third")}} for name in ("third", "idle")}
    data = {"train": str(by_row / "train.jsonl"), "eval": str(by_row / "by_row.jsonl")}
    keys = {"others": others, "cache": True}
    said = run_case(1, CASE, config=make_config(by_row, tmp_path, teacher=keys, data=data, train={"steps": 1}))[2]
    assert "teacher.others.idle: no row learns from it, so it is not asked" in said
    assert "teacher.others.third: its log-probs of 3 rows are written to" in said
    (found,) = read(tmp_path / "metrics.jsonl")
    names = {name.rpartition("/")[2] for name in found if name.startswith("eval/distill/divergence/")}
    assert names == {"teacher", "third"} and "distill/divergence/third" not in found
    assert found["distill/divergence/teacher"] == found["distill/divergence"]
