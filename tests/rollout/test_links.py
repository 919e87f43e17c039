"""Links between the trainer and the processes of servers: buckets, both links in threads of this process, and what a
hand-over does where a server fails. Real servers are in test_handover.py.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import multiprocessing
import os
import re
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist

from mrl.engine import link_groups, links
from mrl.errors import ConfigError, ServerError
from mrl.rollout import handover as handovers
from tests.rollout import killed_trainer
from tests.rollout.real_vllm import sampler_of
from tests.rollout.replay import Replay, changed, says

CPU = torch.device("cpu")
SIZES = (3, 8, 1, 0, 5, 2)  # elements
WEIGHTS = [(f"w{i}", torch.arange(float(n)) + i) for i, n in enumerate(SIZES)]
MIXED = [
    ("half", torch.arange(3, dtype=torch.bfloat16)), ("whole", torch.arange(2.0)),
    ("flag", torch.tensor([True, False, True])), ("scalar", torch.tensor(7, dtype=torch.int64)),
    ("turned", torch.arange(6.0).reshape(2, 3).t()),
]  # fmt: skip


def own_memory() -> list:
    return [*links._SHM.glob(f"mrl-{os.getpid()}-*"), *links._SHM.glob(f".mrl-{os.getpid()}-*")]


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


@pytest.mark.parametrize("limit", [1, 30, 10_000])
def test_tensors_begin_where_their_type_may(limit):
    found = packed(MIXED, limit)
    came = [pair for bucket, _ in found for pair in links.unpack(bucket.layout, bucket.data.clone())]
    if limit > 30:  # each was read after the buffer was written again
        came = came[-len(found[-1][0].names) :]
    names = [name for name, _ in came]
    for name, tensor in came if limit > 30 else []:
        assert torch.equal(tensor, dict(MIXED)[name]) and tensor.dtype == dict(MIXED)[name].dtype
    assert names and all(b.data.storage_offset() == 0 for b, _ in found)


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
        joining = [pool.submit(links.make_end, offer, worker) for offer, worker in seats]
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
        joining = pool.submit(links.make_end, link.offers()[0], 0)
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
    end = links.make_end(offer, 0)
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
    link = links.BroadcastLink(CPU, "127.0.0.1", [1], timeout_s=60)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        joining = pool.submit(links.make_end, link.offers()[0], 0)
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
    with pytest.raises(links.LinkBroken, match="a bucket was not taken in 0.3 s"):
        link.send(bucket, lambda: False)


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
        links.make_end({"protocol": 0, "link": "ipc"}, 0)
    with pytest.raises(ValueError, match="another machine"):
        memory = {"file": "/dev/shm/of-another-machine", "bytes": 4}
        links.make_end({"protocol": 2, "link": "ipc"}, 0).receive({"memory": memory, "dtypes": [], "shapes": []}, CPU)


# ------------------------------------------------------------------------------------------------- on recorded traffic


def linked(body, recorded):
    """A fault of /server_info: of a server that was started for links."""
    recorded[1]["vllm_config"]["weight_transfer_config"] = {"backend": "mrl"}
    return recorded


PLACE, DONE = says(200, {"results": [links.place()]}), says(200, {"message": "done"})


@pytest.fixture
def two():
    """Two servers, whose processes are in this process: what they receive is noted, and they take part in no group."""
    shared: list[tuple[str, str]] = []
    servers = [Replay("vllm.json", name=str(i), shared=shared) for i in range(2)]
    for server in servers:
        server.faults["/server_info?config_format=json"] = [linked]
        server.faults["/collective_rpc"] = [PLACE] + [DONE] * 9
        for path in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
            server.faults[f"/{path}"] = [DONE] * 9
    yield servers
    for server in servers:
        server.close()


def test_the_next_bucket_is_gathered_while_one_is_sent(two, tmp_path):
    """The servers answer for the first bucket only when the stream has been asked for what is in the second."""
    asked_for, in_time = threading.Event(), []

    def wait(body, recorded):
        in_time.append(asked_for.wait(20))
        return 200, {"message": "done"}

    for server in two:
        server.faults["/update_weights"] = [wait, *[DONE] * 3]
    sampler = sampler_of([s.url for s in two], str(tmp_path), handover="ipc")
    sampler._handover._bucket_bytes = 1

    def stream():
        for i, pair in enumerate(WEIGHTS[:3]):
            if i == 2:
                asked_for.set()
            yield pair

    sampler.update_weights(stream())
    assert in_time == [True, True]
    paths = [path for _, path in two[0].shared]
    marks = ["/pause?mode=wait", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
    places = [[i for i, path in enumerate(paths) if path == mark] for mark in marks]
    assert all(max(a) < min(b) for a, b in itertools.pairwise(places)) and len(places[2]) == 2 * 3
    assert not list(tmp_path.iterdir()), "nothing is written"


def dies(server: Replay):
    """A fault: the server hangs up, and nobody reaches it any more."""

    def fault(body, recorded):
        threading.Thread(target=server.close).start()
        return None

    return fault


SAYS_500 = r"says HTTP 500: out of memory"


@pytest.mark.parametrize(
    "path, how",
    [("/start_weight_update", SAYS_500), ("/update_weights", SAYS_500), ("/finish_weight_update", SAYS_500),
     ("/update_weights", r"/update_weights cannot be reached")],
)  # fmt: skip
def test_where_one_fails_none_goes_on(two, tmp_path, path, how):
    """The last: it dies with the second bucket."""
    fault = says(500, {"error": {"message": "out of\nmemory"}}) if how == SAYS_500 else dies(two[1])
    two[1].faults[path] = [fault] if how == SAYS_500 else [DONE, fault]
    sampler = sampler_of([s.url for s in two], str(tmp_path), handover="ipc")
    sampler._handover._bucket_bytes = 24
    read, start = [], time.monotonic()
    with pytest.raises(ServerError, match=f"{how}.*no server samples.*stay paused") as caught:
        sampler.update_weights((read.append(name), (name, tensor))[1] for name, tensor in WEIGHTS)
    assert two[1].url in str(caught.value) and "\n" not in str(caught.value) and time.monotonic() - start < 30
    assert len(read) == len(WEIGHTS), "other ranks are in the stream"
    assert "/resume" not in two[0].paths() + two[1].paths()
    assert two[1].version == "incomplete"
    assert not own_memory()


class Process:
    """A process of a replayed server that joins a group and receives."""

    def __init__(self, server: Replay, *, receives: bool) -> None:
        self.end: links.End | None = None
        self.came: list[tuple[str, torch.Tensor]] = []
        server.faults["/server_info?config_format=json"] = [linked]
        server.faults["/get_world_size"] = [says(200, {"world_size": 1})] * 9
        server.faults["/init_weight_transfer_engine"] = [self.join] * 9
        server.faults["/update_weights"] = [self.receive if receives else says(500, {"error": "busy with itself"})] * 9
        server.faults["/collective_rpc"] = [self.leave] * 9

    def join(self, body, recorded):
        self.end = links.make_end(body["init_info"]["offer"], 0)
        return 200, {"message": "done"}

    def receive(self, body, recorded):
        bucket = body["update_info"]["bucket"]
        try:
            self.came += links.unpack(bucket, self.end.receive(bucket, CPU))
        except RuntimeError as error:
            return 500, {"error": str(error)}
        return 200, {"message": "done"}

    def leave(self, body, recorded):
        end, self.end = self.end, None
        if end is not None:
            end.close()
        return 200, {"message": "done"}


def test_a_group_of_two_servers(two, tmp_path):
    processes = [Process(server, receives=True) for server in two]
    sampler = sampler_of([s.url for s in two], str(tmp_path), handover="broadcast")
    sampler._handover._bucket_bytes = 24
    sampler.update_weights(iter(WEIGHTS))
    for process in processes:
        assert [(n, t.tolist()) for n, t in process.came] == [(n, t.tolist()) for n, t in WEIGHTS]
    sampler.close()
    assert [process.end for process in processes] == [None, None]


def test_cuda_ipc_reads_each_bucket_where_it_is_and_when_it_is_written(two, tmp_path, gpu):
    process = Process(two[0], receives=True)
    two[0].faults["/collective_rpc"].insert(0, says(200, {"results": [links.place()]}))
    sampler = sampler_of([two[0].url], str(tmp_path), handover="auto", device=gpu)
    assert sampler.handover == "ipc"
    sampler._handover._bucket_bytes = 24
    sampler.update_weights(iter(WEIGHTS))
    assert two[0].paths().count("/update_weights") > 2
    assert [(n, t.tolist()) for n, t in process.came] == [(n, t.tolist()) for n, t in WEIGHTS]


def test_a_server_that_sleeps_is_on_the_trainers_gpu(two, tmp_path, gpu):
    """So weights come to it by ipc, else by disk: NCCL refuses two processes on one GPU."""

    def asleep(body, recorded):
        recorded[1]["vllm_config"]["model_config"]["enable_sleep_mode"] = True
        return linked(body, recorded)

    for handover, sees, expected in (
        ("auto", ["GPU-0"], "ipc"), ("auto", ["GPU-1"], "disk"),
        ("broadcast", ["GPU-0"], r"cannot reach http\S+: rollout.server.sleep is for .*NCCL.*; set it to auto, ipc or disk"),
        ("ipc", ["GPU-1"], "does not see the trainer's GPU; set it to disk"),
    ):  # fmt: skip
        two[0].faults["/server_info?config_format=json"] = [asleep]
        two[0].faults["/collective_rpc"] = [says(200, {"results": [links.place() | {"gpus": sees}]})] * 2
        make = functools.partial(sampler_of, [two[0].url], str(tmp_path), sleep=True, device=gpu)
        if handover == "auto":
            sampler = make(handover=handover)
            assert sampler.handover == expected
            notes = " ".join(sampler.notes)
            assert expected == "ipc" or re.fullmatch(
                r"rollout.server.handover: disk \(not ipc, as of http\S+: it does not see .*; not broadcast, as .*\)",
                notes,
            ), notes
        else:
            with pytest.raises(ConfigError, match=expected):
                make(handover=handover)


def test_a_server_that_does_not_receive_holds_nobody_up(two, tmp_path):
    """It says no and takes no part in the broadcast, which is too large to be sent before it is read."""
    processes = [Process(two[0], receives=True), Process(two[1], receives=False)]
    sampler = sampler_of([s.url for s in two], str(tmp_path), handover="broadcast")
    start = time.monotonic()
    with pytest.raises(ServerError, match="/update_weights says HTTP 500: busy with itself.*stay paused") as caught:
        sampler.update_weights(iter([("a", torch.zeros(2**23)), ("b", torch.zeros(1))]))
    assert two[1].url in str(caught.value) and time.monotonic() - start < 15
    assert [process.end for process in processes] == [None, None] and sampler._handover._link is None


def test_a_broadcast_that_does_not_begin_holds_nobody_up(two, tmp_path, monkeypatch):
    """As NCCL's first, on the host, where a server takes no part."""
    stuck = threading.Event()
    monkeypatch.setattr(handovers, "LAST_WORDS_S", 0.5)
    monkeypatch.setattr(links.BroadcastLink, "_broadcast", lambda link, data: stuck.wait(60))
    processes = [Process(two[0], receives=True), Process(two[1], receives=False)]
    sampler = sampler_of([s.url for s in two], str(tmp_path), handover="broadcast")
    start = time.monotonic()
    with pytest.raises(ServerError, match="/update_weights says HTTP 500: busy with itself.*stay paused"):
        sampler.update_weights(iter(WEIGHTS))
    assert time.monotonic() - start < 15 and [process.end for process in processes] == [None, None]
    stuck.set()


def no_room(*args, **named):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("way, words", [("ipc", "/dev/shm has no room for a bucket of 1 MB, .*No space left"),
                                        ("broadcast", "no link from 127.0.0.1: .*No space left")])  # fmt: skip
def test_where_the_trainer_has_no_room_servers_hear_of_it(two, tmp_path, monkeypatch, way, words):
    processes = [Process(server, receives=True) for server in two]
    for server in two:
        server.faults["/collective_rpc"].insert(0, PLACE)
    sampler = sampler_of([s.url for s in two], str(tmp_path), handover=way)
    if way == "ipc":
        monkeypatch.setattr(os, "posix_fallocate", no_room)
    else:
        monkeypatch.setattr(dist, "TCPStore", no_room)
    read = []
    with pytest.raises(ServerError, match=words) as said:
        sampler.update_weights((read.append(name), (name, tensor))[1] for name, tensor in WEIGHTS)
    assert len(read) == len(WEIGHTS) and "\n" not in str(said.value) and not own_memory()
    if way == "ipc":
        assert "set rollout.server.bucket_mb lower" in str(said.value) and "stay paused" in str(said.value)
    else:
        assert "/start_weight_update" not in two[0].paths(), "they keep their weights"
    assert [process.end for process in processes] == [None, None]


def test_a_server_that_does_not_pause_keeps_its_weights(two, tmp_path):
    two[0].faults["/pause?mode=wait"] = [says(500, {"error": "no"})]
    sampler = sampler_of([s.url for s in two], str(tmp_path), handover="ipc")
    with pytest.raises(ServerError, match="/pause"):
        sampler.update_weights(iter(WEIGHTS))
    for server in two:
        assert server.paths().count("/resume") == 1 and "/start_weight_update" not in server.paths()


def test_the_way_is_the_servers_too(two, tmp_path):
    """auto on a CPU is disk; what is asked for and cannot be is one line with what would help."""
    urls = [s.url for s in two]
    sampler = sampler_of(urls, str(tmp_path))
    assert sampler.handover == "disk"
    assert sampler.notes == ("rollout.server.handover: disk (as the actor is on a CPU)",)
    two[0].faults["/server_info?config_format=json"] = [linked]
    with pytest.raises(
        ConfigError, match=r"handover: value .broadcast. .*:\d+: it takes .*worker-extension-cls"
    ) as caught:
        sampler_of(urls, str(tmp_path), handover="broadcast")
    assert two[1].url in str(caught.value)
    for server in two:
        server.faults["/server_info?config_format=json"] = [linked]
        server.faults["/collective_rpc"] = [says(200, {"results": [{"machine": ["another", 1], "gpus": []}]})]
    with pytest.raises(ConfigError, match="on another machine .*; set it to broadcast"):
        sampler_of(urls, str(tmp_path), handover="ipc")


@pytest.mark.parametrize(
    "names, words",
    [(["model.embed_tokens.weight"], "keeps the old head"),
     (["model.layers.0.mlp.experts.0.up_proj.weight", "lm_head.weight"], "reads new weights of experts as if")],
)  # fmt: skip
def test_some_weights_need_more_than_a_cpus_vllm_does(two, tmp_path, names, words):
    """One that was started without mrl's worker would go on with its old head, or with wrong experts."""
    two[0].faults["/server_info?config_format=json"] = [
        changed(lambda a: a["vllm_config"].update(device_config={"device": "cpu"}))
    ]
    sampler = sampler_of([two[0].url], str(tmp_path))
    with pytest.raises(ServerError, match=f"{words}.*start it with .*vllm_worker.Worker"):
        sampler.update_weights((name, torch.ones(2)) for name in names)
    assert "/pause?mode=wait" not in two[0].paths()
