"""Vision-language models on the FSDP engine, against transformers on one process, one sequence at a time.

The rows and bounds are those of the parity table (tests/engine/parity.py): loss, the gradient of every tensor, gradient norm,
log-probs, and weights after three steps. Sequences have no image, one or several, of uneven sizes.
"""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mrl.config.schema import FSDPConfig, LoraConfig
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.engine.parity import Row, Table
from tests.engine.tiny_vision import image_batch, make_vision_model
from tests.tiers import in_tiers

IMAGES = (1, 0, 2, 0, 1, 1, 0, 3)


@dataclasses.dataclass(frozen=True)
class VisionRow(Row):
    backend: str = "fsdp"

    @property
    def head(self):
        return "lm"


class VisionTable(Table):
    """Rows whose `model` is a family of tiny_vision, "tied" or not, and whose batch has the first `sequences` of IMAGES."""

    @functools.cache  # noqa: B019 - one table a session
    def model(self, name):
        family, *tied = name.split()
        return make_vision_model(str(Path(self._folder.name, name.replace(" ", "_"))), family, tied=bool(tied))

    def reference(self, row):
        path = Path(self._folder.name, f"{row.model}-{row.sequences}.pt".replace(" ", "_"))
        if not path.exists():
            folder = self.model(row.model)
            batch = image_batch(folder, images=IMAGES[: row.sequences])
            start = load_file(Path(folder, "model.safetensors"))
            torch.save({"batch": batch, "start": start, "reference": tiny.hf_reference(folder, batch)}, path)
        return str(path)


ROWS = (
    VisionRow("qwen2_5_vl", size=8),
    VisionRow("qwen2_5_vl tied", size=4, packing=False),
    VisionRow("qwen2_vl", size=4),
    VisionRow("qwen3_vl", tokens=64),
    VisionRow("qwen3_vl tied", size=4, packing=False, recompute="full"),
    VisionRow("qwen2_5_vl", "dp2", tokens=64),
    VisionRow("qwen2_5_vl", "dp2", size=1, packing=False, why="micro-batches with images on one rank alone"),
    VisionRow("qwen2_5_vl", "dp2", size=1, sequences=2, why="a rank without any image"),
    VisionRow("qwen3_vl", "dp2", size=1, sequences=2, why="a rank without any image"),
    VisionRow("qwen3_vl", "dp2", size=1, sequences=1, why="a rank without any sequence"),
    VisionRow("qwen2_5_vl", "cp2", size=4),
    VisionRow("qwen3_vl", "cp2", size=4, packing=False),
    VisionRow(
        "qwen3_vl", "cp2", size=1, sequences=2, why="a micro-batch without images, and images on one of two ranks"
    ),
)


NIGHTLY_ROWS = (
    VisionRow("qwen2_5_vl", size=2, recompute="full"),
    VisionRow("qwen2_vl", "dp2", size=2),
    VisionRow("qwen2_vl tied", "cp2", size=2, packing=False),
    VisionRow("qwen2_5_vl", "dp4", size=1, sequences=3, why="a rank without any sequence, another without any image"),
    VisionRow("qwen3_vl", "cp2xdp2", tokens=64),
    VisionRow("qwen2_5_vl", "dp2", size=1, fsdp=FSDPConfig(defer_sync=True), why="the last micro-batch has no image"),
    VisionRow(
        "qwen3_vl", "dp2", size=4, recompute="full", recompute_every=2, fsdp=FSDPConfig(reshard_after_forward=False)
    ),
)


@pytest.fixture(scope="module")
def table():
    return VisionTable()


FAST_ROWS = [ROWS[2], ROWS[3], ROWS[6], ROWS[10]]
SLOW_ROWS = [ROWS[i] for i in (1, 4, 9, 12)]


@pytest.mark.parametrize("row", in_tiers(FAST_ROWS, SLOW_ROWS, (*ROWS, *NIGHTLY_ROWS)), ids=str)
def test_equal_to_transformers(table, row):
    table.check(row)


def run(table, case, world, model="qwen2_5_vl", parallel=None, lora=None, **kwargs):
    folder = table.model(model)
    config = tiny.role(folder, tokens=256, parallel=parallel, model={"lora": lora})
    run_case(
        world, f"tests.engine.vision_cases:{case}", config=config, batch=image_batch(folder, images=IMAGES), **kwargs
    )


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
def test_documents_do_not_see_each_other(table, model):
    run(table, "documents_do_not_see_each_other", 1, model)


@pytest.mark.parametrize("case", ["images_matter", "guards_see_a_tower_that_does_not_train"])
def test_on_two_ranks(table, case):
    run(table, case, 2)


def test_offloaded_state_gives_the_same(table):
    run(table, "offloaded_state_gives_the_same", 1)


def test_guards_of_adapters_end_without_images(table):
    lora = LoraConfig(rank=4, alpha=6.0)
    run(table, "guards_of_adapters_end_without_images", 2, lora=lora)


def test_text_alone_leaves_the_tower_alone(table):
    folder = table.model("qwen3_vl")
    config = tiny.role(folder, tokens=256)
    case = "tests.engine.vision_cases:text_alone_leaves_the_tower_alone"
    run_case(2, case, config=config, batch=image_batch(folder, images=(0, 0, 0)))


def test_a_sampled_token_of_images_is_text(table):
    folder = table.model("qwen3_vl")
    case, batch = "tests.engine.vision_cases:a_sampled_token_of_images_is_text", image_batch(folder, images=(0, 0, 0))
    run_case(1, case, config=tiny.role(folder, tokens=256), batch=batch)


def test_a_checkpoint_restores(table, tmp_path):
    run(table, "a_checkpoint_restores", 2, folder=str(tmp_path))


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl tied"])
def test_an_export_gives_equal_log_probs(table, model, tmp_path):
    run(table, "an_export_gives_equal_log_probs", 2, model, folder=str(tmp_path))


def test_angles_that_follow_the_length_are_refused_beyond_it(table, tmp_path):
    folder = shutil.copytree(table.model("qwen2_vl"), tmp_path / "model")
    batch = image_batch(str(folder), images=(2, 0))
    raw = json.loads((folder / "config.json").read_text())
    text = raw["text_config"]
    text["max_position_embeddings"] = int(batch.lengths[1])
    text["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(raw))
    case, config = "tests.engine.vision_cases:a_sequence_beyond_the_same_angles_is_refused", tiny.role(str(folder))
    run_case(1, case, config=config, batch=batch)
