"""Which of transformer-engine's attention kernels a model's micro-batch reaches on a GPU, told by its own Python code.

mrl builds the model's layers with transformer-engine's modules (te.py), and their core attention gets queries, keys
and values of the real shapes with the layout that mrl makes of a micro-batch. What happens then is transformer-engine's:
its checks, its choice, and the first kernel that it calls, which is a name alone and says so. Given are the generation
of the GPU, what its C++ says of cuDNN's kernels, and where asked a flash-attn 2.8.3 of names.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from tests.cuda import fake, models
from tests.cuda.attention_cases import Found, Layout
from tests.cuda.cases import LENGTHS

FLASH_ATTN = "2.8.3"


def ask(layout: Layout, gpus: list[tuple[tuple[int, int], bool]], off: tuple[str, ...] = ()) -> list[Found]:
    """gpus: capability, and whether flash-attn is installed. off: variables that are 0."""
    from mrl.mcore_models import layer_spec, te_limits
    from mrl.mcore_models.attention import PackedLayout
    from mrl.weights.families import fields_of

    layer_spec.te_refusal = lambda *_, **__: None  # transformer-engine itself is asked
    fake.join_world(0, layout.tp * layout.cp)
    with fake.Fake() as run:
        model = _model(layout)
        fields = fields_of(dict(model.hf))
        attention = te_limits.AttentionShape.of(fields, model.dims)
        found = []
        packed = _on_gpu(_layout(model), run)
        assert isinstance(packed, PackedLayout)
        for capability, flash_attn in gpus:
            _be(capability, flash_attn, off)
            gpu = te_limits.Gpu(capability, _version(flash_attn), fake.CUDNN, Version("2.20.2"), off)
            with model.state.installed():
                reached = {
                    _reach(layer.self_attention.core_attention, packed) for layer in model.chunks[0].decoder.layers
                }
            told = te_limits.te_refusal(fields, model.dims, gpu, dtype=model.dtype)
            found.append(Found(reached, told, te_limits.kernels(attention, gpu, model.dtype)))
        return found


def _model(layout: Layout) -> Any:
    """The model of an engine, built with transformer-engine's modules and never filled."""
    from mrl.config.schema import EngineConfig, ModelConfig, ParallelConfig, RoleConfig
    from mrl.engine.megatron import weights
    from mrl.engine.megatron.engine import MegatronEngine

    weights.load = lambda *_, **__: None
    with tempfile.TemporaryDirectory() as folder:
        path = models.write(layout.model, Path(folder), layers=2, **layout.changes)
        config = RoleConfig(
            model=ModelConfig(path=str(path), dtype=layout.dtype, init="random"),
            engine=EngineConfig(parallel=ParallelConfig(tp=layout.tp, cp=layout.cp, etp=1), layer_spec="te"), optimizer=None,
        )  # fmt: skip
        engine = MegatronEngine(config)
        assert engine.model.spec == "te"
        engine.init_model()
    return engine.model


def _layout(model: Any) -> Any:
    """What mrl hands the layers with a micro-batch."""
    from mrl.batch import make_batch
    from mrl.engine.megatron.inputs import prepare

    with fake.fake_tensor.unset_fake_temporarily():
        batch = make_batch([list(range(1, 2 + n)) for n in LENGTHS], [[1.0] * (1 + n) for n in LENGTHS])
        return prepare(batch, model.dims, model.coords, packed=True, device=torch.device("cpu"), thd=True).layout


def _on_gpu(layout: Any, run: fake.Fake) -> Any:
    """The layout with its tensors on the GPU: what is one tensor stays one."""
    moved: dict[int, torch.Tensor] = {}
    values = {field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            if id(value) not in moved:
                moved[id(value)] = run.mode.from_tensor(value).to("cuda")
            values[name] = moved[id(value)]
    return dataclasses.replace(layout, **values)


def _version(flash_attn: bool) -> Version:
    return Version(FLASH_ATTN if flash_attn else "0")


def _be(capability: tuple[int, int], flash_attn: bool, off: tuple[str, ...]) -> None:
    """The GPU is of this generation; flash-attn is there or is not, as an import of it would leave things."""
    from mrl.mcore_models import te_limits

    for name in te_limits.SWITCHES:
        os.environ.pop(name, None)
    os.environ.update(dict.fromkeys(off, "0"))
    attention = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention")
    backends = importlib.import_module(f"{attention.__name__}.backends")
    fake.GPU.major, fake.GPU.minor = capability
    torch.cuda.get_device_capability = lambda *_: capability
    importlib.import_module("transformer_engine.pytorch.utils")._get_device_compute_capability.cache_clear()
    attention.dot_product_attention._attention_backends["backend_selection_requires_update"] = True
    utils = importlib.import_module(f"{attention.__name__}.utils")
    if not hasattr(utils, "_params"):  # it looks for the class torch.Tensor, and a fake tensor has another
        utils._params = utils.AttentionParams
        utils.AttentionParams = lambda **given: utils._params(**given | {"qkv_type": torch.Tensor})
    tex = sys.modules["transformer_engine_torch"]
    tex.get_fused_attn_backend = _fused_backend
    # before a kernel, and back in place: the order of tokens, and half of every sequence
    tex.thd_cp_rank_order_to_sequence_order = tex.thd_sequence_order_to_cp_rank_order = lambda x, *_: x
    known = backends.fa_utils
    known.is_installed, known.version = flash_attn, _version(flash_attn)
    if flash_attn:
        known.set_flash_attention_version()
    for name in ("flash_attn_func", "flash_attn_varlen_func", "_flash_attn_fwd", "_flash_attn_bwd",
                 "_flash_attn_varlen_fwd", "_flash_attn_varlen_bwd"):  # fmt: skip
        setattr(backends, name, _flash_kernel if flash_attn else None)


def _flash_kernel(*_: Any, **__: Any) -> None:
    raise NotImplementedError("flash_attn is a name alone here")


def _fused_backend(params: Any) -> tuple[Any, str]:
    """`nvte_get_fused_attn_backend` of transformer-engine 2.20 with cuDNN 9.20: its conditions that packed sequences in
    training can break."""
    tex = sys.modules["transformer_engine_torch"]
    arch = 10 * fake.GPU.major + fake.GPU.minor
    query, value = params.head_dim_qk, params.head_dim_v
    wide = query > 128 or value > 128
    sizes = query % 8 == 0 and value % 8 == 0 and (
        not wide
        or (arch == 90 and query <= 256 and value <= 256)
        or (arch >= 100 and query == 192 and value == 128)
    )  # fmt: skip
    fault = arch == 90 and query >= 128 and value >= 128 and query != value and (query, value) != (192, 128)
    masks = ("NVTE_PADDING_MASK", "NVTE_PADDING_CAUSAL_MASK", "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK")
    served = (
        arch >= 90
        and int(params.qkv_dtype) in (int(tex.DType.kBFloat16), int(tex.DType.kFloat16))
        and sizes
        and not fault
        and params.attn_mask_type.name in masks
        and params.dropout == 0.0
        and (params.window_size_left == -1 or params.max_seqlen_q <= params.max_seqlen_kv)
    )
    kinds = tex.NVTE_Fused_Attn_Backend
    return (kinds.NVTE_F16_arbitrary_seqlen, "") if served else (kinds.NVTE_No_Backend, "not served")


def _reach(core: Any, layout: Any) -> str:
    """The kernel that a layer's attention comes to, or what transformer-engine says."""
    from megatron.core.transformer.enums import AttnMaskType

    core.train()
    tokens = layout.positions.numel()
    shapes = (
        (
            core.config.num_attention_heads // core.config.tensor_model_parallel_size,
            core.hidden_size_per_attention_head_k,
        ),
        (core.num_gqa_groups_per_partition, core.hidden_size_per_attention_head_k),
        (core.num_gqa_groups_per_partition, core.hidden_size_per_attention_head_v),
    )
    dtype = core.config.params_dtype
    q, k, v = (torch.empty(tokens, *shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes)
    try:
        core(q, k, v, None, AttnMaskType.causal, packed_seq_params=layout)
    except NotImplementedError as kernel:
        name = str(kernel).split()[0]
        return "flash" if name.startswith("flash_attn") else "fused" if "fused_attn" in name else name
    except (AssertionError, ValueError) as refusal:
        return " ".join(str(refusal).split())
    return "unfused"
