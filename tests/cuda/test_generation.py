"""A prompt's attention in generation takes memory in proportion to its length, after tokens that the cache has."""

from __future__ import annotations

import pytest

PREFILL = 4096  # rollout.prefill_tokens


@pytest.mark.parametrize(
    "options, most",
    [({}, 0.3), ({"window": 4096}, 0.3), ({"sinks": True}, 0.3), ({"sinks": True, "window": 128}, 0.3),
     ({"dtype": "float32"}, 2), ({"softcap": 30.0}, 3)],
    ids=str,
)  # fmt: skip
def test_memory_is_bounded(worker, options, most):
    """most: GiB. Scores written out would be 8 GiB of bf16 after 28,672 tokens, a few times over."""
    found = {old: worker.call("tests.cuda.generation:peak", PREFILL, old, **options) for old in (0, 28672)}
    assert max(found.values()) < most * 2**30, {old: f"{bytes / 2**30:.2f} GiB" for old, bytes in found.items()}
