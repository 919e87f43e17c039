"""A case of the decoder's kernels for a world, on CPU tensors under Triton's interpreter."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.config.schema import RoleConfig
from mrl.kernels import operators
from tests.engine import generation, te_like
from tests.engine.contract import make_engine


class _Launches(TorchDispatchMode):
    """Counts the operators of mrl's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "mrl":
            self.kernels[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def samples_are_the_same(config: RoleConfig, expected: list[tuple[list[int], bool]]) -> set[str]:
    """Completions are those of transformers, with log-probs of torch's code. Returns the kernels of a generation."""
    requests = generation.sampled_requests(1)
    spec = te_like.te_like() if config.engine.layer_spec == "te" else contextlib.nullcontext()
    with spec:
        engine = make_engine(config)
        plain = engine.generate(requests)
        with operators.interpreted(), _Launches() as launches:
            found = engine.generate(requests)
    assert [(c.tokens, c.finished) for c in found] == expected
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-5)
    return set(launches.kernels)
