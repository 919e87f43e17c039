"""`mrl sft` on rows with and without images: losses against transformers, bitwise resume, and an export that is whole."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from mrl.config.dpo import PreferenceDataConfig
from mrl.data.dataset import SFTDataset
from mrl.data.preferences import PreferenceDataset
from mrl.data.stream import row_order
from mrl.data.vision import load_vision
from mrl.errors import DataError
from mrl.weights.hf_config import read_hf_config
from tests.data.pictures import picture, png_text
from tests.data.tiny_tokenizers import config as data_config
from tests.engine.harness import run_case
from tests.engine.tiny_vision import make_vision_model
from tests.tiers import nightly_but
from tests.trainers import test_dpo, tiny_runs
from tests.trainers.test_dpo import oracle
from tests.trainers.tiny_runs import assert_goes_on_to_the_bit, numbers, write_rows

CASE = "tests.trainers.cases:train"
ROWS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """`model`, and rows whose images are files, base64 or none."""
    folder = tmp_path_factory.mktemp("vision")
    make_vision_model(str(folder / "model"), "qwen2_5_vl")
    (folder / "images").mkdir()
    rows = []
    for i in range(ROWS):
        picture(i, 12 + 4 * i, 20).save(folder / "images" / f"{i}.png")
        image = {"type": "image", "path": f"images/{i}.png"}
        if i % 3 == 1:
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png_text(i)}"}}
        content = "hello there" if i % 3 == 2 else [image, {"type": "text", "text": "What is it?"}]
        turns = (("user", content), ("assistant", f"The answer is {i}."))
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    write_rows(folder / "train.jsonl", rows)
    return folder


def config(folder: pathlib.Path, output_dir: pathlib.Path, **changes) -> dict:
    """`tiny_runs.make_config` with the model and the rows of `folder`."""
    return tiny_runs.make_config(folder, output_dir, **{"data": {"max_length": 128}, **changes})


def train(config: dict) -> tuple[str, str]:
    return run_case(1, CASE, config=config)[:2]


@pytest.fixture(scope="module")
def whole_run(folder, tmp_path_factory) -> pathlib.Path:
    """A run that nothing happened to; one that a signal stopped had the same metrics."""
    place = tmp_path_factory.mktemp("vision-runs")
    changes = {"train": {"steps": 6}, "checkpoint": {"every": 2}}
    assert_goes_on_to_the_bit(CASE, lambda output_dir: config(folder, output_dir, **changes), place, step=4, world=2)
    return place / "whole"


@pytest.mark.slow
def test_the_first_loss_is_that_of_transformers(folder, whole_run):
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    vision = load_vision(str(folder / "model"), read_hf_config(folder / "model"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    data = SFTDataset(data_config(folder / "train.jsonl"), tokenizer, vision=vision)
    total, count = 0.0, 0
    for row in row_order(0, 0, ROWS)[: tiny_runs.BATCH]:
        example = data.load(int(row))
        ids, mask = torch.tensor([example.ids]), torch.tensor(example.mask[1:], dtype=torch.bool)
        with torch.no_grad():
            of_image = (ids == vision.image_token_id).int()
            logits = model(ids, mm_token_type_ids=of_image, **example.multi_modal_inputs).logits[0, :-1]
        total -= float(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0][mask].double().sum())
        count += int(mask.sum())
    first = tiny_runs.steps(whole_run)[0]
    assert first["train/loss"] == pytest.approx(total / count, rel=1e-6) and first["train/tokens"] == count


def test_resume_is_bitwise(whole_run):
    ours, theirs = (load_file(run / "hf" / "model.safetensors") for run in (whole_run.with_name("stopped"), whole_run))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_export_is_loadable_with_its_processor(folder, whole_run):
    export = whole_run / "hf"
    start = load_file(folder / "model" / "model.safetensors")
    weights = load_file(export / "model.safetensors")
    assert weights.keys() == start.keys() and all(weights[name].shape == start[name].shape for name in start)
    assert not any(torch.equal(weights[name], start[name]) for name in start)
    model, report = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    for name in ("preprocessor_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (export / name).read_bytes() == (folder / "model" / name).read_bytes()
    assert load_vision(str(export), read_hf_config(export)) is not None


def test_a_first_batch_without_images_passes_the_guards(folder, tmp_path):
    """The vision tower has a gradient of zero then, and its turn comes later."""
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "text_first.jsonl").write_text("".join(line for line in lines if '"image' not in line) * 2 + lines[0])
    data = {"train": str(folder / "text_first.jsonl"), "shuffle": False, "max_length": 128}
    text_first = config(folder, tmp_path, train={"steps": 2}, data=data, checkpoint={"export_hf": False})
    assert train(text_first) == ("done", "")
    assert len(tiny_runs.steps(tmp_path)) == 2


def test_other_sizes_of_images_are_another_model(folder, tmp_path):
    """The checkpoint's position and tokens would mean something else."""
    model = tmp_path / "model"
    shutil.copytree(folder / "model", model)
    first = config(folder, tmp_path / "run", model={"path": str(model)}, train={"steps": 2})
    assert train(first) == ("done", "")
    settings = json.loads((model / "preprocessor_config.json").read_text())
    settings["size"]["longest_edge"] //= 2
    (model / "preprocessor_config.json").write_text(json.dumps(settings))
    kind, message = train({**first, "train": {**first["train"], "steps": 4}})
    assert kind == "ConfigError" and "image processor differ" in message, message


def test_adapters_of_tower_and_text_load_in_peft(folder, tmp_path):
    lora = config(folder, tmp_path, train={"steps": 2}, model={"lora": {"rank": 4}})
    assert train(lora) == ("done", "")
    base = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "hf")
    moved = {name for name, p in model.named_parameters() if ".lora_B." in name and bool(p.any())}
    assert any("visual" in name for name in moved) and any("language_model" in name for name in moved), moved


# --------------------------------------------------------------------------------------------------------- preferences


@pytest.fixture(scope="module")
def pairs(folder) -> pathlib.Path:
    """Preference rows, two of which differ by their images alone, and `other`, the same model with other weights."""
    make_vision_model(str(folder / "other"), "qwen2_5_vl", seed=5)
    rows = []
    for i in range(6):
        image = {"type": "image", "path": f"images/{i}.png"}
        parts = [image, {"type": "text", "text": "What is it?" if i < 2 else f"{i}?"}]
        prompt = [{"role": "user", "content": "hello there" if i == 4 else parts}]
        good, bad = (
            [{"role": "assistant", "content": text}] for text in ("The answer", "hello" if i < 2 else "no " * i)
        )
        rows.append({"prompt": prompt, "chosen": good, "rejected": bad})
    write_rows(folder / "pairs.jsonl", rows)
    return folder


def preference_config(folder: pathlib.Path, output_dir: pathlib.Path, loss: str, **changes) -> dict:
    own = {
        "loss": {"name": loss}, "reference": {"model": {"path": str(folder / "other")}},
        "data": {"train": str(folder / "pairs.jsonl"), "max_length": 128, "shuffle": False}, "engine": {},
        "optimizer": {"lr": 1e-3, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0},
        "train": {"steps": test_dpo.STEPS, "global_batch_size": test_dpo.BATCH}, "checkpoint": {"export_hf": False},
    }  # fmt: skip
    return tiny_runs.make_config(folder, output_dir, **tiny_runs.over(own, changes))


@pytest.mark.parametrize(
    ("name", "world", "changes"),
    nightly_but(
        [("dpo", 1, {"reference": {"cache": True}})],
        [
            ("dpo", 1, {"reference": {"cache": True}}),
            ("kto", 2, {"engine": {"parallel": {"cp": 2}}, "data": {"packing": False}}),
        ],
    ),
)
def test_pairs_with_images_train_as_transformers_does(pairs, tmp_path, name, world, changes):
    """The reference's log-probs are kept by the images too: the first two rows have the same tokens."""
    if "reference" in changes:
        changes = {"reference": {"model": {"path": str(pairs / "other")}, **changes["reference"]}}
    case = "tests.trainers.dpo_cases:train"
    config = preference_config(pairs, tmp_path, name, **changes)
    assert run_case(world, case, config=config)[:2] == ("done", "")
    vision = load_vision(str(pairs / "model"), read_hf_config(pairs / "model"))
    expected = oracle(pairs, name, file="pairs", auto=AutoModelForImageTextToText, vision=vision)
    assert numbers(tmp_path) == pytest.approx(expected, rel=2e-5)


def test_an_image_in_an_answer_is_one_line(pairs):
    row = json.loads((pairs / "pairs.jsonl").read_text().splitlines()[0])
    row["chosen"] = [{"role": "assistant", "content": [{"type": "image", "path": "images/1.png"}]}]
    (pairs / "bad.jsonl").write_text(json.dumps(row) + "\n")
    vision = load_vision(str(pairs / "model"), read_hf_config(pairs / "model"))
    data = PreferenceDataConfig(train=str(pairs / "bad.jsonl"), max_length=128)
    dataset = PreferenceDataset(data, AutoTokenizer.from_pretrained(pairs / "model"), paired=True, vision=vision)
    with pytest.raises(DataError, match="bad.jsonl:1: .*has an image in an"):
        dataset.load(0)


READS = "teacher: is set, and model.path is a model that reads images, which is not distilled; leave it out"
REFUSED = [
    ("cases", "train", {"teacher": {"model": {"path": "other"}}}, READS),
    ("rm_cases", "pairs", {"loss": {"name": "bradley_terry"}}, "has no sequence classifier in transformers"),
]


@pytest.mark.parametrize(("case", "rows", "keys", "says"), REFUSED)
def test_teachers_and_reward_models_of_images_are_refused(pairs, tmp_path, case, rows, keys, says):
    data = {"train": str(pairs / f"{rows}.jsonl"), "max_length": 128}
    made = config(pairs, tmp_path / "run", data=data, engine={}, **keys)
    kind, message, _ = run_case(1, f"tests.trainers.{case}:train", config=made)
    assert kind in ("ConfigError", "ModelError") and says in message and "\n" not in message, message
    assert not list((tmp_path / "run").glob("*"))


def test_a_reference_that_reads_text_alone_is_refused(pairs, inputs, tmp_path):
    config = preference_config(pairs, tmp_path, "dpo", reference={"model": {"path": str(inputs / "model")}})
    kind, message, _ = run_case(1, "tests.trainers.dpo_cases:train", config=config)
    assert kind == "ConfigError" and "reads text alone, and model.path reads images" in message
