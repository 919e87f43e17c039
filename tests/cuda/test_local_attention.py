"""The local spec's attention on a GPU takes memory in proportion to the length, in every kind of layer and layout."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    "options",
    [{"cp": 2}, {"cp": 2, "value_size": 64}, {"window": 128}, {"window": 4096, "cp": 2}, {"sinks": True},
     {"sinks": True, "window": 128, "cp": 2}, {"sinks": True, "dtype": "float32"}, {"cp": 2, "dtype": "float32"}],
    ids=lambda options: " ".join(f"{name} {value}" for name, value in options.items()),
)  # fmt: skip
def test_memory_grows_with_the_length(worker, options):
    length = 2048 if "dtype" in options else 8192  # in fp32, blocks of 128 queries
    short, long = (worker.call("tests.cuda.local_attention:peak", n, **options) for n in (length, 2 * length))
    assert long < 2.1 * short, f"{short / 2**20:.0f} MiB at {length} tokens, {long / 2**20:.0f} MiB at {2 * length}"
