"""Counts the operators that an update dispatches, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.cuda import fake, order, run  # before torch: fake.py says what torch is here

import torch  # isort: skip
from tests.cuda.cases import Case, Result


def count(case: Case) -> dict[str, int]:
    """Of the Megatron engine."""
    return _counted(lambda: run.run(case))


def count_of_transformers(family: str) -> dict[str, int]:
    """Of a tiny transformers model in bfloat16, as backend fsdp builds it."""
    from transformers import AutoModelForCausalLM

    from mrl.engine.fsdp import fused
    from tests.engine import tiny

    config = tiny.config_of(family)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
    fused.use_kernels(hf)  # which looks at numbers

    def step() -> None:
        with fake.Fake():
            hf.to_empty(device="cuda")
            tokens = torch.zeros(2, 8, dtype=torch.int64, device="cuda")
            hf(input_ids=tokens, use_cache=False).logits.sum().backward()

    return _counted(step)


def without_kernels(case: Case) -> Result:
    """`run.run` as on a machine whose triton cannot compile: torch's operators, as on a CPU."""
    from mrl.kernels import operators

    operators.CAN_COMPILE = False  # in this fork alone
    return run.run(case)


def _counted(call: Callable[[], Any]) -> dict[str, int]:
    found: Counter[str] = Counter()
    dispatch = order.Unordered.__torch_dispatch__

    def counted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found[func._overloadpacket.__name__] += 1
        return dispatch(self, func, types, args, kwargs)

    order.Unordered.__torch_dispatch__ = counted
    try:
        call()
    finally:
        order.Unordered.__torch_dispatch__ = dispatch
    return dict(found)
