"""Adapters of a linear that is all experts of a rank, on one process. In worlds: tests/engine/test_te_like.py."""

import types

import pytest
import torch

from mrl.mcore_models import cpu_stand_in

cpu_stand_in.prepare()

from mrl.mcore_models import lora  # noqa: E402
from mrl.mcore_models.lora import Adapter, AdapterBlock, GroupedAdapter  # noqa: E402

COUNTS = [2, 0, 3]


class Grouped(torch.nn.Module):
    """As transformer-engine's: the matrices of its experts, and a bias beside the output."""

    def __init__(self) -> None:
        super().__init__()
        for expert in range(len(COUNTS)):
            self.register_parameter(f"weight{expert}", torch.nn.Parameter(torch.randn(4, 6)))

    def forward(self, x, splits):
        parts = [part @ self.get_parameter(f"weight{i}").t() for i, part in enumerate(x.split(splits))]
        return torch.cat(parts), "biases"


@pytest.fixture
def grouped(monkeypatch):
    """The linear, and the adapters of its experts."""
    one = types.SimpleNamespace(size=lambda: 1)
    monkeypatch.setattr(lora.parallel_state, "get_tensor_model_parallel_group", lambda: one)
    monkeypatch.setattr(lora.parallel_state, "get_expert_tensor_parallel_world_size", lambda: 1)
    config = types.SimpleNamespace(
        sequence_parallel=False, params_dtype=torch.float32, expert_model_parallel_size=1
    )  # fmt: skip
    torch.manual_seed(0)
    module = Grouped()
    adapters = []
    for expert in range(len(COUNTS)):
        adapter = Adapter(
            config, [AdapterBlock("up", ((0, 4),))], split="column", expert=True, inputs=6, outputs=4, rank=2, scale=0.5,
            dropout=0.0,
        )  # fmt: skip
        for parameter in adapter.parameters():
            torch.nn.init.normal_(parameter)
        lora.attach_to_expert(module, expert, adapter)
        adapters.append(adapter)
    return module, adapters


def test_each_experts_tokens_meet_its_adapter(grouped):
    module, adapters = grouped
    x = torch.randn(sum(COUNTS), 6)
    out, bias = module(x, COUNTS)
    wanted = [part @ lora.adapter_of(module, f"weight{i}").merged_weight(module.get_parameter(f"weight{i}")).t()
              for i, part in enumerate(x.split(COUNTS))]  # fmt: skip
    torch.testing.assert_close(out, torch.cat(wanted))
    assert bias == "biases" and isinstance(module.adapter, GroupedAdapter)
    assert [lora.adapter_of(module, f"weight{i}") for i in range(3)] == adapters
    assert lora.adapter_of(module, "bias1") is None


def test_adapters_that_are_off_add_nothing(grouped):
    """As `without_adapters` turns them off, for the log-probs of the reference."""
    module, adapters = grouped
    x = torch.randn(sum(COUNTS), 6)
    base = torch.cat([part @ module.get_parameter(f"weight{i}").t() for i, part in enumerate(x.split(COUNTS))])
    for adapter in lora.adapters_of(module):
        adapter.enabled = False
    torch.testing.assert_close(module(x, COUNTS)[0], base)
    for adapter in adapters:
        adapter.enabled = True
    assert not torch.allclose(module(x, COUNTS)[0], base)


@pytest.mark.parametrize("ep", [1, 2])
def test_experts_adapters_are_parts_of_their_own_rank(grouped, ep):
    """The gradient's norm counts them on every tensor-parallel rank, and under ep the ranks of other experts have others."""
    config = types.SimpleNamespace(sequence_parallel=True, params_dtype=torch.float32, expert_model_parallel_size=ep)
    adapter = Adapter(
        config, [AdapterBlock("up", ((0, 4),))], split="column", expert=True, inputs=6, outputs=4, rank=2, scale=0.5, dropout=0.0
    )  # fmt: skip
    marks = {(p.tensor_model_parallel, p.allreduce, p.sequence_parallel) for p in adapter.parameters()}
    assert marks == {(True, ep == 1, False)}
