"""FP8 by transformer-engine's own Python, on fake CUDA tensors and without its kernels: what a worker finds."""

from __future__ import annotations

import dataclasses
import importlib
import tempfile
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cuda import fake, models  # before mrl: fake.py says what torch is here

import torch  # isort: skip

Capability = tuple[int, int]


def _be(capability: Capability, cuda: tuple[int, int] = (13, 0)) -> Any:
    """The GPU is of this generation, with this CUDA. Returns transformer-engine's module that asks."""
    fake.GPU.major, fake.GPU.minor = capability
    torch.cuda.get_device_capability = lambda *_: capability
    torch.version.cuda = "{}.{}".format(*cuda)
    torch.cuda.is_current_stream_capturing = lambda: False
    importlib.import_module("transformer_engine.pytorch.utils")._get_device_compute_capability.cache_clear()
    quantization = importlib.import_module("transformer_engine.pytorch.quantization")
    quantization._FP8_SUPPORT = quantization._MXFP8_SUPPORT = quantization._FP8_BLOCK_SCALING_SUPPORT = None
    return quantization


def recipes(
    names: Sequence[str], machines: Sequence[tuple[Capability, tuple[int, int]]]
) -> dict[str, tuple[int, list[bool]]]:
    """Returns of each recipe the multiple that transformer-engine pads experts to, and whether it has it on each machine:
    compute capability, CUDA."""
    from megatron.core.fp8_utils import get_fp8_align_size, get_fp8_recipe

    found = {}
    for name in names:
        fields = {"fp8": "hybrid", "fp8_recipe": name, "fp8_dot_product_attention": False}
        recipe, has = get_fp8_recipe(types.SimpleNamespace(**fields)), []
        for machine in machines:
            quantization = _be(*machine)
            try:
                quantization.check_recipe_support(recipe)
                has.append(True)
            except RuntimeError:
                has.append(False)
        multiple = quantization.get_align_size_for_quantization(recipe)
        assert multiple == get_fp8_align_size(name)
        found[name] = multiple, has
    return found


@dataclasses.dataclass(frozen=True)
class Found:
    """parameters: dtypes. stored: entries of the sharded state dict, with dtypes. context: the recipe in a layer's autocast, in
    training and for decoding. reached: where linear layers end, in transformer-engine's C++ or in its refusal (`_reached`).
    multiple: of a rank's tokens."""

    parameters: set[str]
    stored: set[tuple[str, str]]
    context: tuple[str, str]
    reached: dict[str, tuple[str, str]]
    multiple: int


def built(
    model: str, further: Mapping[str, Any], capability: Capability, *, layers: int, changes: Mapping[str, Any],
    lora: bool = False, rank: int = 0, world: int = 1, **degrees: int,
) -> Found:  # fmt: skip
    """Returns what becomes of a model with `engine.megatron` (further)."""
    from mrl.engine.megatron import dist_checkpoint
    from mrl.mcore_models import fp8

    _be(capability)
    fake.join_world(rank, world)
    with fake.Fake():
        engine = _engine(model, further, layers=layers, changes=changes, lora=lora, **degrees)
        engine.init_model()
        made = engine.model
        with made.state.installed():
            stored = {(box.key, str(box.data.dtype)) for each in dist_checkpoint._placed(made) for box in each.boxes}
            training, reached = _context(made), _reached(made)
            with fp8.disabled(made.chunks):
                decoding = _context(made)
            assert _context(made) == training
        return Found(
            {str(p.dtype) for chunk in made.chunks for p in chunk.parameters()}, stored, (training, decoding), reached,
            engine.setup.multiple,
        )  # fmt: skip


def _engine(
    model: str, further: Mapping[str, Any], *, layers: int, changes: Mapping[str, Any], lora: bool = False,
    offload: Sequence[str] = (), recompute: str = "none", **degrees: int,
) -> Any:  # fmt: skip
    from mrl.config.schema import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig, RoleConfig
    from mrl.engine.lora import identity
    from mrl.engine.megatron.engine import MegatronEngine

    identity.fingerprint = lambda *args: ""  # there are no weights in the folder
    folder = models.write(model, Path(tempfile.mkdtemp()), layers, **changes)
    config = EngineConfig(
        layer_spec="te", parallel=ParallelConfig(**degrees), megatron=dict(further), offload=list(offload),
        recompute=recompute,
    )  # fmt: skip
    role = RoleConfig(
        model=ModelConfig(path=str(folder), init="random", lora=LoraConfig() if lora else None), engine=config,
        optimizer=OptimizerConfig(),
    )  # fmt: skip
    return MegatronEngine(role)


class _Saves(torch.autograd.Function):
    """Saves what it is given, as a linear layer does; `got` is what its backward pass has of that."""

    got: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        _Saves.got = ctx.saved_tensors
        return grad, None, None


def _in_8_bits(weight: torch.Tensor, quantizer: Any) -> Any:
    """What the cache of a linear layer keeps of a weight: the tensor subclass of the recipe, over memory of its own."""
    tensors = importlib.import_module("transformer_engine.pytorch.tensor")
    values = torch.empty(weight.shape, dtype=torch.uint8, device="cuda")
    scales = torch.empty(1, dtype=torch.float32, device="cuda")
    given = {"shape": weight.shape, "dtype": weight.dtype, "fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    rows = {"rowwise_data": values, "rowwise_scale_inv": scales, "columnwise_data": None, "columnwise_scale_inv": None}
    match type(quantizer).__name__:
        case "Float8CurrentScalingQuantizer":
            return tensors.Float8Tensor(data=values, fp8_scale_inv=scales, **given)
        case "Float8BlockQuantizer":
            return tensors.Float8BlockwiseQTensor(**rows, **given, is_2D_scaled=True)
        case "MXFP8Quantizer":
            return tensors.MXFP8Tensor(**rows, **given, with_gemm_swizzled_scales=False)
        case other:
            raise AssertionError(other)


def _parts(copy: Any) -> list[Any]:
    """The class of a tensor in 8 bits, and the identities of its values and scales."""
    names, _ = copy.__tensor_flatten__()
    return [type(copy), *((name, getattr(copy, name).untyped_storage()._cdata) for name in names)]


def copies_of_weights(model: str, further: Mapping[str, Any], capability: Capability) -> dict[str, Any]:
    """Returns what becomes of 8-bit copies of weights where activations and parameters are offloaded. linears: of each
    linear layer whether the copy that its forward saves is the one that its backward pass gets, how many bytes were on the host
    meanwhile, and how many plain 8-bit bytes it saved beside. inside, after: copies while parameters are used and when not;
    handed_over: after somebody asked for the weights."""
    from megatron.core.fp8_utils import get_fp8_context

    _be(capability)
    fake.join_world(0, 1)
    with fake.Fake():
        engine = _engine(model, further, layers=2, changes={}, offload=("activations", "parameters"))
        engine.init_model()
        made, offload, found = engine.model, engine.model.activations, {}
        layer = made.chunks[0].decoder.layers[0]
        linears = {n: m for n, m in layer.named_modules() if {"weight", "_fp8_workspaces"} <= {*dir(m)}}
        with engine.train_mode():
            for name, module in linears.items():
                with get_fp8_context(made.transformer, 0):
                    module.init_fp8_metadata()
                    [quantizer] = module._get_weight_quantizers()
                copy = _in_8_bits(module.weight, quantizer)
                module._fp8_workspaces["weight"] = copy
                before = offload.on_host
                with offload.of(layer):
                    x = torch.empty(2, 8, dtype=torch.bfloat16, device="cuda", requires_grad=True)
                    eight = torch.empty(64, dtype=torch.uint8, device="cuda")
                    out = _Saves.apply(x, copy, eight)
                parked = offload.on_host - before
                out.sum().backward()
                found[name] = _parts(_Saves.got[0]) == _parts(copy), parked, _Saves.got[1].nbytes
            inside = sum(len(m._fp8_workspaces) for m in linears.values())
        after = sum(len(m._fp8_workspaces) for m in linears.values())
        for module in linears.values():
            module._fp8_workspaces["weight"] = copy
        engine.hf_weights()
        handed_over = sum(len(m._fp8_workspaces) for m in linears.values())
        return {"linears": found, "inside": inside, "after": after, "handed_over": handed_over}


def recomputed(model: str, further: Mapping[str, Any], recompute: str) -> list[str]:
    """Returns the functions of transformer-engine that a layer's forward pass goes through with recomputation, up to its C++."""
    from mrl.mcore_models.attention import PackedLayout

    _be((9, 0))
    fake.join_world(0, 1)
    with fake.Fake():
        engine = _engine(model, further, layers=2, changes={}, recompute=recompute)
        engine.init_model()
        made = engine.model
        [chunk], tokens = made.chunks, 64
        positions = torch.arange(tokens, device="cuda")
        layout = PackedLayout.for_sequences((tokens,), positions=positions, qkv_format="thd")
        x = torch.empty(tokens, 1, made.hf["hidden_size"], dtype=torch.bfloat16, device="cuda", requires_grad=True)
        if recompute == "selective":  # which begins behind attention
            layer = chunk.decoder.layers[0]
            layer.self_attention.forward = lambda hidden, *_, **__: (hidden, None)
        chunk.rotary_pos_emb.positions = positions
        with engine.train_mode():
            try:
                chunk.decoder(x, None, rotary_pos_emb=chunk.rotary_pos_emb(tokens), packed_seq_params=layout)
            except (NotImplementedError, AttributeError) as kernel:
                frames = traceback.extract_tb(kernel.__traceback__)
                return [*(f.name for f in frames if "transformer_engine" in f.filename), str(kernel)]
    raise AssertionError("there is no kernel that it could end at")


def _context(model: Any) -> str:
    """The recipe that a layer of the model is computed with."""
    from megatron.core.fp8_utils import get_fp8_context
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    with get_fp8_context(model.chunks[0].config, 0):
        return (
            type(FP8GlobalStateManager.get_fp8_recipe()).__name__ if FP8GlobalStateManager.is_fp8_enabled() else "none"
        )


def _reached(model: Any) -> dict[str, tuple[str, str]]:
    """What the linear layers of the last layer come to with 64 tokens and with 65; and what its experts do with their tokens."""
    from megatron.core.fp8_utils import get_fp8_context

    config, layer = model.chunks[0].config, model.chunks[0].decoder.layers[-1]

    def ends(call: Any) -> str:
        try:
            with get_fp8_context(config, 0):
                call()
        except NotImplementedError as kernel:  # of the C++ that the stub stands for
            return str(kernel).split()[0].removeprefix("transformer_engine_torch.")
        except AttributeError as kernel:  # likewise: a name that the stub lacks
            return str(kernel).split()[-1].strip("'")
        except ValueError as refusal:
            return str(refusal)
        return "done"

    def tokens(count: int, channels: int) -> torch.Tensor:
        return torch.empty(count, 1, channels, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    found = {
        name: tuple(ends(lambda m=module, n=count: m(tokens(n, m.in_features))) for count in (64, 65))
        for name, module in layer.named_modules()
        if type(module).__name__.startswith("TE")
        and "Linear" in type(module).__name__
        and not hasattr(module, "num_gemms")
    }
    experts = getattr(layer.mlp, "experts", None)
    if config.fp8 and experts is not None:
        counts = [list(range(experts.num_local_experts)), [32] * experts.num_local_experts]
        found["experts"] = tuple(
            ends(lambda c=count: experts.quantization_padding(tokens(sum(c), 32)[:, 0], c)) for count in counts
        )
    return found
