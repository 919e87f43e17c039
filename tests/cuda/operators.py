"""Operators of a transformers model, and an update without mrl's kernels."""

from __future__ import annotations

from tests.cuda import fake, run  # before torch: fake.py says what torch is here

import torch  # isort: skip
from tests.cuda.cases import Case, Result


def count_of_transformers(family: str) -> dict[str, int]:
    """How often each operator is called by a tiny transformers model in bfloat16, as backend fsdp builds it."""
    from transformers import AutoModelForCausalLM

    from mrl.engine.fsdp import fused
    from tests.engine import tiny

    config = tiny.config_of(family)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
    fused.use_kernels(hf)  # which looks at numbers
    with fake.Fake() as watched:
        hf.to_empty(device="cuda")
        tokens = torch.zeros(2, 8, dtype=torch.int64, device="cuda")
        hf(input_ids=tokens, use_cache=False).logits.sum().backward()
        return dict(watched.order.calls)


def without_kernels(case: Case) -> Result:
    """`run.run` as on a machine whose triton cannot compile: torch's operators, as on a CPU."""
    from mrl.kernels import operators

    operators.CAN_COMPILE = False  # in this fork alone
    return run.run(case)
