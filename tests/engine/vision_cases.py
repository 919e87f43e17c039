"""What the ranks of a test world run on tiny vision-language models."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from mrl.batch import Batch
from mrl.config.schema import RoleConfig
from mrl.engine.guards import FaultKind, Problem
from mrl.errors import ModelError
from tests.engine import tiny
from tests.engine.contract import assert_close, assert_equal, gradients, make_engine


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
