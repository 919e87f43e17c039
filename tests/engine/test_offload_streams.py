"""Order of offload's copies on a GPU, on a simulated one: streams that run as late, or as early, as their waits let them.

    host late     the stream of copies runs only when somebody waits for it: what shrinks or rewrites a storage before its copy
                  to the host has ended loses data
    device late   the current stream runs only when somebody waits for it: a copy to the host that does not wait for the work
                  before it, or that writes a block which is still being read, copies the wrong bytes

Tensors are on the CPU, real, and compared with those of a run without offload. What is not covered: the allocator's own order of
memory that the current stream frees and takes, which is torch's.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mrl.engine import offload
from mrl.engine.offload import KINDS, Offload


class Event:
    """The place in a stream's queue that it was recorded at."""

    def __init__(self, stream: Stream, place: int) -> None:
        self.stream, self.place = stream, place

    def synchronize(self) -> None:
        self.stream.run(self.place)


class Stream:
    """Work in order; `run` does it up to a place. eager: work is done as it comes."""

    def __init__(self, eager: bool) -> None:
        self.eager, self.queue, self.done = eager, [], 0

    def put(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        if self.eager:
            self.run(len(self.queue))

    def run(self, place: int) -> None:
        while self.done < place:
            self.done += 1
            with torch._C.DisableTorchFunction():
                self.queue[self.done - 1]()

    def record_event(self) -> Event:
        return Event(self, len(self.queue))

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Cuda(TorchFunctionMode):
    """Answers for torch.cuda, and puts copies that do not block into the stream that is current."""

    def __init__(self, late: str) -> None:
        super().__init__()
        self.current = self.main = Stream(eager=late == "host")
        self.late, self.pinned, self.streams = late, [], [self.main]

    def empty(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`torch.empty`, which notes what is pinned and pins nothing: megatron's stand-in for a CPU may be in its place."""

        def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            if pin_memory:
                self.pinned.append((args[0], pin_memory))
            return make(*args, **kwargs)

        return empty

    def new_stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream(eager=self.late == "device"))
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream: Stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def frees(self) -> None:
        """Memory that is freed goes to nobody before the work that the current stream was given: torch's allocator has it so."""
        self.main.run(len(self.main.queue))

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.run(len(stream.queue))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            target, source = args

            def copy() -> None:
                for side in (target, source):
                    assert side.untyped_storage().size(), "a copy ran after its storage was shrunk"
                target.copy_(source)

            self.current.put(copy)
            return target
        if func is torch.Tensor.zero_:
            self.current.put(lambda: func(*args))
            return args[0]
        return func(*args, **kwargs)


@pytest.fixture(params=["host late", "device late"])
def cuda(request, monkeypatch):
    simulated = Cuda(request.param.split()[0])
    monkeypatch.setattr(torch.cuda, "Stream", simulated.new_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: simulated.current)
    monkeypatch.setattr(torch.cuda, "stream", simulated.stream)
    monkeypatch.setattr(torch, "empty", simulated.empty(torch.empty))
    monkeypatch.setattr(offload, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(offload, "BLOCK", 1024)
    monkeypatch.setattr(offload, "_shrink", lambda storages, real=offload._shrink: (simulated.frees(), real(storages)))
    with simulated:
        yield simulated


class State:
    """Parameters (two tensors in one storage), gradients and moments of a toy; `gpu` None computes at once, without offload.

    The second moment is a view of the parameters, as fp32 masters are.
    """

    def __init__(self, gpu: Cuda | None, kinds: tuple[str, ...]) -> None:
        self.gpu = gpu
        flat = torch.arange(700, dtype=torch.float32)
        self.of = {
            "parameters": [flat[:300], flat[300:]],
            "gradients": [torch.zeros(300), torch.zeros(400)],
            "optimizer": [torch.zeros(700), flat[100:200]],
        }
        self.seen: list[Tensor] = []
        self.offload = Offload(kinds, {kind: lambda k=kind: self.of[k] for kind in KINDS}, spent=("gradients",))

    def compute(self, *work: Callable[[], None]) -> None:
        for part in work:
            if self.gpu is not None:
                self.gpu.main.put(part)
            else:
                with torch._C.DisableTorchFunction():
                    part()

    def backward(self, by: float) -> None:
        with self.offload.used("parameters", "gradients"):
            for p, g in zip(self.of["parameters"], self.of["gradients"], strict=True):
                self.compute(lambda p=p, g=g: g.add_(p, alpha=by))

    def step(self, by: float) -> None:
        with self.offload.used(*KINDS):
            (moment, _), gradients = self.of["optimizer"], self.of["gradients"]
            self.compute(lambda: moment.mul_(0.5).add_(torch.cat(gradients)))
            for p, m in zip(self.of["parameters"], moment.split([300, 400]), strict=True):
                self.compute(lambda p=p, m=m: p.sub_(m, alpha=0.1 * by))
            self.offload.spend("gradients")
        self.zero()

    def zero(self) -> None:
        with self.offload.used("gradients"):
            for g in self.of["gradients"]:
                self.compute(g.zero_)
            self.offload.spend("gradients")

    def look(self, by: float) -> None:
        with self.offload.used("parameters"):
            place = torch.zeros(700)
            self.seen.append(place)
            self.compute(lambda: place.copy_(torch.cat(self.of["parameters"])))

    def to_host(self, by: float) -> None:
        for kind in KINDS:
            self.offload.park(kind)
        self.offload.wait()
        if self.gpu is not None:
            assert not any(t.untyped_storage().size() for kind in KINDS for t in self.of[kind])

    def to_device(self, by: float) -> None:
        for kind in KINDS:
            self.offload.restore(kind)


def differs(cuda: Cuda, kinds: tuple[str, ...], seed: int, calls: int = 40) -> bool:
    """Whether a random run with offload ends otherwise than without."""
    ours, plain = State(cuda, kinds), State(None, ())
    draw = random.Random(seed)
    for _ in range(calls):
        name = draw.choice(["backward", "backward", "look", "step", "to_host", "to_device"])
        if cuda.late == "device" and name in ("step", "to_host"):
            cuda.main.run(
                len(cuda.main.queue)
            )  # what is dropped is freed in the current stream's order, which is torch's
        by = draw.random()
        getattr(ours, name)(by)
        if not name.startswith("to_"):
            getattr(plain, name)(by)
    ours.to_device(0.0)
    cuda.synchronize()
    pairs = [(a, b) for kind in KINDS for a, b in zip(ours.of[kind], plain.of[kind], strict=True)]
    return any(not torch.equal(a, b) for a, b in [*pairs, *zip(ours.seen, plain.seen, strict=True)])


@pytest.mark.parametrize("kinds", [(), ("gradients",), ("parameters", "optimizer"), KINDS], ids=" ".join)
def test_copies_in_the_background_change_no_bit(cuda, kinds):
    assert not any(differs(cuda, kinds, seed) for seed in range(6))


def shrinks_at_once(monkeypatch):
    to_host = offload.StreamCopies.to_host

    def at_once(self, pairs):
        pairs = list(pairs)
        to_host(self, pairs)
        return None  # as if the copies had ended

    monkeypatch.setattr(offload.StreamCopies, "to_host", at_once)


def brings_it_in_another_stream(monkeypatch):
    def to_device(self, pairs):
        with torch.cuda.stream(self.stream):
            for host, device in pairs:
                device.copy_(host, non_blocking=True)

    monkeypatch.setattr(offload.StreamCopies, "to_device", to_device)


@pytest.mark.parametrize("cuda", ["host late"], indirect=True)
@pytest.mark.parametrize("fault", [shrinks_at_once, brings_it_in_another_stream])
def test_the_simulation_sees_a_wrong_order(cuda, fault, monkeypatch):
    """That nobody waits for the work before is a mutant (tests/mutants/table.py)."""
    fault(monkeypatch)
    try:
        found = any(differs(cuda, KINDS, seed) for seed in range(6))
    except AssertionError as error:
        found = "after its storage was shrunk" in str(error)
    assert found


@pytest.mark.parametrize("cuda", ["host late"], indirect=True)
def test_what_is_used_again_before_its_copy_has_ended_stays(cuda):
    state = State(cuda, ("optimizer",))
    copies = cuda.streams[1]
    state.backward(1.0)
    state.step(1.0)
    assert copies.done < len(copies.queue) and state.of["optimizer"][0].untyped_storage().size()
    before = len(cuda.main.queue)
    with state.offload.used("optimizer"):
        returned = cuda.main.queue[before:]
    assert len(returned) == 1, "the current stream waits for the copy, and nothing comes back"
    state.look(1.0)
    state.offload.wait()
    assert not state.of["optimizer"][0].untyped_storage().size()


@pytest.mark.parametrize("cuda", ["host late"], indirect=True)
@pytest.mark.parametrize("kinds", [("optimizer",), ("parameters", "optimizer"), KINDS], ids=" ".join)
@pytest.mark.parametrize("used", [("parameters",), ("parameters", "gradients")], ids=" ".join)
def test_the_memory_of_what_waits_is_free_while_the_model_computes(cuda, kinds, used):
    """A forward and a backward pass take it, though nobody has moved anything to the device since the copy began."""
    state = State(cuda, kinds)
    for _ in range(2):
        state.backward(1.0), state.step(1.0)
        with state.offload.used(*used):
            assert not state.of["optimizer"][0].untyped_storage().size()


@pytest.mark.parametrize("cuda", ["host late"], indirect=True)
def test_what_takes_memory_frees_first_what_is_on_its_way(cuda):
    state = State(cuda, KINDS)
    storages = {kind: state.of[kind][0].untyped_storage() for kind in KINDS}
    assert [storage.size() for storage in storages.values()] == [0, 0, 0], "before any use"
    state.backward(1.0)
    assert storages["parameters"].size() and storages["gradients"].size() and not storages["optimizer"].size()
    with state.offload.used("optimizer"):
        assert not storages["parameters"].size() and not storages["gradients"].size()


@pytest.mark.parametrize("cuda", ["host late"], indirect=True)
def test_kinds_that_are_used_together_do_not_send_each_other_away(cuda):
    state = State(cuda, KINDS)
    state.backward(1.0)
    before = len(cuda.main.queue)
    with state.offload.used("optimizer", "parameters"):
        assert len(cuda.main.queue) - before == 1 + 3, "a wait for the parameters, and 2,800 bytes of moments"


@pytest.mark.parametrize("cuda", ["device late"], indirect=True)
def test_a_block_is_not_written_while_another_stream_reads_it(cuda):
    """Two streams of the trainer's take turns: what one of them brings back waits in a block that the other one is given."""
    state, other = State(cuda, ()), Stream(eager=False)
    cuda.streams.append(other)
    state.offload.park("parameters")
    state.offload.wait()
    with cuda.stream(other):
        state.offload.restore("parameters")
    assert other.done < len(other.queue)
    state.offload.park("optimizer")
    assert len(state.offload._host.blocks) == 3, "of one kind alone"
    cuda.synchronize()
    assert torch.equal(torch.cat(state.of["parameters"]), torch.arange(700.0))


@pytest.mark.parametrize("cuda", ["host late"], indirect=True)
def test_all_kinds_are_on_their_way_at_once(cuda):
    state = State(cuda, ())
    state.backward(1.0)
    for kind in KINDS:
        state.offload.park(kind)
    copies = cuda.streams[1]
    waiting = copies.queue[copies.done :]
    # behind a wait for each kind's work: 2,800 bytes in blocks of 1,024, 1,200 and (from byte 1,536 on) 1,600, and 2,800
    assert len(waiting) == 3 + 3 + (2 + 3) + 3
    state.offload.wait()
    assert copies.done == len(copies.queue)


@pytest.mark.parametrize("cuda", ["host late"], indirect=True)
def test_host_memory_is_pinned_once_and_used_again(cuda):
    state = State(cuda, KINDS)
    for _ in range(5):
        state.backward(1.0), state.look(1.0), state.step(1.0), state.to_host(1.0)
    # parameters and moments of 2,800 bytes; gradients of 1,536 and 2,048 bytes, which wait from backward to step
    assert cuda.pinned == [(1024, True)] * (3 + 3 + 4)
    assert state.offload.on_host("gradients") == 0


def test_blocks_are_what_torch_allocates():
    """torch's allocator of pinned memory takes the next power of two."""
    assert offload.BLOCK.bit_count() == 1
    memory = offload.HostMemory()
    assert [t.numel() for t in memory.take(2 * offload.BLOCK + 1, pinned=False)] == [offload.BLOCK] * 3
