"""Speed, utilization and memory of a step."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from mrl.batch import make_batch
from mrl.engine.lora.shapes import AdapterShape
from mrl.trainers import throughput

DENSE = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3,
    "intermediate_size": 10, "vocab_size": 16, "model_type": "llama",
}  # fmt: skip
MLA = DENSE | {
    "model_type": "deepseek_v3", "q_lora_rank": 5, "kv_lora_rank": 6, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2,
    "v_head_dim": 4, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 7, "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip


def test_flops_of_a_dense_model_counted_by_hand():
    per_layer = 8 * 12 + 2 * (8 * 6) + 12 * 8 + 3 * 8 * 10  # q, k and v, output, gated MLP
    weights, output = 2 * per_layer, 8 * 16
    scores = 2 * (5 * 5 + 3 * 3) * 4 * 3 * 2  # two products, over half the square, 2 FLOPs, 4 heads of 3, 2 layers
    assert throughput.training_flops(DENSE, torch.tensor([5, 3]), 6) == 3 * (2 * weights * 8 + 2 * output * 6 + scores)


def test_flops_of_adapters_have_no_gradient_of_the_weights_beside_them():
    weights, output = 2 * (8 * 12 + 2 * (8 * 6) + 12 * 8 + 3 * 8 * 10), 8 * 16
    scores = 2 * (5 * 5 + 3 * 3) * 4 * 3 * 2
    plain = AdapterShape("q_proj", "q_proj", in_features=8, out_features=12, rank=2, scale=1.0)
    experts = AdapterShape("down", "experts", in_features=7, out_features=8, rank=3, scale=1.0, experts=6)
    adapters = throughput.adapter_weights([plain, experts], {"num_experts_per_tok": 2})
    assert adapters == 2 * (8 + 12) + 2 * 3 * (7 + 8)
    found = throughput.training_flops(DENSE, torch.tensor([5, 3]), 6, adapters)
    assert found == 2 * (2 * weights * 8 + 2 * output * 6) + 3 * (scores + 2 * adapters * 8)


def flops(hf):
    """Of 4 tokens, all of which train."""
    return throughput.training_flops(hf, torch.tensor([4]), 4)


def test_flops_of_experts_count_the_chosen_ones_and_the_router():
    sparse = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 7, "mlp_only_layers": [0]}
    moe = DENSE | sparse | {"model_type": "qwen3_moe", "decoder_sparse_step": 1}
    assert flops(moe) - flops(DENSE) == 6 * 4 * (2 * 3 * 8 * 7 + 8 * 6 - 3 * 8 * 10)


def test_flops_of_linear_attention_grow_with_tokens_and_not_with_their_square():
    linear = {
        "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 3, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    inputs = 8 * (2 * 2 * 3 + 4 * 5) + 8 * 4 * 5 + 2 * 8 * 4  # q, k and v, gate, and both rates
    weights = inputs + 3 * 4 * 3 * 5 + 4 * 5 * 8 + 3 * 8 * 10  # three products with the states, output, MLP
    weights += 8 * 24 + 2 * (8 * 6) + 12 * 8 + 3 * 8 * 10  # queries with gates, keys and values, output, MLP
    scores = 2 * 4 * 4 * 4 * 3
    assert flops(DENSE | linear) == 3 * (2 * weights * 4 + 2 * 8 * 16 * 4 + scores)


def test_flops_of_latent_attention_and_shared_experts():
    latent = (
        8 * 5 + 5 * 4 * (3 + 2) + 8 * (6 + 2) + 6 * 4 * (3 + 4) + 4 * 4 * 8
    )  # q down and up, kv down and up, output
    weights = (
        2 * latent + 3 * 8 * 10 + 8 * 6 + (2 + 2) * 3 * 8 * 7
    )  # one dense layer; router, chosen and shared experts
    scores = 2 * 4 * 4 * 4 * ((3 + 2) + 4)  # 2 layers, 4 x 4 tokens, 4 heads
    assert flops(MLA) == 3 * (2 * weights * 4 + 2 * 8 * 16 * 4 + scores)


def test_speed_is_of_all_tokens_and_utilization_of_all_gpus(tmp_path, monkeypatch):
    """Of seven places three train, one of them with weight 2; a value head has one output."""
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"head_dim": 4, "architectures": ["LlamaForCausalLM"]}))
    batch = make_batch([[1, 2, 3, 4], [5, 6, 7, 8, 9]], [[0, 0, 2, 1], [0, 0, 0, 0, 1]])
    monkeypatch.setattr(throughput, "peak_flops", lambda device: 1e6)
    for head, outputs in (("lm", 16), ("value", 1)):
        role = SimpleNamespace(model=SimpleNamespace(path=str(tmp_path), lora=None), head=head)
        measured = throughput.Throughput(SimpleNamespace(device=None, config=role, world_size=4))
        row = measured.metrics(batch, step_s=0.25)
        weights, scores = 2 * (8 * 16 + 2 * (8 * 8) + 16 * 8 + 3 * 8 * 10), 2 * (3 * 3 + 4 * 4) * 4 * 4 * 2
        work = 3 * (2 * weights * 7 + 2 * 8 * outputs * 3 + scores)
        assert row == {"perf/step_s": 0.25, "perf/tokens_per_s": 28, "perf/mfu": pytest.approx(work / 0.25 / 4e6)}


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H200 NVL", 835), ("NVIDIA GeForce RTX 4090", 165),
        ("Tesla V100-SXM2-32GB", None), ("NVIDIA RTX A4000", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)  # fmt: skip
def test_peak_of_a_gpu_by_name(name, tflops):
    assert throughput.peak_of(name) == (tflops * 1e12 if tflops else None)
    assert throughput.peak_flops(torch.device("cpu")) is None
