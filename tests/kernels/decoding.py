"""A case of the decoder's kernels for a world, on CPU tensors under Triton's interpreter."""

from __future__ import annotations

import contextlib

import torch

from mrl.config.schema import RoleConfig
from mrl.kernels import operators
from tests.engine import generation, te_like
from tests.engine.contract import make_engine
from tests.operators import Operators


def samples_are_the_same(config: RoleConfig, expected: list[tuple[list[int], bool]]) -> set[str]:
    """Completions are those of transformers, with log-probs of torch's code. Returns the kernels of a generation."""
    requests = generation.sampled_requests(1)
    spec = te_like.te_like() if config.engine.layer_spec == "te" else contextlib.nullcontext()
    with spec:
        engine = make_engine(config)
        plain = engine.generate(requests)
        with operators.interpreted(), Operators() as called:
            found = engine.generate(requests)
    assert [(c.tokens, c.finished) for c in found] == expected
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-5)
    return {func._overloadpacket.__name__ for func, _ in called.calls if func.namespace == "mrl"}
