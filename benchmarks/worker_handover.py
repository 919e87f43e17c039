"""The actor's engine, as `mrl ppo` builds it, hands its weights to a vLLM server by one path after the other."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import os
import pathlib
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
from measure import read_arguments

from mrl.batch import make_batch
from mrl.config.ppo import ServerConfig
from mrl.config.schema import EngineConfig, LoraConfig, ModelConfig, RoleConfig
from mrl.engine import links
from mrl.engine.base import BaseEngine
from mrl.engine.registry import build_engine
from mrl.rollout import handover, vllm
from mrl.rollout.adapters import AdapterTraining

TOLERANCE = {"float32": 2e-3, "bfloat16": 0.1}  # mean difference of log-probs, engine and server
TEXT = [random.Random(0).randrange(5, 800) for _ in range(48)]
SECONDS: collections.Counter[str] = collections.Counter()
"""Wall seconds of what was entered through `timed` and `gathered`, in any thread."""


def timed(owner: Any, name: str, phase: str) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            SECONDS[phase] += time.perf_counter() - began

    setattr(owner, name, call)


def timed_items(items: Iterator[Any], phase: str) -> Iterator[Any]:
    """`items`, whose making is timed."""
    while True:
        began = time.perf_counter()
        try:
            item = next(items)
        except StopIteration:
            return
        finally:
            SECONDS[phase] += time.perf_counter() - began
        yield item


def hook() -> None:
    """Times the parts of a hand-over where they are called."""
    make: Callable[..., Iterator[Any]] = links.buckets
    links.buckets = lambda *args: timed_items(make(*args), "packing")
    timed(handover.LinkWeightSync, "_send_one", "under way")
    timed(handover.WeightFolders, "write", "packing")
    for name in ("pause", "begin", "finish", "resume"):
        timed(vllm.VLLMServer, name, "around")


def phases(of_server: dict[str, float]) -> dict[str, float]:
    """Seconds of a hand-over's parts; of the server's process as it says them."""
    receive = of_server.get("receive", 0.0)
    return {
        "gather": SECONDS["gather"],
        "into buckets or files": SECONDS["packing"] - SECONDS["gather"],
        "buckets under way": SECONDS["under way"],
        "of these, server receives": receive,
        "server loads": of_server.get("mrl_reload", 0.0) + of_server.get("update_weights", 0.0) - receive,
        "pause, begin, finish, resume": SECONDS["around"],
    }


def server_cpu(process: psutil.Process) -> float:
    """CPU seconds of the server and what it has started."""
    found = 0.0
    for each in (process, *process.children(recursive=True)):
        times = each.cpu_times()
        found += times.user + times.system
    return found


def own_log_probs(engine: BaseEngine) -> list[float]:
    whole = make_batch([TEXT], [[1.0] * len(TEXT)])
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(engine.shard_data(whole), forward_only=True)
    return engine.unshard_data(predictions, whole)["log_probs"].tolist()


def gap(a: list[float], b: list[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


def scale(engine: BaseEngine, factor: float) -> None:
    with torch.no_grad():
        for tensor in engine.offload._tensors["parameters"]():
            tensor.mul_(factor)


def other_than(before: list[float], engine: BaseEngine, scales: Iterator[float], tolerance: float) -> list[float]:
    """Gives the actor weights with other log-probs than `before`, which a path that carries nothing would leave there.

    Returns their log-probs.
    """
    found = before
    while gap(found, before) <= tolerance:
        scale(engine, next(scales))
        found = own_log_probs(engine)
    return found


def gather_turn(engine: BaseEngine, times: int) -> dict[str, Any]:
    """Reads the stream of weights and does nothing with it."""
    walls = []
    for _ in range(1 + times):
        began = time.perf_counter()
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in engine.hf_weights())
        walls.append(time.perf_counter() - began)
    return {"walls": walls[1:], "bytes": size}


def turn(engine: BaseEngine, spec: dict[str, Any], keys: dict[str, Any], scales: Iterator[float]) -> dict[str, Any]:
    """Joins, hands over once, and then as often as is measured. scales: factors that the actor's weights get."""
    tolerance, server = TOLERANCE[spec["dtype"]], psutil.Process(spec["server_pid"])
    with tempfile.TemporaryDirectory(prefix=spec["prefix"], dir=keys.get("folder")) as folder:
        config = ServerConfig(urls=(spec["url"],), handover=keys["way"], bucket_mb=keys["bucket_mb"])
        sampler = vllm.VLLMServerSampler(
            config, is_main=True, on_main=engine.on_main, weights_dir=folder, device=engine.device
        )
        [of_server] = sampler._servers
        expected = other_than(sampler.log_probs(TEXT)[0], engine, scales, tolerance)
        walls, cpu, cpu_of_server = [], 0.0, 0.0
        for number in range(1 + spec["handovers"]):
            os.sync()  # what was written before is not this path's to wait for
            SECONDS.clear()
            of_server.http.post("/collective_rpc", {"method": "handover_seconds"})
            own, its, began = time.process_time(), server_cpu(server), time.perf_counter()
            sampler.update_weights(timed_items(engine.hf_weights(), "gather"))
            walls.append(time.perf_counter() - began)
            if number:
                cpu, cpu_of_server = cpu + time.process_time() - own, cpu_of_server + server_cpu(server) - its
        parts = phases(of_server.http.post("/collective_rpc", {"method": "handover_seconds"})["results"][0])
        after = sampler.log_probs(TEXT)[0]
        sampler.close()
    if not gap(after, expected) <= tolerance:
        raise SystemExit(f"{keys}: the server's log-probs differ from the actor's by {gap(after, expected):.3g}")
    count = spec["handovers"]
    return {
        "first": walls[0],
        "walls": walls[1:],
        "cpu": cpu / count,
        "server_cpu": cpu_of_server / count,
        "phases": parts,
    }


def adapters_turn(spec: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Hands over adapters of all linear layers, others each time, to a server that holds the base."""
    lora = LoraConfig(rank=keys["rank"])
    engine = engine_of(spec, lora)
    server, generator = psutil.Process(spec["server_pid"]), torch.Generator().manual_seed(0)
    adapted = AdapterTraining(spec["model"], lora)
    with tempfile.TemporaryDirectory(prefix=spec["prefix"], dir=keys["folder"]) as folder:
        config = ServerConfig(urls=(spec["url"],), lora="adapter")
        sampler = vllm.VLLMServerSampler(
            config, is_main=True, on_main=engine.on_main, weights_dir=folder, device=engine.device, adapted=adapted
        )
        walls, cpu, cpu_of_server, before = [], 0.0, 0.0, sampler.log_probs(TEXT)[0]
        for number in range(1 + spec["handovers"]):
            shapes = {name: tensor.shape for name, tensor in engine.adapter_weights()}
            engine.set_adapters({n: torch.randn(s, generator=generator) / s[1] ** 0.5 for n, s in shapes.items()})
            os.sync()
            own, its, began = time.process_time(), server_cpu(server), time.perf_counter()
            sampler.update_weights(engine.adapter_weights())
            walls.append(time.perf_counter() - began)
            if number:
                cpu, cpu_of_server = cpu + time.process_time() - own, cpu_of_server + server_cpu(server) - its
            after, expected = sampler.log_probs(TEXT)[0], own_log_probs(engine)
            apart = gap(after, expected)
            if not apart <= TOLERANCE[spec["dtype"]] < gap(after, before):
                raise SystemExit(f"{keys}: the server's log-probs differ from the actor's by {apart:.3g}")
            before = after
        sampler.close()
    size, count = (
        sum(tensor.numel() * tensor.element_size() for _, tensor in engine.adapter_weights()),
        spec["handovers"],
    )
    return {
        "first": walls[0], "walls": walls[1:], "cpu": cpu / count, "server_cpu": cpu_of_server / count, "bytes": size,
    }  # fmt: skip


def engine_of(spec: dict[str, Any], lora: LoraConfig | None = None) -> BaseEngine:
    engine = build_engine(
        RoleConfig(
            model=ModelConfig(path=spec["model"], dtype=spec["dtype"], lora=lora),
            engine=EngineConfig(backend=spec["backend"], device=spec["device"]),
            optimizer=None,
        )
    )
    engine.init_model()
    return engine


class Notes:
    """The file that handover.py reads, however this process ends: finished turns, the one under way and what it said."""

    def __init__(self, out: str, limit_s: float | None) -> None:
        self.out, self.limit_s = pathlib.Path(out), limit_s
        self.turns: dict[str, dict[str, Any]] = {}

    def write(self, under_way: str | None = None, said: str | None = None) -> None:
        whole = {"turns": self.turns, "under_way": under_way, "said": said, "pid": os.getpid()}
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(whole), encoding="utf-8")
        part.replace(self.out)

    @contextlib.contextmanager
    def under_way(self, name: str | None) -> Iterator[None]:
        """What happens in the block is a turn's, or that of all where name is None. This process ends when it is too slow."""
        self.write(name)
        timer = threading.Timer(self.limit_s or 0.0, self._end, (name,))
        if self.limit_s is not None:
            timer.start()
        try:
            yield
        except BaseException as error:
            text = str(error) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
            self.write(name, (text.splitlines() or ["it said nothing"])[0][:200].replace("|", "/"))
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # threads of a broken hand-over may wait for ever
        timer.cancel()

    def _end(self, name: str | None) -> None:
        self.write(name, f"longer than {self.limit_s:g} s")
        os._exit(1)  # whatever waits for something in vain


def main() -> None:
    spec, out = read_arguments()
    subjects, notes = spec["subjects"], Notes(out, spec["limit_s"])
    ways = {keys["way"] for keys in subjects.values()}
    engine: BaseEngine | None = None
    if ways != {"adapters"}:  # those have an engine each
        with notes.under_way(None):
            engine = engine_of(spec)
        hook()
    scales = itertools.cycle((0.5, 2.0))  # powers of two: the weights before come back to the bit
    for name, keys in subjects.items():
        with notes.under_way(name):
            if keys["way"] == "adapters":
                found = adapters_turn(spec, keys)
            elif keys["way"] == "gather":
                found = gather_turn(engine, spec["handovers"])
            else:
                found = turn(engine, spec, keys, scales)
        notes.turns[name] = found
    notes.write()


if __name__ == "__main__":
    main()
