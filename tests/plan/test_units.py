"""Units for people: the one that suits a figure's size, and a plural where there are several."""

from __future__ import annotations

import pytest

from mrl.errors import ConfigError
from mrl.plan import units
from mrl.plan.gpus import GPUS, gpu_of
from mrl.words import pluralize


def test_units():
    counts = {0: "0 bytes", 12: "12 bytes", 2048: "2.00 KiB", 3 * 2**20: "3.00 MiB", 5.72 * 2**30: "5.72 GiB"}
    assert {count: units.size(count) for count in counts} == counts
    times = {0: "0 s", 7.83: "7.83 s", 0.0124: "12.40 ms", 3.1e-6: "3.10 us"}
    assert {seconds: units.duration(seconds) for seconds in times} == times
    assert units.flops(49.03e9) == "49.03 GFLOPs" and units.flops(7.5e5) == "750.00 kFLOPs"
    assert (
        pluralize(1, "micro-batch", "micro-batches") == "1 micro-batch" and pluralize(16384, "rank") == "16,384 ranks"
    )
    assert [pluralize(x, "epoch") for x in (1.0, 0.5, 3)] == ["1 epoch", "0.5 epochs", "3 epochs"]


def test_a_gpu_by_its_figures():
    assert gpu_of("GB=48").memory == 48 * 10**9 and gpu_of("GB=48").flops == GPUS["h100-80gb"].flops
    mine = gpu_of("h200,TFLOPS=650,HBM=4000,LINK=300,NETWORK=25,PER_NODE=4")
    assert (mine.flops, mine.memory_rate, mine.link, mine.network, mine.per_node) == (650e12, 4e12, 3e11, 25e9, 4)
    assert mine.memory == GPUS["h200"].memory and mine.name.startswith("h200")


@pytest.mark.parametrize("text", ["", "GB=0", "GB=", "h200,TFLOPS", "h200,FAST=1", "PER_NODE=1.5"])
def test_no_gpu(text):
    with pytest.raises(ConfigError, match=r"--gpu: .*; (give|write) "):
        gpu_of(text)
