"""Links between the trainer and the processes of servers: buckets, both links in threads of this process."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import secrets
import time
import types

import pytest
import torch
import torch.distributed as dist

from mrl.engine import link_groups, links
from tests.rollout import killed_trainer

CPU = torch.device("cpu")
SIZES = (3, 8, 1, 0, 5, 2)  # elements
WEIGHTS = [(f"w{i}", torch.arange(float(n)) + i) for i, n in enumerate(SIZES)]
MIXED = [
    ("half", torch.arange(3, dtype=torch.bfloat16)), ("whole", torch.arange(2.0)),
    ("flag", torch.tensor([True, False, True])), ("scalar", torch.tensor(7, dtype=torch.int64)),
    ("turned", torch.arange(6.0).reshape(2, 3).t()),
]  # fmt: skip


def own_memory() -> list:
    return [*links._SHM.glob(f"mrl-link-{os.getpid()}-*"), *links._SHM.glob(f".mrl-link-{os.getpid()}-*")]


def packed(weights, limit: int) -> list[tuple[links.Bucket, bytes]]:
    buffers: dict[int, torch.Tensor] = {}

    def buffer(turn: int, size: int) -> torch.Tensor:
        buffers[turn] = torch.full((size,), 255, dtype=torch.uint8)
        return buffers[turn]

    return [(b, b.data.numpy().tobytes()) for b in links.buckets(iter(weights), limit, buffer)]


@pytest.mark.parametrize("limit", [1, 12, 13, 44, 48, 10_000])
def test_buckets_hold_everything_and_no_more_than_their_size(limit):
    """12 bytes: exactly the first tensor; 44: exactly the first two; 1: every tensor is larger than a bucket."""
    found = packed(WEIGHTS, limit)
    for bucket, content in found:
        assert len(content) <= limit or len([s for s in bucket.shapes if s != [0]]) == 1
        for (name, tensor), (expected_name, expected) in zip(
            links.unpack(bucket.layout, bucket.data.clone()),
            [(n, t) for n, t in WEIGHTS if n in bucket.names], strict=True,
        ):  # fmt: skip
            assert name == expected_name and tensor.dtype == expected.dtype and tensor.shape == expected.shape
        assert links.size_of(bucket.layout) == len(content)
    assert [name for bucket, _ in found for name in bucket.names] == [name for name, _ in WEIGHTS]
    assert b"".join(content for _, content in found) == b"".join(t.numpy().tobytes() for _, t in WEIGHTS)
    assert [bucket.turn for bucket, _ in found] == [i % 2 for i in range(len(found))]
    if limit in (12, 44):
        assert len(found[0][1]) == limit


@pytest.mark.parametrize("way", ["broadcast", "ipc"])
def test_a_link_carries_every_bit(way):
    """Two servers, of one and of two processes."""
    link = (
        links.BroadcastLink(CPU, "127.0.0.1", [1, 2], timeout_s=30)
        if way == "broadcast"
        else links.SharedMemoryLink(CPU, 2)
    )
    offers = link.offers()
    seats = [(offers[0], 0), (offers[1], 0), (offers[1], 1)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        joining = [pool.submit(links.make_receiver, offer, worker) for offer, worker in seats]
        link.connect(lambda: False)
        ends = [each.result() for each in joining]
        for weights in (WEIGHTS, MIXED):
            came: list[list] = [[], [], []]
            for bucket in links.buckets(iter(weights), 24, link.buffer):
                told, _ = link.describe(bucket)
                receiving = [pool.submit(end.receive, told, CPU) for end in ends]
                link.send(bucket, lambda: False)
                for mine, each in zip(came, receiving, strict=True):
                    mine += links.unpack(told, each.result())
            link.rest()
            for mine in came:
                assert [(n, t.dtype, t.tolist()) for n, t in mine] == [(n, t.dtype, t.tolist()) for n, t in weights]
            for end in ends:
                end.rest()
    assert not own_memory()
    for each in (*ends, link):
        each.close()


def test_a_process_that_is_gone_breaks_the_link():
    link = links.BroadcastLink(CPU, "127.0.0.1", [1], timeout_s=60)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        joining = pool.submit(links.make_receiver, link.offers()[0], 0)
        link.connect(lambda: False)
        joining.result().close()
    del joining
    [bucket] = links.buckets(iter([("a", torch.zeros(2**20))]), 2**30, link.buffer)
    start = time.monotonic()
    with pytest.raises(links.LinkBroken):
        link.send(bucket, lambda: False)
    assert time.monotonic() - start < 30


def test_a_search_for_a_server_that_failed_ends():
    link = links.BroadcastLink(CPU, "127.0.0.1", [1], timeout_s=60)
    start = time.monotonic()
    link.connect(lambda: time.monotonic() > start + 0.05)
    assert time.monotonic() - start < 10


@pytest.mark.slow
def test_a_trainer_that_was_killed_leaves_nothing():
    """No memory, and no server that waits for it."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=killed_trainer.run, args=(there,), daemon=True)
    process.start()
    (file, offer), mine = here.recv(), links.SharedMemoryLink(CPU, 1)
    end = links.make_receiver(offer, 0)
    mine.buffer(0, 100)
    assert os.path.exists(file) and not end._is_left(), "it lives"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(end.receive, {"names": ["a"], "dtypes": ["uint8"], "shapes": [[2**20]]}, CPU)
        process.kill()
        process.join()
        with pytest.raises(RuntimeError):
            receiving.result(30)
    assert os.path.exists(file) and end._is_left()
    mine.buffer(1, 100)
    assert not os.path.exists(file) and len(own_memory()) == 2
    mine.close()
    end.close()
    assert not own_memory()


def test_a_trainer_that_leaves_keeps_no_server_waiting(monkeypatch):
    """Where no connection tells, too, as with NCCL."""
    monkeypatch.setattr(links, "ASKED_S", 0.1)
    monkeypatch.setattr(link_groups, "CLOSE_S", 0.1)
    link = links.BroadcastLink(CPU, "127.0.0.1", [1], timeout_s=60)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        joining = pool.submit(links.make_receiver, link.offers()[0], 0)
        link.connect(lambda: False)
        end = joining.result()
        receiving = pool.submit(end.receive, {"names": ["a"], "dtypes": ["uint8"], "shapes": [[2**20]]}, CPU)
        with pytest.raises(TimeoutError):
            receiving.result(0.5)  # while the trainer gathers
        link.leave()
        with pytest.raises(RuntimeError, match="the trainer has left in the middle of a bucket"):
            receiving.result(10)
    link.close()


def test_a_bucket_that_nobody_takes_is_given_up():
    """NCCL has no limit of its own there."""
    link = links.BroadcastLink(CPU, "127.0.0.1", [1], timeout_s=0.3)
    link._group = [types.SimpleNamespace(broadcast=lambda *args: types.SimpleNamespace(is_completed=lambda: False))]
    [bucket] = links.buckets(iter([("a", torch.zeros(1))]), 2**30, link.buffer)
    start = time.monotonic()
    with pytest.raises(links.LinkBroken, match="a bucket was not taken in 0.3 s"):
        link.send(bucket, lambda: time.monotonic() > start + 20)


def test_a_broadcast_that_failed_is_no_bucket():
    """NCCL's says that it has ended, and what went wrong with a limit alone."""

    def wait(limit=None):
        if limit is not None:
            raise RuntimeError("aborted")

    work, end = types.SimpleNamespace(is_completed=lambda: True, wait=wait), object.__new__(links._BroadcastReceiver)
    end._group, end._timeout_s = [types.SimpleNamespace(broadcast=lambda *args: work)], 1
    with pytest.raises(RuntimeError, match="aborted"):
        end.receive({"names": ["a"], "dtypes": ["uint8"], "shapes": [[2]]}, CPU)


def test_who_ends_what_where_nccl_fails(monkeypatch):
    """The trainer lets its group be, and a server's is cleaned up: neither process ends."""
    asked, make = {}, links.make_group

    def noted(store, offer, *, when_broken):
        asked[offer["rank"]] = when_broken
        return make(store, offer, when_broken=when_broken)

    monkeypatch.setattr(links, "make_group", noted)
    link = links.BroadcastLink(CPU, "127.0.0.1", [1], timeout_s=30)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        joining = pool.submit(links.make_receiver, link.offers()[0], 0)
        link.connect(lambda: False)
        joining.result().close()
    link.close()
    assert asked == {0: link_groups.LET_BE, 1: link_groups.CLEAN_UP}


def test_memory_gives_back_all_that_it_took():
    before, link = len(os.listdir("/proc/self/fd")), links.SharedMemoryLink(CPU, 1)
    other = links._SHM / f"mrl-{secrets.token_hex(8)}-{os.getpid()}"  # as of vLLM inside another trainer
    other.touch()
    try:
        for _ in range(3):
            assert len(link.buffer(0, 100)) == 100 and len(link.buffer(1, 200)) == 200
            link.rest()
        assert len(os.listdir("/proc/self/fd")) == before and not own_memory() and other.exists()
    finally:
        other.unlink()


def test_nccl_ends_no_process(monkeypatch):
    """torch reads the variable where a group is made, and that alone."""
    seen = []

    class Group:
        class Options:
            pass

        def __init__(self, *args):
            seen.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    store, offer = dist.HashStore(), {"name": "a", "backend": "nccl", "rank": 0, "size": 1, "timeout_s": 1}
    for before in (None, "1"):
        monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
        if before is not None:
            monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", before)
        for when_broken in (link_groups.LET_BE, link_groups.CLEAN_UP):
            link_groups.make_group(store, offer, when_broken=when_broken)
        assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == before
    assert seen == ["0", "2"] * 2


def test_another_protocol_is_refused():
    with pytest.raises(ValueError, match="protocol 0 and this one's 2"):
        links.make_receiver({"protocol": 0, "link": "ipc"}, 0)
    with pytest.raises(ValueError, match="another machine"):
        memory = {"file": "/dev/shm/of-another-machine", "bytes": 4}
        links.make_receiver({"protocol": 2, "link": "ipc"}, 0).receive(
            {"memory": memory, "dtypes": [], "shapes": []}, CPU
        )
