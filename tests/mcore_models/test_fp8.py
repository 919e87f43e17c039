"""FP8: which keys, models, layouts and GPUs are taken, and what is said of others."""

from __future__ import annotations

import re

import pytest
import torch

from mrl.errors import ConfigError
from mrl.mcore_models import fp8, megatron_needs
from mrl.mcore_models.megatron_fields import check
from mrl.parallel import ParallelDims
from mrl.weights.families import family_for
from mrl.weights.hf_config import normalize
from tests.cuda.models import COMMON, MODELS

TENSORWISE, BLOCKWISE, MXFP8 = ({"fp8": "hybrid", "fp8_recipe": name} for name in ("tensorwise", "blockwise", "mxfp8"))


def says(message, function, *args):
    with pytest.raises(ConfigError) as refused:
        function(*args)
    assert re.fullmatch(f"engine.megatron.{message}", str(refused.value)), str(refused.value)


def test_fields_that_go_together():
    for given in (TENSORWISE, MXFP8, TENSORWISE | {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2}):
        check(given)
        fp8.check_fields(given)
    for given, message in (
        ({"fp8": "hybrid"}, "value null is no recipe .* offered with; give one of tensorwise, blockwise, mxfp8"),
        ({"fp8_recipe": "mxfp8"}, "value .* is read with engine.megatron.fp8 alone; .*"),
    ):
        says(f"fp8_recipe: {message}", fp8.check_fields, given)
    unread = "fp8_param: value true is for what mrl does not have: parameters stay bfloat16 .*"
    says(unread, check, TENSORWISE | {"fp8_param": True})
    assert [fp8.multiple_of(given) for given in ({}, {"fp8": None}, TENSORWISE, MXFP8)] == [1, 1, 16, 32]


@pytest.mark.parametrize("name", MODELS)
def test_published_models_have_sizes_that_are_taken(name):
    hf = normalize(COMMON | MODELS[name])
    for given in (TENSORWISE, MXFP8):
        fp8.check_model(given, family_for(hf), hf, ParallelDims())


def test_sizes_that_are_not():
    hf = normalize(COMMON | MODELS["Qwen/Qwen3-30B-A3B"] | {"moe_intermediate_size": 72})
    family, dims = family_for(hf), ParallelDims(2, tp=2, etp=2, sp=True)
    fp8.check_model({}, family, hf, dims)
    says(
        r'fp8: value "hybrid" takes sizes that are multiples of 16, and .*experts.0.gate_proj.* is 72 x 2048 on a rank of .*',
        fp8.check_model, TENSORWISE, family, hf, dims,
    )  # fmt: skip
    hf = normalize(COMMON | MODELS["Qwen/Qwen3.5-9B"])
    family = family_for(hf)
    fp8.check_model(TENSORWISE, family, hf, ParallelDims(4, tp=4, sp=True))
    for given, multiple, tp, rows in ((TENSORWISE, 16, 8, 1544), (MXFP8, 32, 4, 3088)):
        says(
            rf'fp8: value "hybrid" takes .* {multiple}, and .*in_proj_qkv.* is {rows} x 4096 on .*',
            fp8.check_model, given, family, hf, ParallelDims(tp, tp=tp, sp=True),
        )  # fmt: skip


def test_layers_and_dtypes_that_have_it():
    megatron_needs.check_spec(TENSORWISE, "te", "as configured", torch.bfloat16)
    megatron_needs.check_spec({}, "local", "as configured", torch.float32)
    says('fp8: value "hybrid" needs the layers of transformer-engine, and engine.layer_spec is local .*',
         megatron_needs.check_spec, TENSORWISE, "local", "torch sees no GPU", torch.bfloat16)  # fmt: skip
    says('fp8: value "hybrid" does not go with model.dtype float32; set bfloat16',
         megatron_needs.check_spec, TENSORWISE, "te", "as configured", torch.float32)  # fmt: skip


def test_a_gpu_or_a_cuda_that_lacks_the_recipe(monkeypatch):
    def be(capability, cuda):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    monkeypatch.setattr(fp8.devices, "has_gpu", lambda: True)
    be((9, 0), "13.0")
    for given in (TENSORWISE, BLOCKWISE):
        fp8.check_here(given)
    says('fp8_recipe: value "mxfp8" needs compute capability 10 .*, and this GPU has 9.0.*; give another recipe .*',
         fp8.check_here, MXFP8)  # fmt: skip
    be((9, 0), "12.8")
    fp8.check_here(TENSORWISE)
    says('fp8_recipe: value "blockwise" needs .* and CUDA 12.9, and .* 9.0, torch CUDA 12.8; .*',
         fp8.check_here, BLOCKWISE)  # fmt: skip
    be((8, 0), "13.0")
    says("fp8_recipe: .* has 8.0.*", fp8.check_here, TENSORWISE)
