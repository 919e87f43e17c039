"""What a hand-over through a link does where a server fails, and which way it takes: on recorded traffic, with what a
server's processes do at a link in this process. Real servers are in test_handover.py, links by themselves in test_links.py.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist

from mrl.engine import links
from mrl.errors import ConfigError, ServerError
from mrl.rollout import handover as handovers
from mrl.rollout import server as servers
from tests.rollout.real_vllm import sampler_of
from tests.rollout.replay import Replay, changed, says
from tests.rollout.test_links import CPU, WEIGHTS, own_memory


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
    sampler.fleet.handover._bucket_bytes = 1

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


@pytest.mark.parametrize("bucket_mb, count", [(2, 2), (4, 1)])
def test_buckets_have_the_size_that_is_given(two, tmp_path, bucket_mb, count):
    """Of weights of 2.25 MB."""
    sampler = sampler_of([s.url for s in two], str(tmp_path), handover="ipc", bucket_mb=bucket_mb)
    sampler.update_weights((str(i), torch.zeros(3 * 2**16)) for i in range(3))
    assert two[0].paths().count("/update_weights") == count


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
    sampler.fleet.handover._bucket_bytes = 24
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
        self.end: links.LinkReceiver | None = None
        self.came: list[tuple[str, torch.Tensor]] = []
        server.faults["/server_info?config_format=json"] = [linked]
        server.faults["/get_world_size"] = [says(200, {"world_size": 1})] * 9
        server.faults["/init_weight_transfer_engine"] = [self.join] * 9
        server.faults["/update_weights"] = [self.receive if receives else says(500, {"error": "busy with itself"})] * 9
        server.faults["/collective_rpc"] = [self.leave] * 9

    def join(self, body, recorded):
        self.end = links.make_receiver(body["init_info"]["offer"], 0)
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


def test_cuda_ipc_reads_each_bucket_where_it_is_and_when_it_is_written(two, tmp_path, gpu):
    process = Process(two[0], receives=True)
    two[0].faults["/collective_rpc"].insert(0, says(200, {"results": [links.place()]}))
    sampler = sampler_of([two[0].url], str(tmp_path), handover="auto", device=gpu)
    assert sampler.handover == "ipc"
    sampler.fleet.handover._bucket_bytes = 24
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
        ("broadcast", ["GPU-0"], r"cannot reach http\S+: rollout.server.sleep is for .*NCCL.*; set it to auto or disk"),
        ("ipc", ["GPU-1"], "does not see the trainer's GPU; set it to auto or disk"),
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
    assert [process.end for process in processes] == [None, None] and sampler.fleet.handover._link is None


def test_a_broadcast_that_does_not_begin_holds_nobody_up(two, tmp_path, monkeypatch):
    """As NCCL's first, on the host, where a server takes no part."""
    stuck = threading.Event()
    for module in (handovers, servers):
        monkeypatch.setattr(module, "LAST_WORDS_S", 0.5)
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


@pytest.mark.parametrize("way, words", [("ipc", "there is no room for a bucket of 1 MB, .*No space left"),
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
    with pytest.raises(ConfigError, match="on another machine .*; set it to auto or disk"):
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


def test_a_server_that_joins_no_link_holds_nobody_up(two, tmp_path):
    """The trainer waits for it in its store, which it then has to leave."""
    for server in two:
        server.faults["/server_info?config_format=json"] = [linked]
        server.faults["/get_world_size"] = [says(200, {"world_size": 1})]
        server.faults["/init_weight_transfer_engine"] = [says(500, {"error": "cannot"})]
        server.faults["/collective_rpc"] = [DONE] * 9
    sampler, start = sampler_of([s.url for s in two], str(tmp_path), handover="broadcast"), time.monotonic()
    with pytest.raises(ServerError, match="/init_weight_transfer_engine says HTTP 500: cannot"):
        sampler.update_weights(iter(WEIGHTS))
    assert time.monotonic() - start < 20 and "/pause?mode=wait" not in two[0].paths()


def test_a_link_that_is_dropped_says_so_before_servers_are_told(two, tmp_path):
    """A process that waits for a bucket hears no request."""
    told = []

    class Late(Process):
        def leave(self, body, recorded):
            if self.end is not None and body["method"] == "mrl_leave":
                told.append(self.end._is_left())
            return super().leave(body, recorded)

    processes = [Late(server, receives=True) for server in two]
    sampler = sampler_of([s.url for s in two], str(tmp_path), handover="broadcast")
    sampler.update_weights(iter(WEIGHTS))
    sampler.close()
    assert told == [True, True] and [process.end for process in processes] == [None, None]
    for process in processes:
        assert [(n, t.tolist()) for n, t in process.came] == [(n, t.tolist()) for n, t in WEIGHTS]


def test_a_links_memory_comes_back_when_servers_have_let_go_of_it(two, tmp_path, monkeypatch):
    """Once before they finish, where it may be short, and once behind."""
    order, rest = [], links.SharedMemoryLink.rest
    monkeypatch.setattr(links.SharedMemoryLink, "rest", lambda link: (order.append("rest"), rest(link)))
    for server in two:
        server.faults["/finish_weight_update"] = [
            lambda body, recorded: (order.append("finish"), DONE(body, recorded))[1]
        ]
    sampler_of([s.url for s in two], str(tmp_path), handover="ipc").update_weights(iter(WEIGHTS))
    assert order == ["rest", "finish", "finish", "rest"]
