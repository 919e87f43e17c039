"""`mrl rm` end to end on a tiny model: equal to transformers' sequence classifier and torch's AdamW, on every layout, and
after a stop; what it exports scores alike in transformers and in `mrl ppo`, whatever pads and whichever template renders.
"""

from __future__ import annotations

import functools
import json
import pathlib
import random
import shutil
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from mrl.config.rm import ScoredDataConfig
from mrl.data.scored import ScoredDataset, ScoredRow
from mrl.metric_names import DPO_METRICS, RM_METRICS, SFT_METRICS
from mrl.metrics import read
from tests.engine.harness import run_case
from tests.tiers import in_tiers, nightly_but
from tests.trainers import tiny_runs
from tests.trainers.rl import tiny_policies
from tests.trainers.rl.tiny_policies import EXPERTS, weights_of
from tests.trainers.tiny_runs import adamw_numbers, assert_goes_on_to_the_bit, numbers, write_rows

CASE = "tests.trainers.rm_cases:train"
ROWS, BATCH, STEPS = 10, 4, 3
LOSSES = ("bradley_terry", "regression", "steps")


def row(loss: str, first: int) -> dict[str, Any]:
    """A row whose answers have other lengths, each row others."""
    numbers = [first] * (1 + first % 3)
    prompt, right, weight = "+".join(map(str, numbers)) + "=", str(sum(numbers)), 1 + first % 2
    if loss == "bradley_terry":
        wrong = str(sum(numbers) * 7 + first) * (1 + first % 2)
        return {"prompt": prompt, "chosen": right, "rejected": wrong, "margin": 0.1 * (first % 3), "weight": weight}
    if loss == "regression":
        return {"prompt": prompt, "completion": right * (1 + first % 2), "score": first % 5 - 2, "weight": weight}
    steps = [str(first * (i + 1)) for i in range(1 + first % 3)]
    labels = [(first + i) % 2 or 0.3 for i in range(len(steps))]
    return {"prompt": prompt, "completions": steps, "labels": labels, "weight": weight}


@pytest.fixture(scope="module")
def places(inputs, tmp_path_factory) -> pathlib.Path:
    """`model`, a language model; `scorer` and `moe`, classifiers of one label; rows of each loss."""
    folder = tmp_path_factory.mktemp("rewards")
    for name in ("model", "scorer", "moe"):
        shutil.copytree(inputs / "model", folder / name)
    fields = json.loads((folder / "model" / "config.json").read_text())
    fields = {k: v for k, v in fields.items() if k not in ("model_type", "layer_types", "architectures")}
    fields |= {"num_labels": 1, "num_hidden_layers": 4}
    for name, family, more in (("scorer", "qwen3", {}), ("moe", "qwen3_moe", EXPERTS)):
        config = AutoConfig.for_model(family, **fields, **more)
        torch.manual_seed(7)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.1)
        torch.nn.init.normal_(model.score.weight, std=0.3)
        model.save_pretrained(folder / name)
    for loss in LOSSES:
        for name, first, count in (("train", 3, ROWS), ("eval", 100, 5)):
            write_rows(folder / f"{loss}-{name}.jsonl", [row(loss, first + i) for i in range(count)])
    return folder


def make_config(places: pathlib.Path, output_dir: pathlib.Path, loss: str = "bradley_terry", **changes: Any):
    """changes: whole sections over it, merged key by key."""
    own: dict[str, Any] = {
        "model": {"path": str(places / "scorer")},
        "optimizer": {"lr": 1e-3, "eps": 1e-6, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0},
        "loss": {"name": loss, **({"centering": 0.05} if loss == "bradley_terry" else {})},
        "data": {
            "train": str(places / f"{loss}-train.jsonl"), "eval": str(places / f"{loss}-eval.jsonl"), "shuffle": False
        },
        "train": {"steps": STEPS, "global_batch_size": BATCH},
        "checkpoint": {"export_hf": False},
    }  # fmt: skip
    return tiny_runs.make_config(places, output_dir, **tiny_runs.over(own, changes))


def train(config: dict[str, Any], world: int = 1, **details: Any) -> tuple[str, str]:
    return run_case(world, CASE, config=config, **details)[:2]


# ---------------------------------------------------------------------------------------------- transformers and torch


def rows_of(places: pathlib.Path, loss: str, part: str = "train") -> list[ScoredRow]:
    data = ScoredDataConfig(train=str(places / f"{loss}-{part}.jsonl"), max_length=64)
    tokenizer = AutoTokenizer.from_pretrained(places / "scorer")
    dataset = ScoredDataset(data, tokenizer, loss=loss, pad_token_id=tokenizer.pad_token_id)
    return [dataset.load(i) for i in range(len(dataset))]


def scores(model: Any, ids: list[int], places: tuple[int, ...]) -> list[Tensor]:
    """What transformers' classifier says of the text up to each place."""
    return [model(input_ids=torch.tensor([ids[: place + 1]])).logits[0, 0].double() for place in places]


def oracle_loss(loss: str, model: Any, rows: list[ScoredRow]) -> Tensor:
    """The papers' equations, sequence by sequence."""
    of_rows = [[scores(model, s.ids, s.places) for s in row.sequences] for row in rows]
    if loss == "bradley_terry":
        pairs = [(good[0], bad[0], row) for (good, bad), row in zip(of_rows, rows, strict=True)]
        each = [r.weight * (-logsigmoid(a - b - r.margin) + 0.05 * (a + b) ** 2) for a, b, r in pairs]
        return sum(each) / sum(row.weight for row in rows)
    weights = torch.tensor([row.weight for row in rows for s in row.sequences for _ in s.targets], dtype=torch.float64)
    found = torch.stack([score for row in of_rows for sequence in row for score in sequence])
    targets = torch.tensor([t for row in rows for s in row.sequences for t in s.targets], dtype=torch.float64)
    if loss == "regression":
        return (weights * (found - targets) ** 2).sum() / weights.sum()
    return binary_cross_entropy_with_logits(found, targets, weight=weights, reduction="sum") / weights.sum()


def oracle(places: pathlib.Path, loss: str, name: str) -> list[float]:
    """What `numbers` has of a run on the model `name`, by transformers and torch's AdamW."""
    model = AutoModelForSequenceClassification.from_pretrained(places / name)
    model.get_input_embeddings().padding_idx = None  # a token of the data trains, whatever pads (docs/loss.md)
    rows = rows_of(places, loss)
    batch = lambda step: [rows[(step * BATCH + i) % ROWS] for i in range(BATCH)]  # noqa: E731
    return adamw_numbers(model, STEPS, lambda step: oracle_loss(loss, model, batch(step)), eps=1e-6)


@pytest.fixture(scope="module")
def numbers_of(places):
    return functools.cache(lambda loss, name="scorer": oracle(places, loss, name))


def test_steps_are_those_of_transformers_and_adamw(places, tmp_path, numbers_of):
    """Three steps, the later ones of a trained model: equal losses and norms show equal gradients and updates. The other
    losses in layouts below."""
    assert train(make_config(places, tmp_path, "regression", data={"eval": None})) == ("done", "")
    assert numbers(tmp_path) == pytest.approx(numbers_of("regression"), rel=1e-5)


MEGATRON = {"backend": "megatron"}
LAYOUTS = {  # processes, engine, data
    "fsdp2, padded": (2, {}, {"packing": False}),
    "fsdp2, cp2": (2, {"parallel": {"cp": 2}}, {}),
    "dp2, packed, by tokens": (2, {**MEGATRON, "micro_batch": {"tokens": 160, "size": None}}, {}),
    "tp2": (2, {**MEGATRON, "parallel": {"tp": 2}}, {}),
    "cp2": (2, {**MEGATRON, "parallel": {"cp": 2}}, {}),
    "ep2": (2, {**MEGATRON, "parallel": {"ep": 2}}, {}),
    "pp2 vpp2": (2, {**MEGATRON, "parallel": {"pp": 2, "vpp": 2}}, {}),
}
PAIRS = [(layout, LOSSES[i % len(LOSSES)]) for i, layout in enumerate(LAYOUTS)]


@pytest.mark.parametrize("layout, loss", in_tiers(PAIRS[2:4], [PAIRS[5]], PAIRS))
def test_layouts_give_the_same_steps(places, tmp_path, numbers_of, layout, loss):
    world, engine, data = LAYOUTS[layout]
    engine = {"device": "cpu", "micro_batch": {"size": 2}, "backend": "fsdp", **engine}
    name = "moe" if layout == "ep2" else "scorer"
    config = make_config(
        places, tmp_path, loss, engine=engine, data={"eval": None, **data}, model={"path": str(places / name)}
    )
    assert train(config, world) == ("done", "")
    assert numbers(tmp_path) == pytest.approx(numbers_of(loss, name), rel=1e-5)


# ------------------------------------------------------------------------------------------------------------- the run


@pytest.mark.parametrize("loss", LOSSES)
def test_an_evaluation_is_the_loss_on_all_rows(places, tmp_path, loss):
    """As transformers has it of the export after a step: at each step's end, too. Five rows in batches of four and one:
    their sums are divided once. Metrics are those with a meaning."""
    config = make_config(places, tmp_path, loss, train={"steps": 1}, checkpoint={"export_hf": True})
    assert train(config) == ("done", "")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        expected = float(oracle_loss(loss, model, rows_of(places, loss, "eval")))
    (found,) = read(tmp_path / "metrics.jsonl")
    assert found["eval/loss"] == pytest.approx(expected, rel=1e-5)
    own = {
        "bradley_terry": {name for name in DPO_METRICS if "rewards/" in name},
        "regression": {name for name in RM_METRICS if "rewards/" in name},
        "steps": {name for name in RM_METRICS if "steps/" in name},
    }[loss]
    never = {"perf/mfu", "perf/save_held_s", "perf/save_write_s", "train/mtp_loss"}
    assert set(found) == set(SFT_METRICS) - never | own


ADAPTERS = {"rank": 4, "dropout": 0.1, "export": "merged"}


@pytest.mark.slow
@pytest.mark.parametrize("loss, lora", nightly_but([("steps", None)], [("steps", None), ("regression", ADAPTERS)]))
def test_a_run_that_was_stopped_goes_on_to_the_bit(places, tmp_path, loss, lora):
    """With adapters the checkpoint holds the head beside them."""
    same = {"data": {"shuffle": True}, "engine": {**MEGATRON, "parallel": {"tp": 2}}, "checkpoint": {"export_hf": True}}
    if lora is not None:
        same["model"] = {"path": str(places / "model"), "lora": lora}
    assert_goes_on_to_the_bit(CASE, lambda folder: make_config(places, folder, loss, **same), tmp_path, step=2, world=2)
    ours, theirs = (weights_of(tmp_path / which / "hf") for which in ("stopped", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_language_model_gets_a_head_that_starts_at_zero_and_all_of_it_trains(places, tmp_path, backend):
    """The first loss is log 2; the guards want everything below the head to train from the second step on."""
    plain = [{k: v for k, v in row("bradley_terry", i).items() if k != "margin"} for i in range(3, 3 + ROWS)]
    config = make_config(
        places, tmp_path, model={"path": str(places / "model")}, engine={"backend": backend},
        data={"train": write_rows(tmp_path / "rows.jsonl", plain)}, checkpoint={"export_hf": True},
    )  # fmt: skip
    assert train(config) == ("done", "")
    first = read(tmp_path / "metrics.jsonl")[0]
    assert first["train/loss"] == pytest.approx(0.693147, abs=1e-6) and first["rewards/accuracy"] == 0.0
    before, after = weights_of(places / "model"), weights_of(tmp_path / "hf")
    assert after.keys() == before.keys() - {"lm_head.weight"} | {"score.weight"}
    assert all(not torch.equal(after[name], before[name]) for name in before.keys() & after.keys())
    about = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert about["architectures"] == ["Qwen3ForSequenceClassification"] and len(about["id2label"]) == 1


@pytest.mark.slow
def test_a_family_without_a_classifier_in_transformers_is_said(places, tmp_path):
    """Such an export is a reward model of mrl's, and of nobody else."""
    shutil.copytree(places / "model", tmp_path / "model")
    before = json.loads((tmp_path / "model" / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "pad_token_id", "bos_token_id", "eos_token_id")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}
    AutoConfig.for_model("olmoe", **{k: before.get(k) for k in names}, **sizes).save_pretrained(tmp_path / "model")
    own = {"path": str(tmp_path / "model"), "init": "random"}
    config = make_config(
        places, tmp_path / "run", "regression", model=own, engine=MEGATRON, train={"steps": 1},
        data={"eval": None}, checkpoint={"export_hf": True},
    )  # fmt: skip
    ended, why, said = run_case(1, CASE, config=config)
    assert ended == "done", why
    assert "transformers has no sequence classifier of model_type olmoe: what is exported" in said
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "hf")


@pytest.mark.parametrize("backend, export", [("fsdp", "adapter"), ("megatron", "merged")])
def test_adapters_and_the_head_train_and_are_exported(places, tmp_path, backend, export):
    """From a language model, where adapters wait for the head, and A for B. peft's classifier has the same scores."""
    config = make_config(
        places, tmp_path, "regression", model={"path": str(places / "model"), "lora": {"rank": 4, "export": export}},
        engine={"backend": backend}, train={"steps": 4}, optimizer={"lr": 1e-2}, checkpoint={"export_hf": True},
    )  # fmt: skip
    assert train(config) == ("done", "")
    folder = places / "model" if export == "adapter" else tmp_path / "hf"
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    if export == "adapter":
        model = peft.PeftModel.from_pretrained(model, tmp_path / "hf")
    with torch.no_grad():
        rows = rows_of(places, "regression", "eval")
        answers = [row.sequences[0] for row in rows]
        found = [float(scores(model.eval(), answer.ids, answer.places)[0]) for answer in answers]
    last = read(tmp_path / "metrics.jsonl")[-1]
    mean = sum(row.weight * score for row, score in zip(rows, found, strict=True)) / sum(row.weight for row in rows)
    assert mean == pytest.approx(last["eval/rewards/mean"], rel=1e-5) and len(set(found)) == 5


# --------------------------------------------------------------------------------------------------- one score everywhere

TIGHT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
PADS = {  # pad_token_id of config.json, pad_token of the tokenizer, chat template: None for the model's own, "" for none
    "the end token, a newline after it": ("<|im_end|>", "<|im_end|>", None),
    "none, and no template": (None, None, ""),
    "two that differ": ("<|im_end|>", "<|endoftext|>", TIGHT),
}
SYSTEMS = {"the end token, a newline after it": "1+1"}  # data.system of some of them
QUESTIONS, ANSWERS = ["1+2=", "10+20+30=", "7="], ["3", "60", "7777"]


def pad_otherwise(
    source: pathlib.Path, folder: pathlib.Path, pad: str | None, of_tokenizer: str | None, template: str | None
) -> None:
    """Makes `folder` a copy of the model `source` with other padding and another template."""
    shutil.copytree(source, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["pad_token_id"] = None if pad is None else tokenizer.convert_tokens_to_ids(pad)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.pad_token = of_tokenizer
    if template is not None:
        (folder / "chat_template.jinja").unlink()
        tokenizer.chat_template = template or None
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("name", PADS)
def test_training_ppo_and_transformers_read_the_score_at_one_token(places, tmp_path, name):
    """Of the exported folder, with transformers' own padding on either side, and in `mrl ppo`; with data.system too."""
    system = SYSTEMS.get(name)
    pad_otherwise(places / "scorer", tmp_path / "start", *PADS[name])
    rows = [{"prompt": q, "completion": a, "score": 1} for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    where = write_rows(tmp_path / "rows.jsonl", rows)
    config = make_config(
        places, tmp_path / "run", "regression", model={"path": str(tmp_path / "start")},
        data={"train": where, "eval": where, "system": system}, train={"steps": 1}, checkpoint={"export_hf": True},
    )  # fmt: skip
    assert train(config) == ("done", "")
    hf = tmp_path / "run" / "hf"
    tokenizer = AutoTokenizer.from_pretrained(hf)
    model = AutoModelForSequenceClassification.from_pretrained(hf)
    assert model.config.pad_token_id == tokenizer.pad_token_id is not None
    left, right = (in_transformers(model, tokenizer, side, system) for side in ("left", "right"))
    assert left == pytest.approx(right, abs=1e-5) and max(left) - min(left) > 0.01
    asked = [[{"role": "user", "content": q}] if tokenizer.chat_template else q for q in QUESTIONS]
    of_ppo = {
        "folder": str(hf),
        "asked": asked,
        "answers": ANSWERS,
        "engine": {**MEGATRON, "device": "cpu"},
        "system": system,
    }
    in_ppo = run_case(1, "tests.trainers.rm_cases:scores_in_ppo", **of_ppo)
    assert in_ppo == pytest.approx(left, abs=1e-5)
    in_training = read(tmp_path / "run" / "metrics.jsonl")[-1]["eval/rewards/mean"]
    assert in_training == pytest.approx(sum(in_ppo) / len(in_ppo), abs=1e-5)


def in_transformers(model: Any, tokenizer: Any, side: str, system: str | None) -> list[float]:
    """The scores of all answers in one batch, as a user of the exported folder has them."""
    tokenizer.padding_side = side
    if tokenizer.chat_template is None:
        texts = [q + a + tokenizer.eos_token for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
        encoded = tokenizer(texts, padding=True, return_tensors="pt")
    else:
        first = [] if system is None else [("system", system)]
        said = [(*first, ("user", q), ("assistant", a)) for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
        talks = [[{"role": role, "content": content} for role, content in talk] for talk in said]
        encoded = tokenizer.apply_chat_template(talks, padding=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        return model(**encoded).logits[:, 0].tolist()


# -- what was planted in pairs is learned, and steers `mrl ppo` --------------------------------------------------------


TOKENS = [*"0123456789+= ", "user", "assistant", "system"]
"""Of the policy's tokenizer, those that its text shows."""
PLANTED, HELD_OUT, LONGEST = 1024, 128, 12


def longer(rng: random.Random) -> tuple[list[str], list[str]]:
    """A longer answer and a shorter one, whatever they say."""
    short, long = (["1", *rng.choices(TOKENS, k=n - 1)] for n in sorted(rng.sample(range(1, LONGEST + 1), 2)))
    return long, short


def planted_pairs(path: pathlib.Path, count: int, seed: int) -> str:
    """Writes pairs whose chosen answer is longer."""
    rng, lines = random.Random(seed), []
    for _ in range(count):
        chosen, rejected = longer(rng)
        numbers = [rng.randrange(100) for _ in range(rng.randint(1, 3))]
        prompt = "+".join(map(str, numbers)) + "="
        lines.append(json.dumps({"prompt": prompt, "chosen": "".join(chosen), "rejected": "".join(rejected)}) + "\n")
    path.write_text("".join(lines))
    return str(path)


@pytest.mark.nightly
def test_a_reward_model_of_planted_preferences_orders_held_out_pairs_and_steers_ppo(tmp_path):
    for name, make in (("rows", tiny_runs.make_inputs), ("policies", tiny_policies.make_inputs)):
        (tmp_path / name).mkdir()
        make(tmp_path / name)
    train = planted_pairs(tmp_path / "train.jsonl", PLANTED, 0)
    held_out = planted_pairs(tmp_path / "eval.jsonl", HELD_OUT, 1)
    config = tiny_runs.make_config(
        tmp_path / "rows", tmp_path / "rm", engine={"micro_batch": {"size": 64}}, loss={"name": "bradley_terry"},
        optimizer={"lr": 5e-3, "warmup_steps": 5, "weight_decay": 0.0}, data={"train": train, "eval": held_out},
        train={"steps": 80, "global_batch_size": 32},
    )  # fmt: skip
    assert run_case(1, "tests.trainers.rm_cases:train", config=config)[:2] == ("done", "")
    assert read(tmp_path / "rm" / "metrics.jsonl")[-1]["eval/rewards/accuracy"] >= 0.95

    ppo = tiny_policies.make_config(
        tmp_path / "policies", tmp_path / "rl", rewards=None,
        reward={"model": {"path": str(tmp_path / "rm" / "hf"), "dtype": "float32"}},
        actor={"optimizer": {"lr": 5e-3}}, rollout={"samples_per_prompt": 8, "max_new_tokens": LONGEST},
        algorithm={"kl_in": "none", "mini_batch_size": 32}, train={"steps": 24, "global_batch_size": 64},
    )  # fmt: skip
    assert run_case(1, "tests.trainers.rl.cases:train", config=ppo)[:2] == ("done", "")
    rows = [row for row in read(tmp_path / "rl" / "metrics.jsonl") if "reward/mean" in row]
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 2
    assert rows[-1]["rollout/response_length"] > rows[0]["rollout/response_length"] + 1
