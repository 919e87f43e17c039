"""Transformers models with mrl's kernels, beside their own code: the same model on CPU tensors, in fp32 and bfloat16.

Which modules get a kernel is decided by what they compute; the table below says what comes of it.
"""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.engine.fsdp import fused
from mrl.kernels import operators
from tests.engine import tiny


@pytest.fixture(autouse=True)
def own_rotary_again():
    """The function that turns is one for all models of a family."""
    yield
    for module in list(sys.modules.values()):
        function = vars(module).get(fused.ROTARY) if getattr(module, "__dict__", None) is not None else None
        if isinstance(function, fused.FusedRotary):
            setattr(module, fused.ROTARY, function.own)


def made(family, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.config_of(family), attn_implementation="eager", dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # which begin as all alike
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def taken(model):
    """Names of the classes whose forward is a kernel's, and whether the rotary function is."""
    by = {type(module).__name__ for module in model.modules() if "forward" in vars(module)}
    rotary = vars(sys.modules[type(model).__module__]).get(fused.ROTARY)
    return by | ({"rotary"} if isinstance(rotary, fused.FusedRotary) else set())


TAKEN = {
    "qwen3": {"Qwen3RMSNorm", "Qwen3MLP", "rotary"},
    "glm4_moe": {"Glm4MoeRMSNorm", "Glm4MoeMLP", "rotary"},
    "phi3": {"Phi3RMSNorm", "Phi3MLP", "rotary"},
    "deepseek_v3": {"DeepseekV3RMSNorm", "DeepseekV3MLP", "rotary"},
    "qwen3_5": {"Qwen3_5RMSNorm", "Qwen3_5MLP", "rotary"},  # not the gated norm of its delta nets
    "gemma2": {"Gemma2RMSNorm", "rotary"},  # its MLP is of GELU
    "olmo2": {"Olmo2MLP", "rotary"},  # its norm rounds once
    "ernie4_5_moe": {"Ernie4_5_MoeRMSNorm", "Ernie4_5_MoeMLP"},  # neighbours turn together
    "gpt_oss": set(),
    "gpt2": set(),
    "phi": {"rotary"},
    "bloom": set(),
}


@pytest.mark.parametrize("family", TAKEN)
def test_modules_of_known_forms_get_kernels(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny.config_of(family), dtype=torch.float32)
    state = torch.get_rng_state()
    said = fused.use_kernels(model)
    assert taken(model) == TAKEN[family] == {"rotary" if name == fused.ROTARY else name for name in said}
    assert torch.equal(torch.get_rng_state(), state)


def outcome(model):
    tokens = torch.arange(12).view(2, 6) % tiny.VOCAB
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    loss.backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def outcomes(model):
    """Those of its own code, and those with kernels."""
    own = outcome(model)
    fused.use_kernels(model)
    return own, outcome(model)


@pytest.mark.parametrize("family", ["phi3", "gemma2", "glm4_moe"])
def test_numbers_in_fp32(family):
    """Logits to 1e-5; gradients, over a few layers, to 1e-4 of each tensor's largest."""
    (logits, gradients), (found, of_kernels) = outcomes(made(family))
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
    assert of_kernels.keys() == gradients.keys() and not all(
        torch.equal(of_kernels[n], g) for n, g in gradients.items()
    )
    for name, gradient in gradients.items():
        assert (of_kernels[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max() + 1e-7, name


def test_numbers_in_bfloat16():
    """The forward rounds where transformers does, so most logits have the same bits."""
    (logits, gradients), (found, of_kernels) = outcomes(made("qwen3", torch.bfloat16))
    assert (found == logits).double().mean() > 0.9
    torch.testing.assert_close(found, logits, rtol=2**-6, atol=2**-6)
    for name, gradient in gradients.items():
        assert (of_kernels[name] - gradient).float().norm() <= 0.02 * gradient.float().norm(), name


def test_on_a_cpu_transformers_own_code_runs():
    model = made("qwen3")
    logits, gradients = outcome(model)
    fused.use_kernels(model)
    with operators.interpreted(False):
        found, same = outcome(model)
    assert torch.equal(found, logits) and all(torch.equal(same[name], g) for name, g in gradients.items())
