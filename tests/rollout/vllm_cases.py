"""Cases of vLLM inside the trainer, run in worlds (tests/engine/harness.py) by test_vllm_parts.py."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from mrl.config.ppo import ServerConfig
from mrl.engine import collective
from mrl.engine.rng import Generators
from mrl.engine.sampling import SamplingKey, SamplingParams
from mrl.errors import ServerError
from mrl.rollout.base import SampleRequest
from mrl.rollout.vllm_local import VLLMSampler
from tests.rollout import stand_in_vllm

CPU = torch.device("cpu")


def sampler_of(tp: int = 1) -> VLLMSampler:
    return VLLMSampler(
        ServerConfig(tp=tp), path="/nowhere", dtype="float32", temperature=1.0, max_length=64, device=CPU
    )


def stream(value: float, *more: str) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream that every rank takes part in, as an engine's is."""
    for name in ("a", "b", *more):
        own = {} if dist.get_rank() else {name: torch.full((2,), value)}
        yield from collective.from_main(own, {name: ((2,), torch.float32)}, CPU)


def requests(count: int) -> list[SampleRequest]:
    return [SampleRequest([10 + i], 4, SamplingParams(), SamplingKey(sample=i)) for i in range(count)]


def error_of(call: Callable[[], object]) -> str:
    """What a call says that ends in an error of servers."""
    with pytest.raises(ServerError) as caught:
        call()
    return str(caught.value)


def a_failed_load_is_said_on_every_rank(bad_rank: int) -> list[str]:
    """Only `bad_rank` cannot load; the stream is read to its end, so that nothing hangs. Then the next hand-over goes well."""
    with stand_in_vllm.installed() as vllm:
        vllm.names = ["a", "b", "c", "d"]
        sampler = sampler_of()
        engine, load = vllm.made[0], vllm.made[0].model.load_weights
        if dist.get_rank() == bad_rank:
            engine.model.load_weights = lambda weights: load(("faulty", t) if n == "b" else (n, t) for n, t in weights)
        said = error_of(lambda: sampler.update_weights(stream(1.0, "c", "d")))
        assert "has no weights" in error_of(lambda: sampler.sample(requests(2))), "of which some are new"
        sampler.sleep()
        assert not engine.there, "the device's memory is free, for what is saved then"
        engine.model.load_weights = load
        sampler.update_weights(stream(2.0, "c", "d"))
        assert len(sampler.sample(requests(2))) == 2
    return list(collective.all_ranks().gather(said))


def generators_moved_by_a_failed_load() -> list[str]:
    """Whose generators are elsewhere after a load that fails in the middle of a stream, in which the actor's are in use."""
    actor, trainer = Generators(3, CPU), Generators(4, CPU)

    def actors() -> Iterator[tuple[str, torch.Tensor]]:
        with actor.installed():
            yield from stream(1.0, "c", "d")

    with stand_in_vllm.installed() as vllm, trainer.installed():
        vllm.names = ["a", "b", "c", "d"]
        sampler = sampler_of()
        load = vllm.made[0].model.load_weights
        vllm.made[0].model.load_weights = lambda weights: load(
            ("faulty", t) if n == "b" else (n, t) for n, t in weights
        )
        before = {"trainer": trainer.states()}
        with actor.installed():
            before["actor"] = actor.states()
        error_of(lambda: sampler.update_weights(actors()))
        moved = [] if torch.equal(trainer.states()["host"], before["trainer"]["host"]) else ["trainer"]
        with actor.installed():
            return moved + ([] if torch.equal(actor.states()["host"], before["actor"]["host"]) else ["actor"])


def a_cache_without_memory_is_said_on_every_rank(bad_rank: int) -> list[str]:
    with stand_in_vllm.installed() as vllm:
        sampler = sampler_of()
        if dist.get_rank() == bad_rank:
            vllm.no_room = {"kv_cache"}
        sampler.update_weights(stream(1.0))
        said = [error_of(sampler.wake), error_of(lambda: sampler.sample(requests(2)))]
        sampler.sleep()
    return [line for lines in collective.all_ranks().gather(said) for line in lines]


def weights_without_memory_are_said_on_every_rank(bad_rank: int, wakes: bool) -> list[str]:
    """wakes: it is the load that finds no memory, after the weights' own has come back."""

    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    with stand_in_vllm.installed() as vllm:
        sampler = sampler_of()
        if dist.get_rank() == bad_rank and wakes:
            vllm.made[0].model.load_weights = load
        elif dist.get_rank() == bad_rank:
            vllm.no_room = {"weights"}
        weights = stream(1.0)
        said = [error_of(lambda: sampler.update_weights(weights)), error_of(lambda: sampler.sample(requests(2)))]
        assert next(weights, None) is None, "other ranks are in the stream, too"
        sampler.sleep()
    return [line for lines in collective.all_ranks().gather(said) for line in lines]


def a_run_that_an_error_ends_waits_for_no_group() -> bool:
    """Ending an engine's groups is collective, and other ranks may be gone."""
    with stand_in_vllm.installed() as vllm:
        sampler = sampler_of()
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            sampler.close()
        return vllm.made[0].ended


def one_tensor_travels_at_a_time() -> list[int]:
    """The most tensors that a rank has alive at once, of a stream that nobody keeps; each arrives as it was sent."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def everything() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(6):
            dtype = (torch.float32, torch.bfloat16, torch.int64)[i % 3]
            own = {} if dist.get_rank() else {f"t{i}": torch.arange(12).reshape(3, 4).to(dtype).t() + i}
            yield from collective.from_main(own, {f"t{i}": ((4, 3), dtype)}, CPU)

    for i, (name, tensor) in enumerate(everything()):
        alive.add(tensor)
        most = max(most, len(alive))
        dtype = (torch.float32, torch.bfloat16, torch.int64)[i % 3]
        assert name == f"t{i}" and torch.equal(tensor, torch.arange(12).reshape(3, 4).to(dtype).t() + i)
        assert tensor.dtype == dtype
        del tensor
    assert int(os.environ["WORLD_SIZE"]) == dist.get_world_size()
    return list(collective.all_ranks().gather(most))
