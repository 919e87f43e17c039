"""Adapters alone for inference servers (rollout.server.lora): against a real vLLM on the CPU (slow tier), and what is refused.

vLLM lives in a venv of its own (tests/rollout/test_vllm.py). Log-probs with the adapter have the bounds of merged weights.
Trap 31 (weights that are partly new): `test_all_servers_have_the_new_adapters_or_none`.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import types
import urllib.request
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl import metrics
from mrl.config.load import from_dict
from mrl.config.ppo import PPOConfig
from mrl.config.schema import LoraConfig
from mrl.engine.lora.folder import adapters, read_adapter
from mrl.engine.lora.shapes import adapter_shapes
from mrl.engine.sampling import GREEDY, SamplingParams
from mrl.errors import ConfigError, ServerError
from mrl.rollout.adapters import PREFIX, AdapterTraining, AdapterWeightSync
from mrl.rollout.server import ServerGroup
from mrl.trainers import ppo
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.rollout.real_vllm import (
    FIRST_REQUEST_S,
    TEXT,
    RealServer,
    adapter_server,
    make_model,
    requests,
    sampler_of,
)
from tests.rollout.test_vllm_local import config_of

LORA = LoraConfig(rank=4, alpha=64.0)


def tensors(model: str, lora: LoraConfig, seed: int) -> dict[str, torch.Tensor]:
    """Adapters of random A and B."""
    generator = torch.Generator().manual_seed(seed)
    shapes = adapter_shapes(adapters(model, lora, "lm"), "lm", 0)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


# --------------------------------------------------------------------------------------------------- a real server


@pytest.fixture
def vllm():
    server = adapter_server()
    for name in listed(server):
        tell(server, "/v1/unload_lora_adapter", lora_name=name)
    return server


@pytest.fixture
def model(vllm) -> str:
    return vllm.model


def listed(server: RealServer) -> list[str]:
    with urllib.request.urlopen(f"{server.url}/v1/models") as answer:
        return [one["id"] for one in json.load(answer)["data"][1:]]


def tell(server: RealServer, path: str, **body: str) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}{path}", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request).close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, parallel, ranks, lora",
    [
        ("fsdp", {}, 2, LORA),
        pytest.param(
            "megatron", {"tp": 2}, 2, LoraConfig(rank=8, rslora=True, target_modules=("q_proj", "v_proj", "down_proj")),
            marks=pytest.mark.nightly,
        ),
    ],
)  # fmt: skip
def test_log_probs_are_those_of_the_actor(model, vllm, tmp_path, backend, parallel, ranks, lora):
    """Before training and after each of two steps; the server has the newest adapters alone, and no files are left."""
    config = tiny.role(model, backend=backend, parallel=parallel, model={"lora": lora})
    run_case(
        ranks, "tests.rollout.real_vllm:adapters_follow_the_actor", timeout_s=FIRST_REQUEST_S, config=config,
        url=vllm.url, weights_dir=str(tmp_path / "weights"),
    )  # fmt: skip
    assert listed(vllm) == [] and list((tmp_path / "weights").iterdir()) == []


@pytest.mark.slow
def test_a_server_that_lost_the_adapters_is_an_error_and_gets_them_again(model, vllm, tmp_path):
    folder = tmp_path / "weights"
    sampler = sampler_of([vllm.url], str(folder), adapted=AdapterTraining(model, LORA))
    sampler.update_weights(iter(tensors(model, LORA, 0).items()))
    expected = sampler.log_probs(TEXT)[0]
    [name] = listed(vllm)
    tell(vllm, "/v1/unload_lora_adapter", lora_name=name)
    with pytest.raises(ServerError, match=rf"says HTTP 404: .*`{name}` does not exist"):
        sampler.sample(requests(GREEDY))
    tell(vllm, "/update_weight_version", new_version="default")  # what a new process says
    with pytest.raises(ServerError, match=f"has the weights 'default' and not '{name}' .* started again"):
        sampler.sample(requests(GREEDY))
    sampler.update_weights(iter(tensors(model, LORA, 0).items()))
    assert sampler.log_probs(TEXT)[0] == expected
    sampler.sample(requests(SamplingParams()))

    killed, left = sampler, listed(vllm)
    sampler = sampler_of([vllm.url], str(folder), adapted=AdapterTraining(model, LORA))  # the same run, after a kill
    assert listed(vllm) == [] and not list(folder.iterdir()) and len(left) == 1
    sampler.update_weights(iter(tensors(model, LORA, 0).items()))
    assert sampler.log_probs(TEXT)[0] == expected and len(list(folder.iterdir())) == 1
    with pytest.raises(ServerError, match="another run uses it"):
        killed.sample(requests(GREEDY))
    sampler.close()
    assert listed(vllm) == [] and not list(folder.iterdir())


@pytest.mark.nightly
def test_rollouts_of_several_iterations_name_their_own_adapters(model, vllm, tmp_path):
    """Two iterations ahead: log-probs are those of transformers with the weights of the rule, and of no others."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"w{5 + i} w{9 + i}"}) + "\n" for i in range(4)))
    run = tmp_path / "run"
    config = config_of(tmp_path, run, "fsdp", urls=[vllm.url], lora="adapter", weights_dir=str(tmp_path / "w"))
    config["actor"]["model"] |= {"path": model, "lora": {"rank": 4}}
    config["actor"]["optimizer"]["lr"] = 3e-2
    config["rollout"] |= {"temperature": 1.0, "async_level": 2}
    config["train"]["steps"] = 5
    config |= {"checkpoint": {"every": 1, "keep": 10}, "log": {"samples": {"every": 1, "tokens": True}}}
    ppo.run(from_dict(config, PPOConfig), "mrl ppo")
    gaps = []
    for step in range(1, 6):
        made = max(0, step - 3)
        out = str(tmp_path / f"at{made}") if made else model
        if made:
            run_case(1, "tests.trainers.rl.test_launched:exported", run=str(run), step=made, out=out)
        policy = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        for line in (run / "samples" / f"step_{step:08d}.jsonl").read_text().splitlines():
            row = json.loads(line)
            log_probs = policy(torch.tensor([row["tokens"]])).logits[0, :-1].log_softmax(-1)
            found = log_probs.gather(1, torch.tensor(row["tokens"])[1:, None])[:, 0]
            trained = torch.tensor(row["mask"][1:], dtype=torch.bool)
            gaps.append((found - torch.tensor(row["log_probs"])[1:])[trained].abs().max().item())
    assert max(gaps) < 1e-4, gaps
    rows = [row for row in metrics.read(run / "metrics.jsonl") if "rollout/staleness" in row]
    assert [row["rollout/weights_step"] for row in rows] == [0, 0, 0, 1, 2]
    assert rows[-1]["rollout/logprob_gap_max"] > 1e-2, "the trainer's weights were others"
    assert listed(vllm) == []


@pytest.mark.slow
def test_what_the_server_does_not_take_is_said_at_the_start(model, vllm, tmp_path):
    other = make_model(str(tmp_path / "other"), seed=1)
    with pytest.raises(ServerError, match=f"serves {model} with other weights than those of actor.model.path"):
        sampler_of([vllm.url], str(tmp_path / "w"), adapted=AdapterTraining(other, LORA))
    with pytest.raises(ConfigError, match="cannot be with the adapters of down_proj .*max_lora_rank 8"):
        sampler_of([vllm.url], str(tmp_path / "w"), adapted=AdapterTraining(model, LoraConfig(rank=16)))
    tell(vllm, "/update_weight_version", new_version="00000001-abcdef01")  # a run that handed merged weights over
    try:
        with pytest.raises(ServerError, match="has a run's weights .* start it again"):
            sampler_of([vllm.url], str(tmp_path / "w"), adapted=AdapterTraining(model, LORA))
    finally:
        tell(vllm, "/update_weight_version", new_version="default")
    assert listed(vllm) == []


# ------------------------------------------------------------------------------------------------ servers that note


class Noted:
    """A server in this process that notes what it is asked, and has the adapters' tensors. refuses: loads that fail, by number."""

    path, how_to_adapt = "/nowhere", "--enable-lora"

    def __init__(self, url: str, *, deaf_to: str = "", refuses: frozenset[int] = frozenset(), **about) -> None:
        self.http = types.SimpleNamespace(
            url=url, error=lambda text, status=None: ServerError(text, status=status),
            abort_requests=lambda: None, allow_requests=lambda: None,
        )  # fmt: skip
        self.pauses = True  # before it gets another version
        self.adapters_on = about.get("adapters_on", True)
        self.deaf_to, self.refuses, self.loads = deaf_to, refuses, itertools.count()
        self.has: dict[str, dict[str, torch.Tensor]] = {}
        self.paused, self.called, self.scores = False, "default", itertools.count()

    def version(self) -> str:
        return self.called

    def set_version(self, version: str) -> None:
        assert self.paused == self.pauses
        self.called = version

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def adapter_names(self) -> list[str]:
        return list(self.has)

    def load_adapter(self, name: str, folder: str) -> None:
        if next(self.loads) in self.refuses:
            raise ServerError(f"{self.http.url} says HTTP 500: no such module", status=500)
        self.has[name] = read_adapter(folder)[1]

    def unload_adapter(self, name: str) -> None:
        if self.has.pop(name, None) is None:
            raise ServerError(f"{self.http.url} says HTTP 404: no {name}", status=404)

    def score(self, tokens, *, adapter: str | None = None) -> list[float]:
        assert not self.paused, "it answers when it goes on"
        of = (
            []
            if adapter is None
            else [
                t.abs().sum().item() for n, t in self.has[adapter].items() if not self.deaf_to or self.deaf_to not in n
            ]
        )
        noise = 1e-3 * next(self.scores) * bool(self.deaf_to)  # as of a GPU's kernels
        return [sum(of) + noise] * (len(tokens) - 1)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> str:
    return tiny.make_model(str(tmp_path_factory.mktemp("dense")), "qwen3", seed=0)


def handover(
    dense: str, folder: pathlib.Path, *servers: Noted, lora: LoraConfig = LORA, in_use: Any = None
) -> AdapterWeightSync:
    return AdapterWeightSync(ServerGroup(servers), str(folder), AdapterTraining(dense, lora), in_use=in_use)


def test_all_servers_have_the_new_adapters_or_none(dense, tmp_path):
    kinds = len({name.rpartition(".")[2] for name in adapters(dense, LORA, "lm")})
    servers = [Noted("http://a"), Noted("http://b", refuses=frozenset({kinds + 1}))]  # the second hand-over's
    way = handover(dense, tmp_path, *servers)
    assert kinds == 7 and not list(tmp_path.iterdir()) and servers[0].has == servers[1].has == {}
    first = tensors(dense, LORA, 0)
    name = way.send(iter(first.items()))
    for server in servers:
        assert server.called == name and name.startswith(PREFIX) and not server.paused and list(server.has) == [name]
        assert all(torch.equal(server.has[name][n], t) for n, t in first.items()) and len(server.has[name]) == len(
            first
        )
    with pytest.raises(ServerError, match="no such module; no server samples with the new adapters"):
        way.send(iter(tensors(dense, LORA, 1).items()))
    assert all(list(s.has) == [name] and s.called == name and not s.paused for s in servers)
    assert [folder.name for folder in tmp_path.iterdir()] == [name.removeprefix(PREFIX)]
    later = way.send(iter(tensors(dense, LORA, 2).items()))
    assert all(list(s.has) == [later] and s.called == later and not s.paused for s in servers)
    assert [folder.name for folder in tmp_path.iterdir()] == [later.removeprefix(PREFIX)]
    way.close()
    assert servers[0].has == servers[1].has == {} and not list(tmp_path.iterdir())


def test_adapters_that_requests_name_stay_and_nothing_is_paused(dense, tmp_path):
    in_use: set[str] = set()
    server = Noted("http://a")
    way = handover(dense, tmp_path, server, in_use=lambda: in_use)
    server.pauses = False
    first, second = (way.send(iter(tensors(dense, LORA, seed).items())) for seed in (0, 1))
    assert list(server.has) == [second] and server.called == second
    in_use.add(second)
    third = way.send(iter(tensors(dense, LORA, 2).items()))
    assert list(server.has) == [second, third] and {PREFIX + f.name for f in tmp_path.iterdir()} == {second, third}


@pytest.mark.parametrize(
    "server, says",
    [
        (Noted("http://a", adapters_on=False), 'rollout.server.lora: value "adapter" needs servers that take adapters, and http://a was started without; start it with --enable-lora, or set it to merged'),
        (Noted("http://a", refuses=frozenset({0})), 'rollout.server.lora: value "adapter" cannot be with the adapters of down_proj (http://a says HTTP 500: no such module); name other modules in actor.model.lora.target_modules, or set it to merged'),
        (Noted("http://a", deaf_to="o_proj"), 'rollout.server.lora: value "adapter" cannot be with the adapters of o_proj (http://a takes them, and its log-probs are those of the base); name other modules in actor.model.lora.target_modules, or set it to merged'),
    ],
)  # fmt: skip
def test_a_server_that_will_not_do_is_one_line_at_the_start(dense, tmp_path, server, says):
    with pytest.raises(ConfigError) as caught:
        handover(dense, tmp_path, server)
    assert str(caught.value) == says
    assert server.has == {} and not server.paused and not list(tmp_path.iterdir())


def test_experts_get_merged_weights(tmp_path):
    folder = tiny.make_model(str(tmp_path / "model"), "qwen3_moe", seed=0)
    with pytest.raises(ConfigError) as caught:
        handover(folder, tmp_path / "w", Noted("http://a"))
    assert 'actor.model.lora.target_modules: value "all-linear" takes in model.layers.0.mlp.' in str(caught.value)
    assert str(caught.value).endswith(
        "name linear layers outside of experts alone, or set rollout.server.lora to merged"
    )
    handover(folder, tmp_path / "w", Noted("http://a"), lora=LoraConfig(rank=2, target_modules=("q_proj", "o_proj")))
