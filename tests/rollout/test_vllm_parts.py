"""vLLM inside the trainer, as far as that needs no vLLM: the order of a hand-over, how requests are shared, what comes when
an engine fails, and what of the process is the trainer's. Real engines are in test_vllm_local.py (slow tier).

The stand-in keeps the rules of vLLM's GPU worker: which memory is there, and that sleep at level 2 loses the weights.
"""

from __future__ import annotations

import os
import random
import types

import numpy
import pytest
import torch

from mrl.commands.ppo import COMMAND
from mrl.config.load import from_dict
from mrl.config.ppo import PPOConfig, ServerConfig
from mrl.config.ppo_checks import check_inside
from mrl.engine import collective
from mrl.engine.atomic_checkpoint import RankGroup
from mrl.errors import ConfigError, ServerError
from mrl.parallel import ParallelDims
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.base import Sampler
from mrl.rollout.vllm_local import IsolatedState, engine_arguments
from mrl.rollout.vllm_start import import_vllm
from mrl.trainers.rl import samplers
from mrl.trainers.rl.samplers import SyncedSampler
from tests.engine.harness import run_case
from tests.rollout import stand_in_vllm

CPU = torch.device("cpu")
PLAIN = {
    "output_dir": "x", "actor": {"model": {"path": "m"}}, "algorithm": {"name": "grpo"}, "rewards": {"functions": [{"name": "gsm8k"}]},
    "data": {"train": "d"}, "train": {"steps": 1, "global_batch_size": 8},
}  # fmt: skip


def config_of(**rollout) -> PPOConfig:
    return from_dict({**PLAIN, "rollout": {"backend": "vllm", **rollout}}, PPOConfig)


# ------------------------------------------------------------------------------------------------- order of a hand-over


class Recorded(Sampler):
    """Writes down what a run asks of its sampler, and of its roles (`offload_all`, `hf_weights`)."""

    everywhere = True

    def __init__(self, *, forgets: bool, fails: bool = False) -> None:
        self.events: list[str] = []
        self._forgets, self._fails = forgets, fails

    @property
    def forgets(self) -> bool:
        return self._forgets

    def sample(self, requests):
        self.events.append("sample")
        return []

    def update_weights(self, weights):
        self.events += [f"weights {list(weights)}"]
        if self._fails:
            raise ServerError("cannot load")

    def sleep(self):
        self.events.append("sleep")

    def wake(self):
        self.events.append("wake")

    def offload_all(self):
        self.events.append("roles away")

    def hf_weights(self, role, *, everywhere):
        return iter([role, everywhere])


@pytest.mark.parametrize("forgets", [True, False])
def test_the_rest_of_the_memory_wakes_after_the_actor_was_put_away(forgets, monkeypatch):
    sampler = Recorded(forgets=forgets)
    monkeypatch.setattr(samplers.time, "perf_counter", lambda: float(len(sampler.events)))
    sampling = SyncedSampler(sampler, sampler)  # type: ignore[arg-type]
    for step in (0, 0, 1):
        with sampling(step):
            sampler.sample([])
    whole = ["roles away", "weights ['actor', True]", "roles away", "wake", "sample", "sleep"]
    again = whole if forgets else ["roles away", "wake", "sample", "sleep"]
    assert sampler.events == [*whole, *again, *whole]
    assert sampling.take_seconds() == 4 + (4 if forgets else 2) + 4, "what comes before a sample"
    assert sampling.take_seconds() == 0.0
    sampler.exact = True
    assert SyncedSampler(sampler, sampler).take_seconds() is None  # type: ignore[arg-type]


def test_a_hand_over_that_fails_wakes_nothing_more_and_sleeps():
    sampler = Recorded(forgets=True, fails=True)
    with pytest.raises(ServerError), SyncedSampler(sampler, sampler)(0):  # type: ignore[arg-type]
        raise AssertionError("it samples")
    assert sampler.events == ["roles away", "weights ['actor', True]", "sleep"]


@pytest.mark.parametrize("offload_idle, moved", [(True, ["to host"]), (False, [])])
def test_a_gpus_free_blocks_are_given_back_for_another_program(monkeypatch, offload_idle, moved):
    """Where roles stay on it too: torch would keep what their last step has freed, and vLLM could not have it."""
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty cache"))
    offload = types.SimpleNamespace(wait=lambda: None)
    engine = types.SimpleNamespace(
        device=torch.device("cuda"), to=lambda where: events.append(f"to {where}"), offload=offload
    )
    WorkerDispatch({"actor": engine}, offload_idle=offload_idle).offload_all()  # type: ignore[dict-item]
    assert events == [*moved, "empty cache"]


def test_the_engine_is_made_asleep_and_takes_weights_before_its_cache():
    calls = run_case(2, "tests.rollout.test_vllm_parts:calls_of_an_engine")
    hand_over = ["wake weights", "load", "wake kv_cache", "generate"]
    assert calls == ["made", "sleep 2", *hand_over, "generate", "sleep 2", *hand_over]


def calls_of_an_engine() -> list[str]:
    from tests.rollout.vllm_cases import requests, sampler_of, stream

    with stand_in_vllm.installed() as vllm:
        sampler = sampler_of()
        sampler.sleep()  # asleep already
        with pytest.raises(ServerError, match="has no weights"):
            sampler.wake()
        sampler.update_weights(stream(1.0))
        sampler.sample(requests(2))
        sampler.sample(requests(2))
        sampler.sleep()
        with pytest.raises(ServerError, match="has no weights"):
            sampler.sample(requests(2))
        sampler.update_weights(stream(1.0))
        sampler.wake()
        sampler.sample(requests(2))
        return vllm.made[0].calls


# ------------------------------------------------------------------------------------------------------ several processes


def test_neighbours_make_an_engine(monkeypatch):
    """Four processes, two engines: what a rank's engine is given, of five requests. The parts of one must run the same."""
    from tests.rollout.vllm_cases import requests, sampler_of

    given = []
    for rank in range(4):
        ranks = RankGroup(rank, 4, lambda value: [value] * 4)
        monkeypatch.setattr(collective, "all_ranks", lambda ranks=ranks: ranks)
        with stand_in_vllm.installed() as vllm:
            sampler = sampler_of(tp=2)
            sampler.update_weights((name, torch.ones(2)) for name in ("a", "b"))
            engine = vllm.made[0]
            generate = engine.generate
            engine.generate = lambda prompts, *args, generate=generate, **options: (
                given.append([prompt["prompt_token_ids"][0] - 10 for prompt in prompts]),
                generate(prompts, *args, **options),
            )[1]
            sampler.sample(requests(5))
    assert given == [[0, 1], [0, 1], [2, 3, 4], [2, 3, 4]]


def test_a_failed_load_is_said_on_every_rank():
    lines = run_case(2, "tests.rollout.vllm_cases:a_failed_load_is_said_on_every_rank", bad_rank=1)
    assert lines[0] == lines[1] and "on rank 1 (ValueError: a tensor of a wrong shape);" in lines[0]


def test_a_failed_load_moves_no_generators():
    """What was trained is saved then, with the actor's generators, and goes on to the bit."""
    assert run_case(2, "tests.rollout.vllm_cases:generators_moved_by_a_failed_load") == []


def test_a_cache_that_finds_no_memory_is_said_on_every_rank():
    lines = run_case(2, "tests.rollout.vllm_cases:a_cache_without_memory_is_said_on_every_rank", bad_rank=1)
    key = "rollout.server.memory_fraction: vLLM inside the trainer does not get its memory back on rank"
    why = "(RuntimeError: CUDA Error: out of memory at cumem_allocator.cpp:62); give less, or set train.offload_idle to always"
    without = "rollout.backend: vLLM inside the trainer has no weights: they were not handed over"
    assert lines == [f"{key} 1 {why}", without] * 2


@pytest.mark.parametrize(
    ("bad_rank", "wakes", "why"),
    [
        (0, False, "RuntimeError: CUDA Error: out of memory at cumem_allocator.cpp:62"),
        (1, True, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB."),
    ],
)
def test_weights_that_find_no_memory_are_said_on_every_rank(bad_rank, wakes, why):
    """The same command would end so again."""
    case = "tests.rollout.vllm_cases:weights_without_memory_are_said_on_every_rank"
    lines = run_case(2, case, bad_rank=bad_rank, wakes=wakes)
    without = "rollout.backend: vLLM inside the trainer has no weights: they were not handed over"
    assert lines == [lines[0], without] * 2
    assert lines[0].startswith(
        f"rollout.backend: vLLM inside the trainer has not taken the actor's weights on rank {bad_rank} ({why});"
    )
    assert "train.offload_idle to always" in lines[0] and "rollout.server.memory_fraction" in lines[0]


def test_a_run_that_an_error_ends_waits_for_no_group():
    assert not run_case(2, "tests.rollout.vllm_cases:a_run_that_an_error_ends_waits_for_no_group")


def test_one_tensor_travels_at_a_time():
    most = run_case(2, "tests.rollout.vllm_cases:one_tensor_travels_at_a_time")
    assert max(most) <= 2, most  # of six: gloo's thread lets go of one a moment after it has come


# --------------------------------------------------------------------------------------------------------------- config


def test_keys_reach_vllm():
    config = ServerConfig(memory_fraction=0.3, tp=4)
    made = {
        gpu: engine_arguments(config, path="/nowhere", dtype="bfloat16", max_length=77, mode="raw_logprobs", gpu=gpu)
        for gpu in (True, False)
    }
    shared = {
        "model": "/nowhere", "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 77, "logprobs_mode": "raw_logprobs",
        "distributed_executor_backend": "external_launcher", "tensor_parallel_size": 4,
    }  # fmt: skip
    assert made[False] == shared | {"enforce_eager": True}
    assert made[True] == shared | {"enforce_eager": False, "gpu_memory_utilization": 0.3, "enable_sleep_mode": True}


def test_what_an_engine_cannot_be_split_into_is_refused():
    rollout = config_of(server={"tp": 4}).rollout
    check_inside(rollout, 8, {"num_attention_heads": 8})
    with pytest.raises(
        ConfigError, match=r"rollout.server.tp: value 4 does not divide the number of processes, 6; give 2 or 3"
    ):
        check_inside(rollout, 6, {"num_attention_heads": 8})
    with pytest.raises(ConfigError, match=r"value 4 does not divide the model's 14 attention heads; give 1 or 2"):
        check_inside(rollout, 8, {"num_attention_heads": 14})
    with pytest.raises(ConfigError, match="14 attention heads"):
        check_inside(rollout, 8, {"text_config": {"num_attention_heads": 14}})


def test_a_dry_run_says_how_many_engines_there_are():
    dims = ParallelDims(world_size=8)
    config = config_of(server={"tp": 2, "memory_fraction": 0.8})
    assert COMMAND.describe(config, COMMAND.parts(config)[:1], [dims])[-1] == (
        "rollout: vLLM inside the trainer, 4 engines of tp 2, with 0.8 of each GPU's memory while sampling"
    )


@pytest.mark.parametrize("gpu, words", [(True, "for the CPU here, and the actor is on a GPU"), (False, "for GPUs here, and the actor is on the CPU")])  # fmt: skip
def test_the_other_build_of_vllm_is_refused(gpu, words):
    with stand_in_vllm.installed(cpu=gpu), pytest.raises(ConfigError, match=words):
        import_vllm(gpu)


# ------------------------------------------------------------------------------------------------- the trainer's process


def test_the_process_is_the_trainers_outside(monkeypatch):
    """What vLLM changes is there for vLLM alone, and goes on where it was."""
    monkeypatch.setenv("KEPT", "ours")
    monkeypatch.setenv("TAKEN", "ours")

    def states():
        generators = torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())
        threads = torch.get_num_threads(), torch.set_num_threads
        return dict(os.environ), generators, threads, torch.get_default_dtype(), torch.get_float32_matmul_precision()

    before = states()
    apart = IsolatedState(CPU, {"RANK": "5"}, {"KEPT": "theirs", "NEW": "theirs"})
    with apart.inside():
        assert (os.environ["RANK"], os.environ["KEPT"], os.environ["NEW"]) == ("5", "ours", "theirs")
        os.environ |= {"LD_PRELOAD": "theirs", "KEPT": "changed"}
        del os.environ["TAKEN"]
        torch.manual_seed(1)
        numpy.random.seed(1)
        random.seed(1)
        first = torch.rand(1), numpy.random.rand(), random.random()
        torch.set_default_dtype(torch.bfloat16)
        torch.set_float32_matmul_precision("medium")
        torch.set_num_threads(torch.get_num_threads() + 1)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert states() == before
    with pytest.raises(KeyError), apart.inside():
        assert os.environ["LD_PRELOAD"] == "theirs" and os.environ["KEPT"] == "changed" and "TAKEN" not in os.environ
        second = torch.rand(1), numpy.random.rand(), random.random()
        raise KeyError
    assert states() == before
    torch.manual_seed(1), numpy.random.seed(1), random.seed(1)
    assert (first, second) == tuple((torch.rand(1), numpy.random.rand(), random.random()) for _ in range(2))


class Stream:
    """A CUDA stream, as far as it waits for others."""

    def __init__(self, name: str, waits: list[str]) -> None:
        self.name, self._waits = name, waits

    def wait_stream(self, other: Stream) -> None:
        self._waits.append(f"{self.name} waits for {other.name}")


def test_the_current_cuda_stream_is_the_trainers_outside(monkeypatch):
    """vLLM makes one of its own the current one on a GPU; neither side begins before the other has ended."""
    waits: list[str] = []
    ours, theirs = Stream("ours", waits), Stream("theirs", waits)
    current = [ours]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: None)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    apart = IsolatedState(torch.device("cuda", 0), {})
    with apart.inside():
        assert current[-1] is ours
        torch.cuda.set_stream(theirs)
    assert current[-1] is ours and waits == ["ours waits for theirs"]
    with apart.inside():
        assert current[-1] is theirs and waits[1:] == ["theirs waits for ours"]
    assert current[-1] is ours and waits[2:] == ["ours waits for theirs"]
