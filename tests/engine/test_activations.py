"""`engine.offload: [activations]`: what a forward saves is freed where it was, and every number is the same to the bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

from mrl.config.schema import LoraConfig, MTPConfig, RoleConfig
from mrl.engine.offload import ActivationOffload
from mrl.errors import ConfigError
from mrl.mcore_models.build import transformer_config
from mrl.parallel import ParallelDims
from mrl.weights.hf_config import read_hf_config
from tests.engine import mtp, tiny
from tests.engine.contract import everyone, make_engine, numbers_of_step
from tests.engine.harness import run_case
from tests.tiers import nightly_but


def compare(config: RoleConfig, recompute: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What differs between an engine that offloads activations and one that keeps them, on any rank; and what this rank
    has of saved tensors when a micro-batch's loss is computed. By recomputation."""
    return {kind: _compare(config, kind) for kind in recompute}


def _compare(config: RoleConfig, recompute: str) -> dict[str, Any]:
    change = dataclasses.replace
    batch, found = tiny.uneven_batch(), []
    for offload in ((), ("activations",)):
        engine = make_engine(change(config, engine=change(config.engine, offload=offload, recompute=recompute)))
        watched = engine.model.activations
        alive = [] if watched is None else _alive(engine, watched)
        found.append(numbers_of_step(engine, batch))
    assert watched is not None
    kept, offloaded = found
    differ = everyone([name for name in kept if not torch.equal(kept[name], offloaded[name])])
    return {"differ": differ, "left": watched.on_host, "most": watched.most, "alive": alive}


def _alive(engine: Any, offload: ActivationOffload) -> list[list[bool]]:
    """A list that at each loss gets, of what was saved since the one before and still has memory, whether autograd has it
    itself: so it is with weights. The rest is held by others, such as the output that the next module is given."""
    packed: list[tuple[StorageWeakRef, bool]] = []
    alive: list[list[bool]] = []
    pack, own = offload.pack, engine.loss_fn

    def noted(weights: set[int], tensor: torch.Tensor) -> Any:
        out = pack(weights, tensor)
        packed.append((StorageWeakRef(tensor.untyped_storage()), out is tensor))
        return out

    def loss_fn(data: Any, predictions: Any, ctx: Any) -> Any:
        alive.append([kept for storage, kept in packed if not storage.expired()])
        packed.clear()
        return own(data, predictions, ctx)

    offload.pack = noted
    engine.set_loss_fn(loss_fn)
    return alive


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_activations_leave_the_device(tmp_path, backend):
    folder = tiny.make_model(str(tmp_path / "model"), "llama", layers=4, attention_dropout=0.1)
    kinds = ("none", "full") if backend == "fsdp" else ("none", "selective", "full")
    config = tiny.role(folder, backend=backend)
    found = run_case(1, "tests.engine.test_activations:compare", config=config, recompute=kinds)
    for kind, of in found.items():
        assert of["differ"] == [[]] and of["left"] == 0 < of["most"], kind
        assert len(of["alive"]) > 1
        if kind != "selective":  # whose outputs megatron keeps, emptied, to fill them again
            # of each micro-batch what a caller of a block holds: angles, the last output
            assert all(held.count(False) <= 3 * 4 + 2 for held in of["alive"]), (kind, of["alive"])
    assert found["full"]["most"] < found["none"]["most"] / 5


LAYOUTS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("llama", 2, {"pp": 2, "vpp": 2}, {}),
    ("qwen3_moe", 2, {"tp": 2}, {"dtype": "bfloat16"}),
    ("glm4_moe", 2, {"pp": 2}, {"mtp": True}),
    ("llama", 2, {}, {"lora": True}),
    ("llama", 2, {"cp": 2}, {"backend": "fsdp"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("family, world, parallel, more", nightly_but([LAYOUTS[0], LAYOUTS[4]], LAYOUTS), ids=str)
def test_in_every_layout_numbers_are_the_same(tmp_path, family, world, parallel, more):
    backend, lora = more.get("backend", "megatron"), LoraConfig(rank=4) if more.get("lora") else None
    make = mtp.make_model if more.get("mtp") else tiny.make_model
    options = {} if more.get("mtp") else {"layers": 4}
    folder = make(str(tmp_path / "model"), family, **options)
    dtype = more.get("dtype", "float32")
    config = tiny.role(folder, backend=backend, parallel=parallel, size=1, dtype=dtype, model={"lora": lora})
    config = dataclasses.replace(config, mtp=MTPConfig() if more.get("mtp") else None)
    found = run_case(world, "tests.engine.test_activations:compare", config=config, recompute=("none", "full"))
    for kind, of in found.items():
        assert of["differ"] == [[]] * world and of["left"] == 0 < of["most"], kind


def test_what_offload_names_is_all_that_moves(tmp_path):
    folder = tiny.make_model(str(tmp_path / "model"), "llama")
    engine = make_engine(tiny.role(folder, offload=("activations", "optimizer")))
    assert engine.offload.kinds == {"optimizer"} and engine.model.activations is not None
    assert make_engine(tiny.role(folder, offload=("optimizer",))).model.activations is None


def test_tensors_come_back_as_they_lay():
    """Bytes on the host are those of the elements, however a tensor lies in its memory."""
    offload, x = ActivationOffload(), torch.randn(6, 4, 5)
    views = (x, x.transpose(0, 2), x[:, 1:3, ::2], x[:, :1].expand(6, 7, 5), x[0, 0, 0].expand(3, 2), x[:0], x[0, 0, 0])
    for view in views:
        kept = offload.pack(set(), view)
        elements = view.numel() // (7 if view.size() == (6, 7, 5) else 6 if view.size() == (3, 2) else 1)
        assert offload.on_host == 4 * elements
        back = offload.unpack(kept)
        assert torch.equal(back, view) and back.stride() == view.stride()
        del kept
    assert offload.on_host == 0


class _Product(torch.autograd.Function):
    """x @ the sum of a pair; `got` is what its backward pass has of what it saved."""

    got: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pair: TwoTensor) -> torch.Tensor:
        ctx.save_for_backward(x, pair)
        return x @ (pair.a + pair.b)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        _Product.got = x, pair = ctx.saved_tensors
        return grad @ (pair.a + pair.b).t(), None


def test_a_subclass_that_has_its_values_elsewhere_stays():
    """As transformer-engine's weights in 8 bits are (tests/cuda/test_fp8.py); the plain tensor beside it leaves."""
    offload, x = ActivationOffload(), torch.randn(3, 4, requires_grad=True)
    pair = TwoTensor(torch.randn(4, 5), torch.randn(4, 5))
    with offload.of(torch.nn.Module()):
        out = _Product.apply(x, pair)
    assert offload.on_host == x.nbytes
    out.sum().backward()
    assert isinstance(_Product.got[1], TwoTensor) and _Product.got[1].a.data_ptr() == pair.a.data_ptr()
    torch.testing.assert_close(x.grad, (pair.a + pair.b).sum(1).expand(3, 4))


def test_fused_sums_of_gradients_are_refused_beside_it(tmp_path):
    model, given = read_hf_config(tiny.make_model(str(tmp_path), "llama")), {"gradient_accumulation_fusion": True}
    how = {"dtype": torch.float32, "layer_spec": "te", "megatron_options": given, "saves_to_host": True}
    with pytest.raises(ConfigError, match="engine.megatron.gradient_accumulation_fusion: value true .* leave out one"):
        transformer_config(model, ParallelDims(), **how)
