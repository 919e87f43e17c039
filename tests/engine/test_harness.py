"""The harness itself: values, errors of any rank, crashes and time-outs, and that the next case still runs."""

import ctypes
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.engine.harness import Case, run_world

HERE = "tests.engine.test_harness"


def total(x):
    value = torch.tensor(float(x * (dist.get_rank() + 1)))
    dist.all_reduce(value)
    return {"sum": value.item(), "pid": os.getpid(), "rank": os.environ["RANK"]}


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("on purpose")
    dist.barrier()


def crash_on(rank):
    """The others fail by it before the harness sees it."""
    if dist.get_rank() == rank:
        time.sleep(0.3)
        ctypes.string_at(0)
    raise RuntimeError("the connection is closed")


def sleep():
    time.sleep(60)


@pytest.mark.nightly
def test_values_errors_crashes_and_timeouts():
    cases = [
        Case(f"{HERE}:total", {"x": 2}),
        Case(f"{HERE}:total", {"x": 3}),
        Case(f"{HERE}:fail_on", {"rank": 1}),
        Case(f"{HERE}:total", {"x": 4}),
        Case(f"{HERE}:crash_on", {"rank": 1}),
        Case(f"{HERE}:sleep", {}, timeout_s=1),
        Case(f"{HERE}:total", {"x": 5}),
    ]
    one, two, failed, three, crashed, slept, four = run_world(2, cases)
    assert [r.value["sum"] for r in (one, two, three, four)] == [6.0, 9.0, 12.0, 15.0]
    assert one.value["pid"] == two.value["pid"] != three.value["pid"]
    assert one.value["rank"] == "0"
    assert failed.error.startswith("rank 1 of 2:") and "ValueError: on purpose" in failed.error
    assert crashed.error.startswith("rank 1 died with exit code -11\nFatal Python error: Segmentation fault")
    assert "test_harness.py" in crashed.error and "in crash_on" in crashed.error
    assert slept.error == "ranks [0, 1] gave no answer within 1 s"
