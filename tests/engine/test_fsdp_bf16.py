"""The FSDP engine in bfloat16, against transformers' own model in bfloat16: what each of them rounds, and what neither does.

Sequences run one at a time, so that products of matrices have the same shapes in both.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from mrl.batch import Batch, make_batch
from mrl.config.schema import FSDPConfig, LoraConfig
from mrl.engine.base import GenerateRequest
from mrl.engine.sampling import SamplingKey, SamplingParams
from mrl.errors import ConfigError, ModelError
from tests.engine import tiny
from tests.engine.contract import assert_equal, gradients, make_engine, train
from tests.engine.harness import run_case
from tests.engine.tiny_vision import image_batch, make_vision_model

ROUNDING = {"rtol": 0, "atol": 1e-6}
"""Of log-probs in fp32 from logits that are the same: a bfloat16 that is rounded otherwise changes them by 1e-3."""


def bf16(folder: str, **options):
    return tiny.role(folder, dtype="bfloat16", **{"packing": False, "size": 1, **options})


def log_probs(engine, batch: Batch) -> torch.Tensor:
    with engine.eval_mode():
        return engine.forward_backward_step(batch, forward_only=True)[0]["log_probs"]


def all_trained(batch: Batch) -> Batch:
    return dataclasses.replace(batch, loss_mask=torch.ones_like(batch.loss_mask)).with_denominators()


@pytest.mark.parametrize("family", ["llama", "olmo2", "ernie4_5_moe", "qwen2_5_vl"])
def test_equal_to_transformers(folder, tmp_path, family):
    """Angles of rotary embeddings and weights of routers are fp32 in transformers where it keeps them so."""
    is_vision = family.endswith("vl")
    path = make_vision_model(str(tmp_path), family) if is_vision else folder(family)
    batch = all_trained(image_batch(path) if is_vision else tiny.uneven_batch())
    found = log_probs(make_engine(bf16(path, optimizer=None)), batch)
    right = tiny.log_probs_of(path, batch, dtype=torch.bfloat16, attention="sdpa")
    torch.testing.assert_close(found, right, **ROUNDING)


def test_what_is_kept_in_fp32(folder, tmp_path):
    """A router's weight is neither cast nor exported in bfloat16, whatever else blocks are wrapped in."""
    path, batch = folder("ernie4_5_moe"), tiny.uneven_batch()
    engine = make_engine(bf16(path))
    names = {n for n in engine.model.parameters() if n.endswith(("gate.weight", "e_score_correction_bias"))}
    assert engine.model.kept_in_fp32 == names and len(names) == 2
    engine.export_hf(str(tmp_path))
    before, after = (load_file(f"{p}/model.safetensors") for p in (path, tmp_path))
    kept = {name for name, t in after.items() if t.dtype == torch.float32}
    assert kept == {n for n in before if n.endswith(("gate.weight", "e_score_correction_bias"))} and len(kept) == 2
    assert all(torch.equal(after[name], before[name]) for name in kept)
    _, expected = gradients(engine, batch)
    for options in ({"recompute": "full"}, {"recompute": "full", "offload": ("activations",)}):
        _, found = gradients(make_engine(bf16(path, **options)), batch)
        assert_equal(found, expected)


def steps_are_near(config, expected: list[float]) -> None:
    found = [loss for loss, *_ in train(make_engine(config), 2)]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)


def test_what_is_kept_in_fp32_is_sharded(folder):
    path = folder("ernie4_5_moe")
    expected = [loss for loss, *_ in train(make_engine(tiny.role(path)), 2)]
    run_case(2, "tests.engine.test_fsdp_bf16:steps_are_near", config=bf16(path), expected=expected)


def test_what_cannot_be_kept_in_fp32_is_refused(tmp_path):
    """Sinks are parameters of attention, whose other weights are cast: FSDP gathers a module in one dtype."""
    tiny.config_of("flint").save_pretrained(tmp_path)
    config = bf16(str(tmp_path), model={"init": "random"}, optimizer=None)
    message = r"model.dtype: value .bfloat16. is not supported for model_type 'flint' .* \S+sinks in fp32 .*; set it to float32$"
    with pytest.raises(ModelError, match=message):
        make_engine(config)


def test_what_is_kept_in_fp32_is_not_compiled(folder):
    message = "engine.fsdp.compile: value true is not supported for model_type 'ernie4_5_moe' with model.dtype bfloat16"
    with pytest.raises(ConfigError, match=message):
        make_engine(bf16(folder("ernie4_5_moe"), fsdp=FSDPConfig(compile=True)))


def test_a_base_under_adapters_keeps_it_too(folder):
    engine = make_engine(bf16(folder("ernie4_5_moe"), model={"lora": LoraConfig(rank=4)}))
    kept = {name for name, p in engine.model.parameters().items() if p.dtype == torch.float32}
    assert kept == engine.model.kept_in_fp32 and len(kept) == 2
    train(engine, 2)


@pytest.mark.parametrize(("family", "fields"), [("llama", {}), ("gemma2", {}), ("granite", {"logits_scaling": 3.0})])
def test_generation_rounds_as_training(folder, family, fields):
    """What a model makes of its logits is computed in fp32 in both. One token before the first: attention rounds nothing."""
    engine = make_engine(bf16(folder(family, **fields), optimizer=None))
    requests = [
        GenerateRequest([token], 1, (), SamplingParams(), SamplingKey(0, 0, token, 0)) for token in range(3, 40)
    ]
    completions = engine.generate(requests)
    pairs = [[*r.tokens, *c.tokens] for r, c in zip(requests, completions, strict=True)]
    batch = make_batch(pairs, [[0.0, 1.0]] * len(pairs))
    found = torch.tensor([x for c in completions for x in c.log_probs])
    scored = log_probs(engine, batch)[batch.loss_mask.bool()]
    torch.testing.assert_close(found, scored, **ROUNDING)
