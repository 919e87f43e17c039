"""The SGLang client, on traffic that was put together from the source of SGLang 0.5.23 and its published examples.

Untried against a real server: SGLang has no CPU kernels on PyPI, so none runs here. What is shown is that requests are those
that the source names, that its answers are read rightly, and the order of a hand-over. What is shared with vLLM is in
test_servers.py. Trap 31 (weights that are partly new): `test_a_hand_over_that_fails_is_undone`.
"""

from __future__ import annotations

import datetime
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mrl.config.ppo import ServerConfig
from mrl.engine import links
from mrl.engine.base import Completion
from mrl.engine.sampling import GREEDY, SamplingKey, SamplingParams
from mrl.errors import ConfigError, ServerError
from mrl.rollout.base import SampleRequest
from mrl.rollout.http import HttpClient
from mrl.rollout.server import seed_of
from mrl.rollout.sglang import PickledLink, SGLangServer, SGLangServerSampler, sampling_fields
from tests.rollout import sglang_reader
from tests.rollout.replay import Replay, changed, says

CPU = torch.device("cpu")
WEIGHTS = [("a", torch.arange(4.0))]
MIXED = [
    ("a", torch.arange(3, dtype=torch.bfloat16)), ("b", torch.arange(4.0)), ("c", torch.ones(2, 3)),
    ("d", torch.tensor([True, False])), ("e", torch.tensor(7)),
]  # fmt: skip
FIRST = SampleRequest([5, 40, 9], 4, SamplingParams(), SamplingKey(7, 1, 0, 0), stop_tokens=(2,), stop=("x",))
SECOND = SampleRequest([6, 40, 10], 4, SamplingParams(), SamplingKey(7, 1, 1, 0), stop_tokens=(2,))


@pytest.fixture
def servers():
    started, shared = [], []
    for i in range(2):
        started.append(Replay("sglang.json", name=str(i), shared=shared))
    yield started
    for server in started:
        server.close()


def sampler_of(servers, folder, *, max_length=512, device=CPU, **config) -> SGLangServerSampler:
    settings = ServerConfig(urls=tuple(s.url for s in servers), **config)
    return SGLangServerSampler(
        settings, is_main=True, on_main=lambda fn: fn(), weights_dir=str(folder), max_length=max_length, device=device
    )


def test_completions_are_read(servers, tmp_path):
    sampler = sampler_of(servers, tmp_path)
    sampler.update_weights(iter(WEIGHTS))
    assert sampler.sample([SECOND, FIRST]) == [
        Completion([96, 2], [-4.44, -4.1], True),
        Completion([20, 45, 35, 19], [-4.71, -5.72, -4.49, -5.5], False),
    ]
    assert sampler.log_probs([5, 9, 40, 41]) == [[-4.31, -6.05, -4.81]] * 2


def test_requests_name_everything(servers, tmp_path):
    sampler = sampler_of(servers, tmp_path)
    sampler.update_weights(iter(WEIGHTS))
    sampler.sample([FIRST])
    body = next(body for server in servers for path, body in server.calls if path == "/generate")
    assert body["return_logprob"] is True and body["input_ids"] == [5, 40, 9]
    assert body["sampling_params"] == {
        "max_new_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "sampling_seed": seed_of(FIRST), "stop": ["x"],
        "stop_token_ids": [2], "ignore_eos": False, "no_stop_trim": True, "skip_special_tokens": False,
    }  # fmt: skip
    filtered = SampleRequest([1], 2, SamplingParams(0.7, 9, 0.8, 0.1), SamplingKey())
    fields = sampling_fields(filtered)
    assert [fields[name] for name in ("temperature", "top_k", "top_p", "min_p", "ignore_eos")] == [
        0.7,
        9,
        0.8,
        0.1,
        True,
    ]
    assert sampling_fields(SampleRequest([1], 2, GREEDY, SamplingKey()))["temperature"] == 0


def test_a_hand_over(servers, tmp_path):
    sampler = sampler_of(servers, tmp_path / "weights")
    servers[0].shared.clear()
    sampler.update_weights(iter(WEIGHTS))
    order = [path for _, path in servers[0].shared]
    assert order == ["/pause_generation"] * 2 + ["/update_weights_from_disk"] * 2 + ["/continue_generation"] * 2
    [told] = [body for path, body in servers[0].calls if path == "/update_weights_from_disk"]
    [folder] = (tmp_path / "weights").iterdir()
    assert told == {"model_path": str(folder), "weight_version": folder.name, "flush_cache": True}


@pytest.mark.parametrize("status", [200, 400])
def test_a_hand_over_that_fails_is_undone(servers, tmp_path, status):
    """SGLang's own way back loads the new folder once more, so the old one is named."""
    sampler = sampler_of(servers, tmp_path)
    sampler.update_weights(iter(WEIGHTS))
    version = servers[0].version
    failed = {"success": False, "message": "Failed to update weights: x.\nRolling back to original weights.", "num_paused_requests": 0}  # fmt: skip
    servers[1].faults["/update_weights_from_disk"] = [says(status, failed)]
    with pytest.raises(
        ServerError, match=r"Failed to update weights: x. Rolling back .*no server samples from the new"
    ) as e:
        sampler.update_weights(iter(WEIGHTS))
    assert servers[1].url in str(e.value) and "\n" not in str(e.value)
    assert [server.version for server in servers] == [version] * 2
    assert [server.paths()[-1] for server in servers] == ["/continue_generation"] * 2
    assert len(sampler.sample([FIRST, SECOND])) == 2


def test_adapters_are_named(servers):
    """A load that fails says why; requests name the adapter, and the base has no name."""
    replay, server = servers[0], SGLangServer(HttpClient(servers[0].url, timeout_s=30))
    [models] = [e for e in replay.exchanges if e["path"] == "/v1/models"]
    models["answer"]["data"].append({"id": "mrl-ppo-1", "object": "model", "root": "/w/1", "parent": "tiny"})
    done = {
        "rid": None,
        "http_worker_ipc": None,
        "success": True,
        "error_message": "",
        "loaded_adapters": {"mrl-ppo-1": "/w/1"},
    }
    replay.exchanges += [
        {"method": "POST", "path": f"/{what}_lora_adapter", "status": 200, "answer": done}
        for what in ("load", "unload")
    ]
    server.load_adapter("mrl-ppo-1", "/w/1")
    assert server.adapter_names() == ["mrl-ppo-1"]
    server.complete(FIRST, adapter="mrl-ppo-1")
    server.score([5, 9, 40, 41], adapter="mrl-ppo-1")
    server.complete(FIRST)
    server.unload_adapter("mrl-ppo-1")
    bodies = [body for path, body in replay.calls if path == "/generate"]
    assert [body.get("lora_path") for body in bodies] == ["mrl-ppo-1", "mrl-ppo-1", None]
    assert [body for path, body in replay.calls if "lora" in path] == [
        {"lora_name": "mrl-ppo-1", "lora_path": "/w/1"}, {"lora_name": "mrl-ppo-1"},
    ]  # fmt: skip
    replay.faults["/load_lora_adapter"] = [
        says(400, done | {"success": False, "error_message": "LoRA is not enabled."})
    ]
    with pytest.raises(ServerError, match=f"{replay.url} .*LoRA is not enabled") as caught:
        server.load_adapter("mrl-ppo-2", "/w/2")
    assert "\n" not in str(caught.value) and caught.value.status == 400


class Process:
    """What SGLang 0.5.23's processes do with the endpoints of a link, by its `init_custom_process_group` and
    `FlattenedTensorBucket.empty`, and by sglang_reader.py; they load nothing.

    came: by a broadcast. pickled: by pickles, of which each of `tp` processes reads its own.
    """

    def __init__(self, server: Replay, *, tp: int = 1) -> None:
        self.came: dict[str, torch.Tensor] = {}
        self.pickled: list[list[tuple]] = [[] for _ in range(tp)]
        done = {"success": True, "message": ""}
        for path, act in {
            "/init_weights_update_group": self.join, "/begin_weight_update": lambda body: None,
            "/update_weights_from_distributed": self.receive, "/end_weight_update": lambda body: None,
            "/update_weights_from_tensor": self.read,
            "/destroy_weights_update_group": self.leave, "/flush_cache": lambda body: None,
        }.items():  # fmt: skip
            fault = lambda body, recorded, act=act: (act(body), (200, done))[1]  # noqa: E731
            server.faults[path] = [fault] * 9
        named = lambda body, recorded: (setattr(server, "version", body["new_version"]), (200, {}))[1]  # noqa: E731
        server.faults["/update_weight_version"] = [named] * 9
        server.faults["/server_info"] = [changed(lambda a: a.update(tp_size=tp, dp_size=1, pp_size=1))]

    def join(self, body) -> None:
        store, rank, size = next(
            dist.rendezvous(
                f"tcp://{body['master_address']}:{body['master_port']}", body["rank_offset"], body["world_size"]
            )
        )
        name, timeout = body["group_name"], datetime.timedelta(seconds=30)
        self.group, _ = distributed_c10d._new_process_group_helper(
            size, rank, [], distributed_c10d.Backend(body["backend"]), dist.PrefixStore(name, store),
            group_name=name, timeout=timeout,
        )  # fmt: skip

    def receive(self, body) -> None:
        assert body["load_format"] == "flattened_bucket" and body["flush_cache"] is False
        offset, places = 0, []
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            dtype, shape = getattr(torch, dtype), torch.Size(shape)
            assert offset % dtype.itemsize == 0, f"Unaligned received tensor {name}"
            places.append((name, dtype, shape, offset))
            offset += shape.numel() * dtype.itemsize
        flat = torch.empty(offset, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        self.group._get_backend(torch.device("cpu")).broadcast([flat], options).wait()
        for name, dtype, shape, start in places:
            self.came[name] = flat[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def read(self, body) -> None:
        assert body["load_format"] == "flattened_bucket" and body["flush_cache"] is False
        for mine, payload in zip(self.pickled, body["serialized_named_tensors"], strict=True):
            mine += sglang_reader.read(payload)

    def leave(self, body) -> None:
        del self.group


def test_a_broadcast(servers, tmp_path, monkeypatch):
    """Through a group that is made as SGLang makes it (once in a process): every tensor, and the order of the calls."""
    servers = servers[:1]
    weights = [("a", torch.arange(3, dtype=torch.bfloat16)), ("b", torch.arange(4.0)), ("c", torch.ones(2, 3))]
    processes = [Process(server) for server in servers]
    sampler = sampler_of(servers, tmp_path, handover="broadcast")
    for _ in range(2):
        sampler.update_weights(iter(weights))
        for process in processes:
            assert {n: (t.dtype, t.tolist()) for n, t in process.came.items()} == {
                n: (t.dtype, t.tolist()) for n, t in weights
            }
            process.came.clear()
    assert len(sampler.sample([FIRST, SECOND])) == 2
    calls = [path for path in servers[0].paths() if "weight" in path or path in ("/pause_generation", "/flush_cache")]
    once = ["/pause_generation", "/update_weight_version", "/begin_weight_update"]
    once += ["/update_weights_from_distributed"] * 2  # "b" would begin where no float32 may
    once += ["/end_weight_update", "/flush_cache", "/update_weight_version"]
    assert calls == ["/init_weights_update_group", *once, *once]
    sampler.close()
    assert servers[0].paths()[-1] == "/destroy_weights_update_group"


def as_lists(weights) -> list[tuple]:
    return [(name, str(tensor.dtype), tensor.tolist()) for name, tensor in weights]


def test_cuda_ipc(servers, tmp_path, gpu):
    """Two servers of two processes, each of which reads every tensor once; and a run that broke off before."""
    processes = [Process(server, tp=2) for server in servers]
    sampler = sampler_of(servers, tmp_path, handover="ipc", device=gpu)
    sampler.fleet.handover._bucket_bytes = 40
    open_still = {
        "success": False,
        "message": "a weight-update session is already open; call end_weight_update() first",
    }
    servers[0].faults["/begin_weight_update"].insert(0, says(400, open_still))
    servers[0].calls.clear()
    sampler.update_weights(iter(MIXED))
    for process in processes:
        assert process.pickled == [as_lists(MIXED)] * 2
    calls = [path for path in servers[0].paths() if "_weight" in path or path == "/flush_cache"]
    assert calls == [
        "/update_weight_version", "/begin_weight_update", "/end_weight_update", "/begin_weight_update",
        *["/update_weights_from_tensor"] * 4, "/end_weight_update", "/flush_cache", "/update_weight_version",
    ]  # fmt: skip
    assert servers[0].version == servers[1].version != "incomplete"
    sampler.close()


def test_another_process_reads_a_bucket_at_any_time():
    """By torch's own memory of the host, which it pickles as it does a GPU's. Of two readers one is late."""
    link = PickledLink(CPU, [2])
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        came, late = [], []
        for bucket in links.buckets(iter(MIXED), 40, link.buffer):
            [told] = link.describe(bucket)
            [now, later] = told["pickles"]
            came += pool.apply(sglang_reader.read, (now,))
            late.append(later)
        assert came == as_lists(MIXED)
        assert [part for found in pool.map(sglang_reader.read, late) for part in found] == came


def test_ipc_is_for_a_gpu_and_by_name(servers, tmp_path, gpu):
    """A server does not say which GPUs it sees, and dies where it does not see the trainer's."""
    with pytest.raises(
        ConfigError, match=r'handover: value "ipc" cannot reach http.*memory of a GPU alone; set it to auto or disk'
    ):
        sampler_of(servers, tmp_path, handover="ipc")
    assert sampler_of(servers, tmp_path, handover="auto", device=gpu).handover == "broadcast"
    for server in servers:
        server.faults["/server_info"] = [changed(lambda a: a.update(enable_memory_saver=True))]
    assert sampler_of(servers, tmp_path, handover="auto", device=gpu, sleep=True).handover == "disk"


def test_what_a_group_cannot_reach_is_refused(servers, tmp_path):
    for server in servers:
        server.faults["/server_info"] = [changed(lambda a: a.update(tp_size=2, dp_size=2))]
    sampler = sampler_of(servers, tmp_path, handover="broadcast")
    with pytest.raises(ServerError, match="has dp_size 2.*set rollout.server.handover to disk"):
        sampler.update_weights(iter(WEIGHTS))
    assert "/pause_generation" not in servers[0].paths()


def meta(change):
    return changed(lambda answer: change(answer["meta_info"]))


ODD = {
    "aborted": (
        meta(lambda m: m.update(finish_reason={"type": "abort", "message": "Aborted"}, output_token_logprobs=[])),
        "ended a completion with 'abort'",
    ),
    "no log-probs": (meta(lambda m: m.pop("output_token_logprobs")), "output_ids are not those of output_token_logprobs"),
    "an end of its own": (
        changed(lambda a: (a["output_ids"].__setitem__(1, 3), a["meta_info"]["output_token_logprobs"][1].__setitem__(1, 3))),
        r"ended a completion at token 3, which is none of \[2\]",
    ),
    "refused": (says(400, {"error": {"message": "contains values greater than the vocab size"}}), "HTTP 400: contains values"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_an_odd_answer_is_one_line(servers, tmp_path, case):
    fault, expected = ODD[case]
    sampler = sampler_of(servers[:1], tmp_path)
    sampler.update_weights(iter(WEIGHTS))
    servers[0].faults["/generate"] = [fault]
    with pytest.raises(ServerError, match=expected) as caught:
        sampler.sample([SECOND])
    assert servers[0].url in str(caught.value)


def test_what_is_not_set_up_is_refused(servers, tmp_path):
    with pytest.raises(ServerError, match="cannot sleep; start it with --enable-memory-saver"):
        sampler_of(servers, tmp_path, sleep=True)
    with pytest.raises(ConfigError, match="takes 512 tokens and the longest sequence"):
        sampler_of(servers, tmp_path, max_length=513)


def test_sleep(servers, tmp_path):
    servers[0].faults["/server_info"] = [changed(lambda a: a.update(enable_memory_saver=True))]
    sampler = sampler_of(servers[:1], tmp_path, sleep=True)
    sampler.sleep()
    sampler.wake()
    assert servers[0].paths()[-2:] == ["/release_memory_occupation", "/resume_memory_occupation"]
