"""`mrl dpo` end to end on a tiny model: equal to transformers and torch's AdamW, on every layout, and after a stop."""

from __future__ import annotations

import copy
import functools
import math
import pathlib
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mrl.commands.dpo import DPO
from mrl.config.dpo import DPOConfig, PreferenceDataConfig
from mrl.config.load import from_dict
from mrl.data.preferences import PreferenceDataset
from mrl.engine.fsdp.dcp_checkpoint import STATE
from mrl.metric_names import DPO_METRICS, SFT_METRICS
from mrl.metrics import read
from tests.engine.harness import run_case
from tests.resume.cases import remark
from tests.tiers import in_tiers, nightly_but
from tests.trainers import tiny_runs
from tests.trainers.dpo_cases import kl_of_others, log_prob
from tests.trainers.tiny_runs import adamw_numbers, assert_goes_on_to_the_bit, numbers, read_rows, write_rows

CASE = "tests.trainers.dpo_cases:train"
ROWS, BATCH, STEPS = 10, 4, 3


def pair(first: int) -> dict[str, Any]:
    """A row whose answers have other lengths, each row others, and every other row another weight."""
    numbers = [first] * (1 + first % 3)
    return {
        "prompt": "+".join(map(str, numbers)) + "=", "chosen": str(sum(numbers)),
        "rejected": str(sum(numbers) * 7 + first) * (1 + first % 2), "weight": (1, 0.5)[first % 2],
    }  # fmt: skip


def with_experts(config: Qwen3Config) -> Qwen3MoeForCausalLM:
    names = ("layer_types", "architectures", "model_type")
    shared = {name: value for name, value in config.to_dict().items() if name not in names}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **shared | experts))


def with_four_layers(config: Qwen3Config) -> Qwen3ForCausalLM:
    config = copy.deepcopy(config)
    config.num_hidden_layers, config.layer_types = 4, config.layer_types * 2
    return Qwen3ForCausalLM(config)


OF_KIND = {"": Qwen3ForCausalLM, "deep ": with_four_layers, "experts ": with_experts}


@pytest.fixture(scope="module")
def places(inputs, tmp_path_factory) -> pathlib.Path:
    """`model`, `other` (the same with other weights), each also `deep` and with `experts`; `train.jsonl`, `eval.jsonl`."""
    folder = tmp_path_factory.mktemp("preferences")
    config = AutoModelForCausalLM.from_pretrained(inputs / "model").config
    torch.manual_seed(7)
    for kind in ("", "deep ", "experts "):
        for name in ("model", "other"):
            shutil.copytree(inputs / "model", folder / f"{kind}{name}")
            if kind or name == "other":
                OF_KIND[kind](config).save_pretrained(folder / f"{kind}{name}")
    for name, first, count in (("train", 3, ROWS), ("eval", 100, 5)):
        write_rows(folder / f"{name}.jsonl", [pair(first + i) for i in range(count)])
    return folder


def make_config(places: pathlib.Path, output_dir: pathlib.Path, **changes: Any) -> dict[str, Any]:
    own = {
        "optimizer": {"lr": 1e-3, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0},
        "loss": {"name": "dpo"},
        "reference": {"model": {"path": str(places / "other")}},
        "data": {"shuffle": False, "eval": str(places / "eval.jsonl")},
        "train": {"steps": STEPS, "global_batch_size": BATCH},
        "checkpoint": {"export_hf": False},
    }
    if changes.get("loss", {}).get("name") in ("orpo", "simpo"):
        del own["reference"]
    return tiny_runs.make_config(places, output_dir, **tiny_runs.over(own, changes))


def train(config: dict[str, Any], world: int = 1, **details: Any) -> tuple[str, str]:
    return run_case(world, CASE, config=config, **details)[:2]


# ---------------------------------------------------------------------------------------------- transformers and torch


SMOOTHED = {"name": "dpo", "beta": 0.3, "label_smoothing": 0.2, "length_normalized": True, "sft_weight": 0.5}
"""Keys of `loss`, none at its default; those of other losses are in tests/algorithms/test_preference.py."""


def oracle_loss(name: str, model: Any, reference: Any, rows: list) -> Tensor:
    """The papers' equations, answer by answer: a mean weighted by rows, but for kto's KL. name: of a loss at mrl's
    defaults, or "smoothed"."""
    own = SMOOTHED if name == "smoothed" else {"name": name}
    name, beta = own["name"], own.get("beta", 2 if name == "simpo" else 0.1)
    weights = [row.weight for row in rows]
    mean = lambda losses: sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)  # noqa: E731
    answers = [answer for row in rows for answer in row.answers]
    policy = [log_prob(model, a.ids, a.mask, a.multi_modal_inputs) for a in answers]
    with torch.no_grad():
        ref = [log_prob(reference, a.ids, a.mask, a.multi_modal_inputs) for a in answers]
    counts = [sum(a.mask) if own.get("length_normalized") else 1 for a in answers]
    ratios = [(a - b) / count for a, b, count in zip(policy, ref, counts, strict=True)]
    means = [lp / sum(a.mask) for lp, a in zip(policy, answers, strict=True)]
    pairs = range(0, len(answers), 2)
    nll = -mean(policy[i] for i in pairs) / mean(sum(answers[i].mask) for i in pairs)
    nll = nll * own.get("sft_weight", 1 if name == "orpo" else 0)
    if name == "dpo":
        margins, e = [beta * (ratios[i] - ratios[i + 1]) for i in pairs], own.get("label_smoothing", 0)
        return nll + mean(-(1 - e) * logsigmoid(m) - e * logsigmoid(-m) for m in margins)
    if name == "ipo":
        return mean((ratios[i] - ratios[i + 1] - 1 / (2 * beta)) ** 2 for i in pairs)
    if name == "simpo":
        return mean(-logsigmoid(beta * (means[i] - means[i + 1]) - 1) for i in pairs)
    if name == "orpo":
        odds = [m - (1 - m.exp()).log() for m in means]
        return nll + beta * mean(-logsigmoid(odds[i] - odds[i + 1]) for i in pairs)
    z = kl_of_others(model, reference, answers)
    each = [1 - torch.sigmoid(beta * (-1) ** i * (r - z)) for i, r in enumerate(ratios)]
    return mean((each[i] + each[i + 1]) / 2 for i in pairs)


def oracle(
    places: pathlib.Path, name: str, kind: str = "", *, file: str = "train", auto: Any = AutoModelForCausalLM, vision: Any = None
) -> list[float]:  # fmt: skip
    """What `numbers` has of a run, by transformers and torch's AdamW."""
    folders = [places / f"{kind}{which}" for which in ("model", "other")]
    model, reference = (auto.from_pretrained(folder, dtype=torch.float32) for folder in folders)
    data = PreferenceDataConfig(train=str(places / f"{file}.jsonl"), max_length=128)
    tokenizer = AutoTokenizer.from_pretrained(places / "model")
    dataset = PreferenceDataset(data, tokenizer, paired=name != "kto", vision=vision)
    rows = [dataset.load(i) for i in range(len(dataset))]
    batch = lambda step: [rows[(step * BATCH + i) % len(rows)] for i in range(BATCH)]  # noqa: E731
    return adamw_numbers(model, STEPS, lambda step: oracle_loss(name, model, reference, batch(step)))


@pytest.fixture(scope="module")
def numbers_of(places):
    return functools.cache(lambda name, kind="": oracle(places, name, kind))


@pytest.mark.parametrize("name", ["smoothed", "ipo", "orpo", "simpo"])
def test_steps_are_those_of_transformers_and_adamw(places, tmp_path, numbers_of, name):
    """Three steps, the later ones of a trained policy: equal losses and norms show equal gradients and updates. The other
    losses in layouts below."""
    loss = SMOOTHED if name == "smoothed" else {"name": name}
    assert train(make_config(places, tmp_path, loss=loss, data={"eval": None})) == ("done", "")
    assert numbers(tmp_path) == pytest.approx(numbers_of(name), rel=2e-5)


def test_answers_that_are_labelled_one_by_one_are_those_of_pairs(places, tmp_path, numbers_of):
    """Of kto, with twice as many rows to a mini-batch."""
    rows = [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen", "weight": pair["weight"]}
        for pair in read_rows(places / "train.jsonl") for name in ("chosen", "rejected")
    ]  # fmt: skip
    data = {"train": write_rows(tmp_path / "rows.jsonl", rows), "eval": None}
    batch = {"global_batch_size": 2 * BATCH}
    config = make_config(places, tmp_path / "run", loss={"name": "kto"}, data=data, train=batch)
    assert train(config) == ("done", "")
    assert numbers(tmp_path / "run") == pytest.approx(numbers_of("kto"), rel=2e-5)


def test_the_base_under_adapters_is_the_reference_in_every_step(places, tmp_path):
    """Off, they are the reference: every log-ratio of the first step is 0 to the bit."""
    same = {"model": {"lora": {"rank": 4}}, "optimizer": {"lr": 1e-2}}
    for name, path in (("base", None), ("copy", str(places / "model"))):
        reference = {"model": {"path": path}}
        assert train(make_config(places, tmp_path / name, reference=reference, **same)) == ("done", "")
    assert numbers(tmp_path / "base") == pytest.approx(numbers(tmp_path / "copy"), rel=1e-6)
    first, *_, last = read(tmp_path / "base" / "metrics.jsonl")
    assert first["train/loss"] == pytest.approx(math.log(2), rel=1e-7)
    assert first["rewards/chosen"] == first["rewards/margin"] == 0.0 != last["rewards/margin"]


MEGATRON = {"backend": "megatron"}
LAYOUTS = {  # processes, engine, data; of kto, which is of single answers, micro-batches have half the size
    "fsdp2, padded, pairs apart": (2, {}, {"packing": False}),
    "dp2, packed, by tokens": (2, {**MEGATRON, "micro_batch": {"tokens": 160, "size": None}}, {}),
    "tp2, the reference at pp2": (2, {**MEGATRON, "parallel": {"tp": 2}}, {}),
    "cp2": (2, {**MEGATRON, "parallel": {"cp": 2}}, {}),
    "pp2, by tokens": (2, {**MEGATRON, "parallel": {"pp": 2}, "micro_batch": {"tokens": 160, "size": None}}, {}),
    "pp2 vpp2": (2, {**MEGATRON, "parallel": {"pp": 2, "vpp": 2}}, {}),
    "ep2": (2, {**MEGATRON, "parallel": {"ep": 2}, "micro_batch": {"size": 4}}, {}),
    "fsdp2, cp2": (2, {"parallel": {"cp": 2}, "micro_batch": {"size": 4}}, {}),
}
KINDS = {"pp2 vpp2": "deep ", "ep2": "experts "}  # of the model, by the layout, where it is another


FAST = [("tp2, the reference at pp2", "dpo"), ("dp2, packed, by tokens", "kto")]
SLOW = [  # the first two in CI; kto, whose answers meet those of other rows, where the layout divides those
    ("cp2", "kto"), ("fsdp2, padded, pairs apart", "dpo"), ("fsdp2, cp2", "kto"), ("pp2, by tokens", "kto"),
    ("pp2 vpp2", "orpo"), ("ep2", "simpo"),
]  # fmt: skip


@pytest.mark.parametrize("layout, name", in_tiers(FAST, SLOW[:2], FAST + SLOW))
def test_layouts_give_the_same_steps(places, tmp_path, numbers_of, layout, name):
    """kto's KL too, whose answers come from rows of other ranks."""
    world, engine, data = LAYOUTS[layout]
    kind = KINDS.get(layout, "")
    engine = {"device": "cpu", "micro_batch": {"size": 2}, "backend": "fsdp", **engine}
    if name == "kto" and "tokens" not in engine["micro_batch"]:
        engine["micro_batch"] = {"size": engine["micro_batch"]["size"] // 2}
    config = make_config(places, tmp_path, loss={"name": name}, engine=engine, data={"eval": None, **data})
    config["model"]["path"] = str(places / f"{kind}model")
    if "reference" in config:
        config["reference"]["model"]["path"] = str(places / f"{kind}other")
    if "reference at" in layout:
        config["reference"]["engine"] = {**engine, "parallel": {"pp": 2}, "micro_batch": {"size": 4}}
    assert train(config, world) == ("done", "")
    assert numbers(tmp_path) == pytest.approx(numbers_of(name, kind), rel=2e-5)


@pytest.mark.parametrize(("loss", "format"), nightly_but([("kto", "unpaired")], [("kto", "unpaired"), ("dpo", "auto")]))
def test_a_plan_has_the_passes_of_a_step(places, tmp_path, loss, format):
    """Each on as many sequences: those of kto's KL, which `mrl plan` once left out."""
    data = {"eval": None, "format": format}
    if format == "unpaired":
        rows = [{"prompt": f"{i}+1=", "completion": str(i + i % 2), "label": bool(i % 2)} for i in range(BATCH)]
        data["train"] = write_rows(tmp_path / "single.jsonl", rows)
    config = make_config(places, tmp_path / "run", loss={"name": loss}, data=data, train={"steps": 1})
    found = run_case(1, "tests.trainers.dpo_cases:passes", config=config)
    planned = DPO().phases(from_dict(config, DPOConfig)).phases
    assert found == [(phase.role, phase.kind, phase.sequences) for phase in planned]


# ------------------------------------------------------------------------------------------------------ the reference


def test_cached_log_probs_are_those_of_the_reference_to_the_bit(places, tmp_path):
    live, cached = tmp_path / "live", tmp_path / "cached"
    for folder, cache in ((live, False), (cached, True)):
        assert train(make_config(places, folder, reference={"cache": cache})) == ("done", "")
    assert tiny_runs.steps(live) == tiny_runs.steps(cached)
    # the one save is the last step's; MTP layers are not trained here
    never = {"kto/kl", "eval/kto/kl", "perf/mfu", "perf/save_held_s", "perf/save_write_s", "train/mtp_loss"}
    assert set(read(live / "metrics.jsonl")[-1]) == (set(SFT_METRICS) | set(DPO_METRICS)) - never


@pytest.mark.slow
def test_a_cache_of_another_model_is_made_anew(places, tmp_path):
    """A damaged one too: test_caches.py."""
    config = make_config(places, tmp_path / "run", reference={"cache": True}, train={"steps": 1})
    ended, _, said = run_case(1, CASE, config=config)
    assert ended == "done" and "goes on" not in said and "made anew" not in said
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    config["reference"]["model"]["path"] = None
    ended, _, said = run_case(1, CASE, config=config)
    assert ended == "done" and "reference are damaged, or of another model or config, and are made anew" in said
    assert numbers(tmp_path / "run")[0] == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_bit(places, tmp_path):
    keys = {"reference": {"cache": True}, "data": {"shuffle": True}}
    assert_goes_on_to_the_bit(CASE, lambda folder: make_config(places, folder, **keys), tmp_path, step=2, world=2)


@pytest.mark.nightly
def test_a_first_step_that_leaves_adapters_as_they_were_is_refused(places, tmp_path):
    """The forward of their base, in the same step, hides nothing from the guards."""
    config = make_config(places, tmp_path, model={"lora": {"rank": 4}}, reference={"model": {"path": None}})
    ended, message = train(config, happening="step_changes", what="lora_B")
    assert ended == "TrainingError" and "lora_B" in message and "did not change it" in message, message
    saved = torch.load(tmp_path / "failed" / "step_1.pt", weights_only=True)
    assert [row.rpartition(":")[2] for row in saved["rows"]] == ["1", "2", "3", "4"]
    assert not (tmp_path / "checkpoints").exists()


def test_another_reference_does_not_go_on_with_a_run(places, tmp_path):
    """It may lie elsewhere, if it is the same, and null is the model's own folder. One that is refused leaves the cache
    of the run's own as it was."""

    def ends(path: pathlib.Path | None, steps: int) -> tuple[str, str]:
        reference = {"cache": True, "model": {"path": path and str(path)}}
        return train(make_config(places, tmp_path / "run", reference=reference, train={"steps": steps}))

    assert ends(None, 1) == ("done", "")
    shutil.copytree(places / "model", tmp_path / "moved")
    assert ends(tmp_path / "moved", 2) == ("done", "")
    kept = (tmp_path / "run" / "reference" / "log_probs-00000.pt").read_bytes()
    ended, said = ends(places / "other", 3)
    assert ended == "ConfigError" and said.startswith("reference.model.path: value") and ": weights differ" in said
    assert (tmp_path / "run" / "reference" / "log_probs-00000.pt").read_bytes() == kept
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000002"
    (checkpoint / STATE).write_bytes(b"no")
    remark(checkpoint, checkpoint / STATE)
    ended, said = ends(places / "other", 3)
    assert ended == "CheckpointError" and "cannot be read (" in said, said
    assert (tmp_path / "run" / "reference" / "log_probs-00000.pt").read_bytes() == kept


def test_an_evaluation_is_the_loss_on_all_pairs(places, tmp_path):
    """Five rows in batches of four and one: their sums are divided once."""
    config = make_config(places, tmp_path, optimizer={"lr": 1e-12}, train={"steps": 1})
    assert train(config) == ("done", "")
    model, reference = (AutoModelForCausalLM.from_pretrained(places / which) for which in ("model", "other"))
    data = PreferenceDataConfig(train=str(places / "eval.jsonl"), max_length=64)
    dataset = PreferenceDataset(data, AutoTokenizer.from_pretrained(places / "model"), paired=True)
    rows = [dataset.load(i) for i in range(5)]
    with torch.no_grad():
        loss = oracle_loss("dpo", model, reference, rows)
        each = [row.weight * log_prob(model, row.answers[0].ids, row.answers[0].mask, {}) for row in rows]
        chosen = sum(each) / sum(row.weight for row in rows)
    (found,) = read(tmp_path / "metrics.jsonl")
    assert found["eval/loss"] == pytest.approx(float(loss), rel=1e-5)
    assert found["eval/logps/chosen"] == pytest.approx(float(chosen), rel=1e-5)


@pytest.mark.parametrize("single", [False, True], ids=["pairs", "single answers"])
def test_an_evaluation_of_kto_has_its_kl_and_the_margin_of_pairs(places, tmp_path, single):
    """Of the rows of one step, in one batch, they are those of the step; single answers have no margin."""
    rows = read_rows(places / "train.jsonl")[:BATCH]
    if single:
        rows = [
            {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 3 == 0} for i, row in enumerate(rows)
        ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    config = make_config(
        places, tmp_path / "run", loss={"name": "kto"}, data={"train": path, "eval": path},
        optimizer={"lr": 1e-12}, train={"steps": 1}, model={"path": str(places / "other")},
        reference={"model": {"path": str(places / "model")}},  # of which the estimate is above 0
    )  # fmt: skip
    assert train(config) == ("done", "")
    (found,) = read(tmp_path / "run" / "metrics.jsonl")
    names = ["kto/kl", "rewards/chosen", "rewards/rejected", *(["rewards/margin"] if not single else [])]
    assert {name for name in found if name.startswith(("rewards/", "kto/"))} == set(names)
    assert [found[f"eval/{name}"] for name in names] == pytest.approx([found[name] for name in names], rel=1e-4)
    data = PreferenceDataConfig(train=path, max_length=64)
    dataset = PreferenceDataset(data, AutoTokenizer.from_pretrained(places / "model"), paired=False)
    answers = [answer for i in range(BATCH) for answer in dataset.load(i).answers]
    models = [AutoModelForCausalLM.from_pretrained(places / name) for name in ("other", "model")]
    assert found["kto/kl"] == pytest.approx(kl_of_others(*models, answers), rel=1e-4) and found["kto/kl"] > 0
    if not single:
        difference = found["rewards/chosen"] - found["rewards/rejected"]
        assert found["rewards/margin"] == pytest.approx(difference, rel=1e-5) and difference != 0
