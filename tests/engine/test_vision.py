"""Vision-language models on the FSDP engine, against transformers on one process, one sequence at a time.

The rows and bounds are those of the parity table (tests/engine/parity.py): loss, the gradient of every tensor, gradient norm,
log-probs, and weights after three steps. Sequences have no image, one or several, of uneven sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from mrl.batch import Batch
from mrl.config.schema import FSDPConfig, LoraConfig, RoleConfig
from mrl.engine.guards import FaultKind, Problem
from mrl.errors import ModelError
from tests.engine import tiny
from tests.engine.contract import assert_close, assert_equal, gradients, make_engine
from tests.engine.harness import run_case
from tests.engine.parity import Row, Table
from tests.engine.tiny_vision import image_batch, make_vision_model
from tests.tiers import in_tiers


def documents_do_not_see_each_other(config: RoleConfig, batch: Batch) -> None:
    """Another document's text and image change nothing of a document's log-probs, bit for bit."""
    engine = make_engine(dataclasses.replace(config, packing=True))
    first = int(batch.lengths[0])
    tokens, image = batch.tokens.clone(), dict(batch.multi_modal_inputs[0])
    tokens[first - 1] += 1
    image["pixel_values"] = image["pixel_values"].flip(0)
    edited = dataclasses.replace(batch, tokens=tokens, multi_modal_inputs=(image, *batch.multi_modal_inputs[1:]))
    with engine.eval_mode():
        before, _ = engine.forward_backward_step(batch, forward_only=True)
        after, _ = engine.forward_backward_step(edited, forward_only=True)
    assert not torch.equal(before["log_probs"][:first], after["log_probs"][:first])
    assert torch.equal(before["log_probs"][first:], after["log_probs"][first:])


def images_matter(config: RoleConfig, batch: Batch) -> None:
    """Another image gives another loss, and a gradient comes to every part of the tower, whose blocks are units of their own."""
    engine = make_engine(config)
    _, right = gradients(engine, engine.shard_data(batch))
    pixels = ({k: v.flip(0) if k == "pixel_values" else v for k, v in m.items()} for m in batch.multi_modal_inputs)
    other = dataclasses.replace(batch, multi_modal_inputs=tuple(pixels))
    _, wrong = gradients(engine, engine.shard_data(other))
    units = {name for name, module in engine.model.hf.named_modules() if isinstance(module, FSDPModule)}
    assert {"model.visual.blocks.0", "model.visual.blocks.1", "model.language_model.layers.0"} <= units
    if engine.is_main:
        tower = [name for name in right if "visual" in name]
        assert tower and all(right[name].any() for name in tower)
        assert not any(torch.equal(right[name], wrong[name]) for name in tower if name.endswith("qkv.weight"))


def text_alone_leaves_the_tower_alone(config: RoleConfig, batch: Batch) -> None:
    """Without images anywhere, its gradients are there and zero, and those of the rest are finite."""
    engine = make_engine(config)
    _, found = gradients(engine, engine.shard_data(dataclasses.replace(batch, multi_modal_inputs=())))
    assert all(value.isfinite().all() for value in found.values())
    if engine.is_main:
        assert not any(value.any() for name, value in found.items() if "visual" in name)
        assert any(value.any() for name, value in found.items() if "visual" not in name)


def a_sampled_token_of_images_is_text(config: RoleConfig, batch: Batch) -> None:
    """A policy may sample the token of images: without an image it is one like any other, as in transformers."""
    engine = make_engine(config)
    tokens, labels = batch.tokens.clone(), batch.labels.clone()
    tokens[3] = labels[2] = engine.model.hf.config.image_token_id
    batch = dataclasses.replace(batch, tokens=tokens, labels=labels, multi_modal_inputs=())
    with engine.eval_mode():
        ours, _ = engine.forward_backward_step(batch, forward_only=True)
    assert torch.allclose(ours["log_probs"], tiny.log_probs_of(config.model.path, batch), rtol=0, atol=1e-5)


def guards_see_a_tower_that_does_not_train(config: RoleConfig, batch: Batch) -> None:
    """A zero gradient of the tower is no fault where no sequence has an image, and is one where one has."""
    for images in (False, True):
        engine = make_engine(config)
        of_batch = (
            batch if images else dataclasses.replace(batch.select([1, 3]), multi_modal_inputs=()).with_denominators()
        )
        gradients(engine, engine.shard_data(of_batch))
        if images:
            for name, parameter in engine.model.parameters().items():
                if "visual.blocks.1" in name:
                    parameter.grad.to_local().zero_()
        token = engine.guard_before_step()
        engine.optimizer_step()
        problems = engine.guard_after_step(token)
        assert all("visual.blocks.1" in problem.parameter for problem in problems) and bool(problems) == images, (
            problems
        )


def guards_of_adapters_end_without_images(config: RoleConfig, batch: Batch) -> None:
    """Of rows of text alone the tower's adapters never train: nothing waits for them after the first step."""
    engine = make_engine(config)
    text = dataclasses.replace(batch.select([1, 3]), multi_modal_inputs=()).with_denominators()
    found = []
    for _ in range(2):
        gradients(engine, engine.shard_data(text))
        token = engine.guard_before_step()
        engine.optimizer_step()
        found.append(engine.guard_after_step(token))
    tower = {name for name in engine.model.trained() if "visual" in name}
    waiting = {name for name in engine.model.trained() if "lora_A" in name} - tower
    assert tower and waiting
    assert found == [[Problem(FaultKind.WAITS, name) for name in sorted(waiting)], []], found


def a_checkpoint_restores(config: RoleConfig, batch: Batch, folder: str) -> None:
    """After a load, the next gradients are those that the saving engine has, bit for bit."""
    engine = make_engine(config)
    gradients(engine, engine.shard_data(batch))
    engine.optimizer_step()
    engine.save_checkpoint(folder, global_step=1)
    _, expected = gradients(engine, engine.shard_data(batch))
    again = make_engine(config)
    _, untrained = gradients(again, again.shard_data(batch))
    again.load_checkpoint(folder)
    _, found = gradients(again, again.shard_data(batch))
    assert_equal(found, expected)
    assert not engine.is_main or any(not torch.equal(untrained[name], found[name]) for name in found)


def offloaded_state_gives_the_same(config: RoleConfig, batch: Batch) -> None:
    everything = ("parameters", "gradients", "optimizer", "activations")
    engines = [
        make_engine(c)
        for c in (config, dataclasses.replace(config, engine=dataclasses.replace(config.engine, offload=everything)))
    ]
    (_, expected), (_, found) = (gradients(engine, engine.shard_data(batch)) for engine in engines)
    assert_close(found, expected, 0.0)


def an_export_gives_equal_log_probs(config: RoleConfig, batch: Batch, folder: str) -> None:
    """After a step, what transformers loads from the export computes what the engine does."""
    engine = make_engine(config)
    share = engine.shard_data(batch)
    gradients(engine, share)
    engine.optimizer_step()
    engine.export_hf(folder)
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(share, forward_only=True)
    ours = engine.unshard_data(predictions, batch)["log_probs"]
    if engine.is_main:
        for path, same in ((folder, True), (config.model.path, False)):
            theirs = tiny.log_probs_of(path, batch)
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-5) == same


def a_sequence_beyond_the_same_angles_is_refused(config: RoleConfig, batch: Batch) -> None:
    engine = make_engine(config)
    engine.forward_backward_step(batch.select([1]), forward_only=True)
    with pytest.raises(
        ModelError, match='above the .* embedding "dynamic" .*a model that reads images does not follow it'
    ):
        engine.forward_backward_step(batch, forward_only=True)


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
        world, f"tests.engine.test_vision:{case}", config=config, batch=image_batch(folder, images=IMAGES), **kwargs
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
    case = "tests.engine.test_vision:text_alone_leaves_the_tower_alone"
    run_case(2, case, config=config, batch=image_batch(folder, images=(0, 0, 0)))


def test_a_sampled_token_of_images_is_text(table):
    folder = table.model("qwen3_vl")
    case, batch = "tests.engine.test_vision:a_sampled_token_of_images_is_text", image_batch(folder, images=(0, 0, 0))
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
    case, config = "tests.engine.test_vision:a_sequence_beyond_the_same_angles_is_refused", tiny.role(str(folder))
    run_case(1, case, config=config, batch=batch)
