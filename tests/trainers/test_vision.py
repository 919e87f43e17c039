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

from mrl.converters.hf_config import read_hf_config
from mrl.data.dataset import SFTDataset
from mrl.data.stream import row_order
from mrl.data.vision import load_vision
from tests.data.pictures import picture, png_text
from tests.data.tiny_tokenizers import config as data_config
from tests.engine.harness import run_case
from tests.engine.tiny_vision import make_vision_model
from tests.trainers import tiny_runs

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
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": content},
                    {"role": "assistant", "content": f"The answer is {i}."},
                ]
            }
        )
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config(folder: pathlib.Path, output_dir: pathlib.Path, **changes) -> dict:
    """`tiny_runs.make_config` with the model and the rows of `folder`."""
    return tiny_runs.make_config(folder, output_dir, **{"data": {"max_length": 128}, **changes})


def train(config: dict, world: int = 1, **details) -> tuple[str, str]:
    return run_case(world, CASE, config=config, **details)[:2]


@pytest.fixture(scope="module")
def whole_run(folder, tmp_path_factory) -> pathlib.Path:
    output_dir = tmp_path_factory.mktemp("whole") / "run"
    assert train(config(folder, output_dir, train={"steps": 6}), world=2) == ("done", "")
    return output_dir


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


def test_resume_is_bitwise(folder, whole_run, tmp_path):
    stopped = config(folder, tmp_path, train={"steps": 6}, checkpoint={"every": 2})
    assert train(stopped, world=2, happening="signals", step=4)[0] == "stopped"
    assert train(stopped, world=2) == ("done", "")
    assert tiny_runs.steps(tmp_path) == tiny_runs.steps(whole_run)
    ours, theirs = (load_file(run / "hf" / "model.safetensors") for run in (tmp_path, whole_run))
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
    assert train(config(folder, tmp_path, train={"steps": 2}, data=data, checkpoint={"export_hf": False})) == (
        "done",
        "",
    )
    assert len(tiny_runs.steps(tmp_path)) == 2


def test_a_broken_image_stops_the_run_with_its_row(folder, tmp_path):
    (folder / "broken.jsonl").write_text(json.dumps({"messages": [
        {"role": "user", "content": [{"type": "image", "path": "images/gone.png"}]}, {"role": "assistant", "content": "?"},
    ]}) + "\n")  # fmt: skip
    kind, message = train(config(folder, tmp_path, data={"train": str(folder / "broken.jsonl")}))
    assert kind == "DataError" and message.startswith(f"{folder}/broken.jsonl:1: messages[0].content[0].path: ")


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
