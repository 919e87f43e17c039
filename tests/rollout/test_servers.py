"""How servers share requests, what is tried again, what is an error, and the order of a hand-over: on recorded traffic.

The traffic is that of vLLM 0.32.0 (record.py; a real server is in test_vllm.py). The servers here are real HTTP servers that
replay it. Trap 31 (weights that are partly new): `test_no_server_loads_before_all_are_paused` and those after it.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import pickle

import pytest
import torch
import torch.distributed as dist

from mrl.config.ppo import ServerConfig
from mrl.engine.base import BaseEngine
from mrl.engine.sampling import SamplingKey, SamplingParams
from mrl.errors import ConfigError, ServerError
from mrl.rollout import http
from mrl.rollout.fleet import Probe
from mrl.rollout.handover import WeightFolders, weights_dir
from mrl.rollout.server import Server, seed_of
from mrl.rollout.vllm import VLLMServer, refuse
from mrl.weights.safetensors_io import SafetensorsReader
from tests.engine.harness import run_case
from tests.rollout.real_vllm import sampler_of
from tests.rollout.record import OUT_OF_VOCABULARY, SCORED, asked
from tests.rollout.replay import TRAFFIC, WEIGHTS, changed, hang_up, says

COMPLETIONS, LOAD = "/v1/completions", "/collective_rpc"
BUSY = says(503, {"error": {"message": "later"}})
BROKEN = says(500, {"error": {"message": "Call to collective_rpc\nmethod failed"}})


def recorded():
    """The completions that were recorded, read from the file by hand."""
    exchanges = json.loads((TRAFFIC / "vllm.json").read_text())
    choices = [e["answer"]["choices"][0] for e in exchanges if e["path"] == COMPLETIONS and e["status"] == 200]
    return [
        (c["token_ids"], c["logprobs"]["token_logprobs"], c["finish_reason"] == "stop")
        for c in choices
        if c["token_ids"]
    ]


def test_servers_share_the_requests(two):
    """Each of the two has at most `concurrency` at a time, both work, and the order is that of the requests."""
    servers, sampler = two
    for server in servers:
        server.delay_s, server.together = 0.03, 0
    completions = sampler.sample(asked()[::-1])[::-1]
    assert [(c.tokens, c.log_probs, c.finished) for c in completions] == recorded()
    assert {c.finished for c in completions} == {True, False}
    assert [server.together for server in servers] == [2, 2]
    assert sum(server.paths().count(COMPLETIONS) for server in servers) == 6
    assert sampler.sample([]) == []


def test_a_busy_server_is_asked_again(two):
    servers, sampler = two
    servers[0].faults[COMPLETIONS] = [BUSY, hang_up, BUSY]
    servers[1].faults[COMPLETIONS] = [hang_up]
    assert [c.tokens for c in sampler.sample(asked())] == [tokens for tokens, _, _ in recorded()]
    assert sum(server.paths().count(COMPLETIONS) for server in servers) == 6 + 4


def test_no_answer_in_time_is_an_error(replay, tmp_path):
    server = replay()
    sampler = sampler_of([server.url], str(tmp_path), timeout_s=0.5)
    sampler.update_weights(iter(WEIGHTS))
    server.faults[COMPLETIONS] = [server.hang] * 100
    with pytest.raises(ServerError, match=r"gave no answer in 0.5 s; raise rollout.server.timeout_s, or see its log$"):
        sampler.sample(asked()[:1])
    assert server.paths().count(COMPLETIONS) == 1


def test_a_server_that_hangs_at_the_start_is_an_error_within_a_minute(replay, tmp_path, monkeypatch):
    """Whatever a rollout may take."""
    assert Server.start_s < 60 and http.CONNECT_S * http.TRIES < 60
    monkeypatch.setattr(Server, "start_s", 0.3)
    server = replay()
    server.faults["/v1/models"] = [server.hang]
    with pytest.raises(ServerError, match=r"/v1/models gave no answer in 0.3 s; see its log$"):
        sampler_of([server.url], str(tmp_path), timeout_s=600)


def test_what_a_server_refuses_is_not_asked_again(two):
    servers, sampler = two
    with pytest.raises(ServerError, match=r"says HTTP 400: Token id 7000 is out of vocabulary; see its log$") as caught:
        sampler.sample([OUT_OF_VOCABULARY])
    assert caught.value.status == 400 and pickle.loads(pickle.dumps(caught.value)).status == 400
    assert sum(server.paths().count(COMPLETIONS) for server in servers) == 1


def choice(change):
    return changed(lambda answer: change(answer["choices"][0]))


ODD_ANSWERS = {
    "no JSON": (says(200, b"<html>hello</html>"), r"answered otherwise than expected \(TypeError"),
    "nothing": (says(200, b""), "answered otherwise than expected"),
    "another form": (says(200, {"choices": []}), r"answered otherwise than expected \(IndexError"),
    "a log-prob is missing": (choice(lambda c: c["logprobs"]["token_logprobs"].pop()), "gave 4 tokens and 3 log-probs"),
    "not finite": (choice(lambda c: c["logprobs"]["token_logprobs"].__setitem__(1, float("nan"))), "is not finite"),
    "aborted": (choice(lambda c: c.update(finish_reason="abort")), "ended a completion with 'abort'"),
    "cut short": (
        choice(lambda c: (c["token_ids"].pop(), c["logprobs"]["token_logprobs"].pop())),
        "ended a completion after 3 of 4 tokens; start it with room for 7 tokens",
    ),
    "an end of its own": (choice(lambda c: c.update(finish_reason="stop")), r"ended a completion at token \d+, which is none of \[2\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD_ANSWERS)
def test_an_odd_answer_is_one_line(two, case):
    servers, sampler = two
    fault, expected = ODD_ANSWERS[case]
    for server in servers:
        server.faults[COMPLETIONS] = [fault]
    with pytest.raises(ServerError, match=expected) as caught:
        sampler.sample(asked()[:1])
    assert any(server.url in str(caught.value) for server in servers) and "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------- new weights


def steps(servers):
    """(server, what it was told) of a hand-over, in order."""
    words = {"/pause?mode=wait": "pause", LOAD: "load", "/reset_prefix_cache": "reset", "/update_weight_version": "name", "/resume": "resume"}  # fmt: skip
    return [(name, words[path]) for name, path in servers[0].shared if path in words]


def loaded(server) -> list[str]:
    return [body["kwargs"]["weights_path"] for path, body in server.calls if path == LOAD]


def test_no_server_loads_before_all_are_paused(two, tmp_path):
    servers, sampler = two
    servers[1].delay_s = 0.05
    sampler.update_weights(iter(WEIGHTS))
    order = [what for _, what in steps(servers)]
    assert order[:2] == ["pause"] * 2 and order[-2:] == ["resume"] * 2
    assert [w for n, w in steps(servers) if n == "0"] == ["pause", "load", "reset", "name", "resume"]
    assert loaded(servers[0]) == loaded(servers[1]) and servers[0].version == servers[1].version
    folder = pathlib.Path(loaded(servers[0])[0])
    assert list((tmp_path / "weights").iterdir()) == [folder] and folder.name == servers[0].version
    with SafetensorsReader(folder) as reader:
        assert {name: reader(name)[()].tolist() for name in reader.tensors} == {n: t.tolist() for n, t in WEIGHTS}


@pytest.mark.parametrize("broken", [LOAD, "/reset_prefix_cache", "/update_weight_version"])
def test_where_one_cannot_load_all_go_back(two, tmp_path, broken):
    servers, sampler = two
    old, version = sampler.fleet.handover._loaded[sampler.fleet._servers[0]]
    servers[1].faults[broken] = [says(200, {"success": False}) if "reset" in broken else BROKEN]
    with pytest.raises(
        ServerError, match="no server samples from the new weights; rollout.server.weights_dir"
    ) as caught:
        sampler.update_weights(iter(WEIGHTS))
    assert servers[1].url in str(caught.value) and "\n" not in str(caught.value)
    for server in servers:
        assert loaded(server)[-1] == old and server.version == version and server.paths()[-1] == "/resume"
    assert list((tmp_path / "weights").iterdir()) == [pathlib.Path(old)]
    assert len(sampler.sample(asked())) == 6


def test_at_first_they_go_back_to_what_they_were_started_with(replay, tmp_path):
    servers = [replay(), replay()]
    sampler = sampler_of([s.url for s in servers], str(tmp_path / "weights"))
    servers[0].faults[LOAD] = [BROKEN]
    with pytest.raises(ServerError, match="no server samples from the new weights"):
        sampler.update_weights(iter(WEIGHTS))
    assert [loaded(server)[-1] for server in servers] == ["/models/model"] * 2
    assert not list((tmp_path / "weights").iterdir())
    with pytest.raises(AssertionError, match="update_weights comes before sample"):
        sampler.sample(asked())


def test_one_that_cannot_go_back_stays_paused(two):
    servers, sampler = two
    servers[1].faults[LOAD] = [BROKEN, BROKEN]
    with pytest.raises(
        ServerError, match=rf"; {servers[1].url} cannot go back, take\(s\) no requests, and must be started again"
    ):
        sampler.update_weights(iter(WEIGHTS))
    assert "/resume" not in servers[1].paths() and servers[0].paths()[-1] == "/resume"


def test_one_that_cannot_be_paused_stops_the_hand_over(two, tmp_path):
    servers, sampler = two
    servers[1].faults["/pause?mode=wait"] = [says(500, {"error": "Failed to pause generation"})]
    with pytest.raises(ServerError, match="says HTTP 500: Failed to pause generation"):
        sampler.update_weights(iter(WEIGHTS))
    assert loaded(servers[0]) == loaded(servers[1]) == [] and servers[0].paths()[-1] == "/resume"
    assert len(list((tmp_path / "weights").iterdir())) == 1


@pytest.mark.parametrize("off", [0.0, 0.02])
def test_the_probe_is_asked_after_every_hand_over(replay, tmp_path, off):
    server = replay()
    choices = [e["answer"]["choices"][0] for e in server.exchanges if e["path"] == COMPLETIONS and e["status"] == 200]
    told = next(c["prompt_logprobs"] for c in choices if c["prompt_logprobs"])
    expected = [told[i][str(token)]["logprob"] + off for i, token in enumerate(SCORED) if i]
    sampler = sampler_of([server.url], str(tmp_path), probe=Probe(SCORED, lambda tokens: expected, tolerance=0.01))
    if off:
        with pytest.raises(ServerError, match=r"differ from the trainer's by 0.02 per token"):
            sampler.update_weights(iter(WEIGHTS))
    else:
        sampler.update_weights(iter(WEIGHTS))
        assert sampler.log_probs(SCORED) == [pytest.approx(expected)]


def ranks_share(url: str, folder: str) -> list:
    """A case for two ranks: the second one talks to no server, takes part in the stream, and gets results and errors."""
    rank, read = dist.get_rank(), []
    on_main = lambda fn: BaseEngine.on_main(type("Rank", (), {"is_main": rank == 0}), fn)  # noqa: E731

    def stream():
        for name, tensor in WEIGHTS:
            dist.barrier()  # a rank that leaves the stream early would hang the other
            read.append(name)
            if rank == 0:
                yield name, tensor

    sampler = sampler_of([url if rank == 0 else "http://127.0.0.1:9"], folder, is_main=rank == 0, on_main=on_main)
    sampler.update_weights(stream())
    completions = sampler.sample(asked())
    assert read == ["a", "b.c"] and on_main(lambda: completions) == completions
    with pytest.raises(ServerError, match="out of vocabulary"):
        sampler.sample([OUT_OF_VOCABULARY])
    if rank == 0:
        sampler.fleet.handover._folders = WeightFolders("/dev/null/weights", bucket_mb=1)
    with pytest.raises(ServerError, match="rollout.server.weights_dir: /dev/null/weights cannot be written"):
        sampler.update_weights(stream())
    assert read == ["a", "b.c"] * 2
    return [c.tokens for c in completions]


def test_every_rank_gets_completions_and_errors(replay, tmp_path):
    case = "tests.rollout.test_servers:ranks_share"
    tokens = run_case(2, case, url=replay().url, folder=str(tmp_path))
    assert tokens == [tokens for tokens, _, _ in recorded()]


def test_weights_are_written_in_buckets(tmp_path):
    """No more than a bucket is held; one buffer may carry all tensors; what an earlier start left goes, and nothing else."""
    (tmp_path / "00000007-0123abcd").mkdir()
    (tmp_path / "mine").mkdir()
    folders = WeightFolders(str(tmp_path), bucket_mb=1)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    buffer = torch.empty(100_000)  # 0.4 MB
    count = 7

    def stream():
        for i in range(count):
            files = len(list(tmp_path.rglob("*.safetensors")))
            assert files == max(0, (i - 1)) // 2  # two fit a bucket, and the third writes it
            yield f"t{i}", buffer.fill_(i)
        yield "large", torch.full((500_000,), 9.0)

    folder, shapes = folders.write(stream())
    assert len(list(folder.glob("*.safetensors"))) == 5 and shapes["large"] == (500_000,)
    with SafetensorsReader(folder) as reader:
        for i, name in itertools.chain(((i, f"t{i}") for i in range(count)), [(9, "large")]):
            assert reader(name)[()].unique().tolist() == [i]
    other, _ = folders.write(iter(WEIGHTS))
    assert other != folder and {p.name for p in tmp_path.iterdir()} == {"mine", folder.name, other.name}
    folders.keep_only(other)
    assert {p.name for p in tmp_path.iterdir()} == {"mine", other.name}


def test_each_run_has_a_folder_of_its_own(tmp_path):
    config = ServerConfig(weights_dir=str(tmp_path))
    folders = {weights_dir(config, str(tmp_path / run)) for run in ("a", "b")}
    assert len(folders) == 2 and all(pathlib.Path(f).parent == tmp_path for f in folders)
    default = ServerConfig()
    assert weights_dir(default, str(tmp_path / "a")) == str(tmp_path / "a" / "rollout_weights")


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://"])
def test_a_url_that_is_none_is_refused(url, tmp_path):
    with pytest.raises(
        ConfigError, match=r"rollout.server.urls: value .* is not a server; write it as http://host:8000"
    ):
        sampler_of([url], str(tmp_path))


SETUPS = {
    "no developer mode": ({"/server_info?config_format=json": says(404, {"detail": "Not Found"})}, "VLLM_SERVER_DEV_MODE=1"),
    "an older vLLM": ({"/weight_info": says(404, {"detail": "Not Found"})}, "start vLLM 0.32.0 or newer"),
    "another server": ({"/v1/models": says(404, b"File not found")}, "says HTTP 404: File not found"),
    "log-probs that are logits": (
        {"/server_info?config_format=json": changed(lambda a: a["vllm_config"]["model_config"].update(logprobs_mode="raw_logits"))},
        "gives raw_logits; start it with --logprobs-mode raw_logprobs or processed_logprobs",
    ),
    "too short": (
        {"/v1/models": changed(lambda a: a["data"][0].update(max_model_len=300))},
        r"takes 300 tokens and the longest sequence \(data.max_prompt_length \+ rollout.max_new_tokens\) has 512",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SETUPS)
def test_a_server_that_is_not_set_up_is_refused(replay, tmp_path, case):
    server = replay()
    faults, expected = SETUPS[case]
    server.faults = {path: [fault] for path, fault in faults.items()}
    with pytest.raises((ServerError, ConfigError), match=expected) as caught:
        sampler_of([server.url], str(tmp_path))
    assert server.url in str(caught.value) and "\n" not in str(caught.value)


def test_only_servers_that_can_sleep_are_put_to_sleep(replay, tmp_path):
    server = replay()
    with pytest.raises(ServerError, match="cannot sleep; start it with --enable-sleep-mode"):
        sampler_of([server.url], str(tmp_path), sleep=True)
    can = changed(lambda a: a["vllm_config"]["model_config"].update(enable_sleep_mode=True))
    server.faults["/server_info?config_format=json"] = [can]
    sampler = sampler_of([server.url], str(tmp_path), sleep=True)
    for path in ("/sleep?level=1&mode=wait", "/wake_up"):
        server.exchanges.append({"method": "POST", "path": path, "body": None, "status": 200, "answer": {}})
    server.calls.clear()
    sampler.update_weights(iter(WEIGHTS))
    sampler.sleep()
    sampler.sleep()
    sampler.update_weights(iter(WEIGHTS))
    sampler.wake()
    slept = [path for path in server.paths() if "sleep" in path or "wake" in path]
    assert slept == ["/sleep?level=1&mode=wait", "/wake_up"]
    paths = server.paths()
    assert paths.index("/wake_up") < len(paths) - 1 - paths[::-1].index("/pause?mode=wait")


RIGHT = {
    "raw_logprobs": [SamplingParams(), SamplingParams(top_k=5, top_p=0.5, min_p=0.1), SamplingParams(0.0, top_k=5)],
    "processed_logprobs": [SamplingParams(), SamplingParams(0.7), SamplingParams(1.5), SamplingParams(0.0, top_k=5)],
}
WRONG = {
    "raw_logprobs": [(SamplingParams(0.7), "--logprobs-mode processed"), (SamplingParams(0.7, top_k=5), "both")],
    "processed_logprobs": [(SamplingParams(top_k=5), "--logprobs-mode raw"), (SamplingParams(0.7, min_p=0.1), "both")],
}


@pytest.mark.parametrize("mode", RIGHT)
def test_only_raw_log_probs_at_the_temperature_are_taken(mode):
    for sampling in RIGHT[mode]:
        refuse(sampling, mode, "rollout.server.urls", "it")
    for sampling, expected in [*WRONG[mode], (SamplingParams(0.001), "0.001 is below")]:
        with pytest.raises(ConfigError, match=expected):
            refuse(sampling, mode, "rollout.server.urls", "it")


def test_seeds_follow_from_keys_and_lengths():
    first = asked()[0]
    others = [
        first.__class__(first.tokens, 4, first.sampling, SamplingKey(*key))
        for key in itertools.product((0, 1), repeat=4)
    ]
    longer = first.__class__([*first.tokens, 3], 4, first.sampling, first.key)
    seeds = {seed_of(r) for r in [first, longer, *others]}
    assert len(seeds) == 18 and all(0 <= seed < 2**63 for seed in seeds)


def test_nothing_is_left_to_a_servers_own_defaults(two):
    """vLLM fills in what a request leaves out from the model's generation_config.json."""
    servers, sampler = two
    sampler.sample(asked()[:1])
    body = next(body for server in servers for path, body in server.calls if path == COMPLETIONS)
    defaults = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    assert all(body[name] is not None for name in (*defaults, "max_tokens", "seed", "stop_token_ids"))
    assert body["ignore_eos"] and isinstance(sampler.fleet._servers[0], VLLMServer)
